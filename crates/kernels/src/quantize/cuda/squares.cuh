// Tiles of 16×16: sixteen rows, held by several threads, share one scale. Read matrix.cuh first.

// What the rows of a tile share, in shared memory, for `TILES` tiles. Errors are for 4over6 only.
template <class S, int TILES>
struct Squares {
    u32 largest[TILES], amax[TILES];
    float errors[2][16][S::RULE_OF == SIX ? 1 : TILES];
};

// The scale of a tile, the multiplier of its elements, and whether it is ordinary. For 4over6 also
// the codes of a row of an ordinary tile, without signs.
struct Scaled {
    u32 byte;
    float inverse;
    bool ordinary;
    u32 codes[2];
};

// The scales of square tiles. All threads of the block call this; each has `N` rows of tiles, row
// `row[i]` (0 … 15) of tile `tile[i]`, whose maxima are already combined in `largest` and `amax`.
// `reload(tile, row)` returns the elements of any row again.
template <class S, Precision P, int N, int TILES, class Reload>
RULE void square_scales(const Elements<P>* x, const int* tile, const int* row, const Scaling& s, const Direction& d,
                        Squares<S, TILES>& shared, Scaled* out, Reload reload) {
    float largest[N];
#pragma unroll
    for (int i = 0; i < N; i++) largest[i] = from_bits(shared.largest[tile[i]]);
    if constexpr (S::RULE_OF == SIX) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float amax = from_bits(shared.amax[tile[i]]);
            u32 byte;
            if (s.regular) byte = scale_byte(amax * s.multiplier);
            else byte = profile::block_scale(amax, s.global, S::PROFILE, P, S::SPECIALS);
            float inverse = inverse_of(scale_value(byte), s);
            out[i] = {byte, inverse, s.regular && largest[i] * inverse <= ORDINARY_LIMIT, {0, 0}};
        }
    } else {
        constexpr Metric metric = METRIC<S>;
        u32 codes[N][2][2];  // with six and with four
#pragma unroll
        for (int i = 0; i < N; i++) {
            Candidates c = candidates(largest[i], s);
            Filtered six = filtered(x[i], c.six.inverse, metric), four = filtered(x[i], c.four.inverse, metric);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                codes[i][0][h] = joined(six.even[h], six.odd[h]), codes[i][1][h] = joined(four.even[h], four.odd[h]);
            }
            shared.errors[0][row[i]][tile[i]] = six.error;
            shared.errors[1][row[i]][tile[i]] = four.error;
        }
        __syncthreads();
        // One thread per tile decides, and leaves the byte in `amax`, with bit 8 set if it is that
        // of four; or asks for the rule's own errors: the candidates' bytes, with bit 31 set, and
        // bit 30 if the tile is not ordinary.
        bool ask = false;
        if (threadIdx.x < TILES) {
            int t = threadIdx.x;
            float amax = from_bits(shared.amax[t]), largest = from_bits(shared.largest[t]);
            Candidates c = candidates(largest, s);
            float six = four_over_six::sum_rows(&shared.errors[0][0][t], TILES);
            float four = four_over_six::sum_rows(&shared.errors[1][0][t], TILES);
            bool ordinary = covered(c, largest, s);
            Choice choice = ordinary ? filter(c, six, four, 256, metric) : UNDECIDED;
            four_over_six::Pair bytes = {c.six.byte, c.four.byte};
            if (!ordinary) bytes = four_over_six::candidate_scales(amax, s.global, S::SPECIALS);
            ask = choice == UNDECIDED;
            u32 question = 0x80000000 | (ordinary ? 0 : 0x40000000) | bytes.four << 8 | bytes.six;
            shared.amax[t] = ask ? question : choice == FOUR_WINS ? 0x100 | bytes.four : bytes.six;
        }
        if (__syncthreads_or(ask)) {
            // A warp has a tile: its lanes the 16 rows with either candidate.
            int lane = threadIdx.x % 32, r = lane % 16, which = lane / 16;
#pragma unroll 1
            for (int t = threadIdx.x / 32; t < TILES; t += blockDim.x / 32) {
                u32 question = shared.amax[t];
                if (!(question >> 31)) continue;
                float values[BLOCK];
                unpack(reload(t, r), values);
                u32 byte = question >> 8 * which & 255;
                ErrorPath path = (ErrorPath)d.error;
                float error, value = scale_value(byte);
                if (question >> 30 & 1) error = four_over_six::row_error(values, byte, s.global, metric, path, S::SPECIALS);
                else error = ordinary_error(values, value, inverse_of(value, s), s.global, metric, path);
                shared.errors[which][r][t] = error;
                __syncwarp();
                float six = four_over_six::sum_rows(&shared.errors[0][0][t], TILES);
                float four = four_over_six::sum_rows(&shared.errors[1][0][t], TILES);
                __syncwarp();
                if (lane == 0) shared.amax[t] = four < six ? 0x100 | (question >> 8 & 255) : question & 255;
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 byte = shared.amax[tile[i]] & 255;
            bool four = shared.amax[tile[i]] >> 8;
            u32 low = four ? codes[i][1][0] : codes[i][0][0], high = four ? codes[i][1][1] : codes[i][0][1];
            float inverse = inverse_of(scale_value(byte), s);
            out[i] = {byte, inverse, s.regular && largest[i] * inverse <= ORDINARY_LIMIT, {low, high}};
        }
    }
}

template <class S, Precision P, int TILES>
RULE void combine_maxima(const Elements<P>& x, int tile, Squares<S, TILES>& shared) {
    float m = largest(x);
    atomicMax(&shared.largest[tile], to_bits(m));
    atomicMax(&shared.amax[tile], to_bits(counted<S>(x, m)));
}

template <class S, Precision P>
RULE u64 square_codes(const Elements<P>& x, const Scaled& s, const Scaling& scaling, const Direction& d, const Position& at) {
    if (S::RULE_OF != SIX && PLAIN<S> && s.ordinary) return with_signs(s.codes[0], s.codes[1], x);
    return codes_of<S>(x, s.byte, s.inverse, s.ordinary, scaling.global, d, at);
}
