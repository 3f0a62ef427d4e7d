// Tiles of 16×16: sixteen rows, in the hands of several threads, agree on one scale. Read matrix.cuh first.

// What the rows of a tile agree on, in shared memory: `TILES` tiles. Errors are for 4over6 only.
template <class S, int TILES>
struct Squares {
    u32 largest[TILES], amax[TILES];
    float errors[2][16][S::RULE_OF == SIX ? 1 : TILES];
};

// The scale of a square tile. All threads of the block call this; each has `N` rows of tiles, row `row[i]` (0 … 15) of tile
// `tile[i]`, whose maxima are already combined in `largest` and `amax`.
template <class S, Precision P, int N, int TILES>
RULE void square_scales(const Elements<P>* x, const int* tile, const int* row, const Scaling& s, const Direction& d,
                        Squares<S, TILES>& shared, Scaled* out) {
    if constexpr (S::RULE_OF == SIX) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            out[i] = scaled_by_six<S>(from_bits(shared.largest[tile[i]]), from_bits(shared.amax[tile[i]]), s, P);
        }
    } else {
        constexpr Metric metric = METRIC<S>;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float amax = from_bits(shared.amax[tile[i]]);
            four_over_six::Pair bytes = four_over_six::candidate_scales(amax, s.global, S::EDGE);
            shared.errors[0][row[i]][tile[i]] = filtered_error(x[i], inverse_of(bytes.six, s), metric);
            shared.errors[1][row[i]][tile[i]] = filtered_error(x[i], inverse_of(bytes.four, s), metric);
        }
        __syncthreads();
        // One thread per tile decides and leaves the byte in `amax`, with bit 31 set if the rule must.
        int t = threadIdx.x;
        four_over_six::Pair bytes;
        bool ask = false;
        if (t < TILES) {
            float amax = from_bits(shared.amax[t]), largest = from_bits(shared.largest[t]);
            bytes = four_over_six::candidate_scales(amax, s.global, S::EDGE);
            Candidate six = candidate(bytes.six, s), four = candidate(bytes.four, s);
            float e6 = four_over_six::sum_rows(&shared.errors[0][0][t], TILES);
            float e4 = four_over_six::sum_rows(&shared.errors[1][0][t], TILES);
            bool both = PLAIN<S> && covered(six, largest, s);
            Choice choice = both ? filter(six, four, e6, e4, 256, metric) : UNDECIDED;
            if (bytes.six == bytes.four) choice = SIX_WINS;
            ask = choice == UNDECIDED;
            shared.amax[t] = ask ? 0x80000000 | bytes.four << 8 | bytes.six : choice == FOUR_WINS ? bytes.four : bytes.six;
        }
        if (__syncthreads_or(ask)) {
#pragma unroll 1
            for (int i = 0; i < N; i++) {
                u32 pair = shared.amax[tile[i]];
                if (!(pair >> 31)) continue;
                float values[BLOCK];
                // The index is not a constant here; a copy per row keeps the elements in registers.
#pragma unroll
                for (int k = 0; k < N; k++) {
                    if (k == i) unpack(x[k], values);
                }
                for (int c = 0; c < 2; c++) {
                    shared.errors[c][row[i]][tile[i]] = four_over_six::row_error(
                        values, pair >> 8 * c & 255, s.global, metric, (ErrorPath)d.error, S::EDGE);
                }
            }
            __syncthreads();
            if (ask) {
                float e6 = four_over_six::sum_rows(&shared.errors[0][0][t], TILES);
                float e4 = four_over_six::sum_rows(&shared.errors[1][0][t], TILES);
                shared.amax[t] = e4 < e6 ? bytes.four : bytes.six;
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 byte = shared.amax[tile[i]];
            float inverse = inverse_of(byte, s);
            out[i] = {byte, inverse, PLAIN<S> && from_bits(shared.largest[tile[i]]) * inverse <= ORDINARY_LIMIT};
        }
    }
}

template <class S, Precision P, int TILES>
RULE void combine_maxima(const Elements<P>& x, int tile, Squares<S, TILES>& shared) {
    float m = largest(x);
    atomicMax(&shared.largest[tile], to_bits(m));
    atomicMax(&shared.amax[tile], to_bits(counted<S>(x, m)));
}
