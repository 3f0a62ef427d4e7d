// Products of FP8 operands with each other and with bf16, on tensor cores that multiply numbers of 16
// bits: out = A·Bᵀ. Codes are decoded on the way to shared memory, which is exact: f16 has every
// code, and bf16 too. A scale of 128 values along K is applied to the sum of those 128 products, in
// binary32; MXFP8's scales are powers of two and are applied to values in bf16, exactly unless these
// are too small for it, which is noted.
//
// A block of 256 threads has 128 × 128 outputs, a warp 64 × 32 of them. It takes 64 columns of K at
// a time: while they are multiplied, the next ones are decoded into the other of two buffers, and
// those after them loaded into registers.
//
// Settings before this text: Kind; A and B, the operands' kinds; A_TRANSPOSED and B_TRANSPOSED,
// whether the transposed operand lies in memory; ALIGNED, whether 16 values of a row can be loaded at
// once; MATH; those of output.cuh and parts.cuh. Read codes.cuh first.

struct Params {
    Operand a, b;
    Output output;
    u64 k;
    u32* inexact;  // the mark if a value does not fit
    u64 mark;
    Part left, right;  // of operands in groups
};
static_assert(sizeof(Params) == 336, "as in tiles.rs");

constexpr u32 SIDE = 128, DEPTH = 64, THREADS = 256, ROW = 2 * DEPTH;
constexpr u32 BAND = 8;
constexpr u32 CHUNKS = SIDE * DEPTH / 16 / THREADS;  // of 16 values that a thread loads
constexpr bool PROMOTES = A == FP8_WIDE || B == FP8_WIDE;

// Sixteen values as they lie: codes in the first half, or bf16; and the scale byte of MXFP8.
struct Chunk {
    uint4 low, high;
    u32 byte;
};

// A thread's row and column of a chunk in the tile: neighbouring threads read neighbouring bytes.
template <bool TRANSPOSED>
RULE void place(u32 i, u32& row, u32& column) {
    u32 at = i * THREADS + threadIdx.x;
    row = TRANSPOSED ? at % SIDE : at / (DEPTH / 16);
    column = (TRANSPOSED ? at / SIDE : at % (DEPTH / 16)) * 16;
}

// Values that cannot be loaded at once, `step` bytes from one to the next.
template <typename T>
RULE void gather(const u8* from, u64 step, u32 count, u32 (&words)[4 * sizeof(T)]) {
    constexpr u32 PER_WORD = 4 / sizeof(T);
#pragma unroll
    for (u32 w = 0; w < 4 * sizeof(T); w++) {
        words[w] = 0;
#pragma unroll
        for (u32 i = 0; i < PER_WORD; i++) {
            u32 at = w * PER_WORD + i;
            if (at < count) words[w] |= (u32) * (const T*)(from + at * step) << 8 * sizeof(T) * i;
        }
    }
}

template <Kind KIND, bool TRANSPOSED>
RULE Chunk load(const Operand& x, u64 row, u64 from, u64 k) {
    Chunk c = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), 127};
    if (row >= x.rows || from >= k) return c;
    if (KIND == FP8_BYTES) c.byte = x.scales[TRANSPOSED ? from / MX_BLOCK * x.across + row : row * x.across + from / MX_BLOCK];
    if (KIND == BRAIN) {
        const u16* values = (const u16*)(x.values + row * x.stride) + from;
        if (ALIGNED) {
            c.low = __ldg((const uint4*)values), c.high = __ldg((const uint4*)values + 1);
            return c;
        }
        u32 w[8];
        gather<u16>((const u8*)values, 2, (u32)min((u64)16, k - from), w);
        c.low = make_uint4(w[0], w[1], w[2], w[3]), c.high = make_uint4(w[4], w[5], w[6], w[7]);
        return c;
    }
    if (!TRANSPOSED && ALIGNED) {
        c.low = __ldg((const uint4*)(x.values + row * x.stride + from));
        return c;
    }
    u32 w[4], count = (u32)min((u64)16, k - from);
    if (TRANSPOSED) gather<u8>(x.values + from * x.stride + row, x.stride, count, w);
    else gather<u8>(x.values + row * x.stride + from, 1, count, w);
    c.low = make_uint4(w[0], w[1], w[2], w[3]);
    return c;
}

// Four codes in f16.
RULE void halves(u32 codes, Format format, u32* words) {
#if HARDWARE_E4M3
    if (format == E4M3) fp8::decode_halves(codes, E4M3, words);
    else fp8::decode_halves(codes, E5M2, words);
#else
    float v[4];
    fp8::decode_four(codes, format, v);
    words[0] = pack_f16(v[0], v[1]), words[1] = pack_f16(v[2], v[3]);
#endif
}

// Writes a chunk to shared memory in the type of the multiplication. A row's pieces of 16 bytes are swizzled: piece p goes to
// p ^ row % 8.
template <Kind KIND>
RULE void store(u8* tile, u32 row, u32 column, const Chunk& c, Format format, const Params& p) {
    uint4 out[2] = {c.low, c.high};
    if (KIND != BRAIN && MATH == F16) {
        u32 codes[4] = {c.low.x, c.low.y, c.low.z, c.low.w}, w[8];
#pragma unroll
        for (u32 i = 0; i < 4; i++) halves(codes[i], format, w + 2 * i);
        out[0] = make_uint4(w[0], w[1], w[2], w[3]), out[1] = make_uint4(w[4], w[5], w[6], w[7]);
    } else if (KIND != BRAIN) {
        float v[16], f = KIND == FP8_BYTES ? e8m0::decode(c.byte) : 1.0f;
        u32 codes[4] = {c.low.x, c.low.y, c.low.z, c.low.w}, w[8];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (format == E4M3) fp8::decode_four(codes[i], E4M3, v + 4 * i);
            else fp8::decode_four(codes[i], E5M2, v + 4 * i);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) w[i] = pack_bf16(v[2 * i] * f, v[2 * i + 1] * f);
        if (KIND == FP8_BYTES && c.byte < fp8::LEAST_NORMAL) {
            for (u32 i = 0; i < 16; i++) {
                if (fp8::lost_in_bf16(v[i] * f, (u16)(w[i / 2] >> 16 * (i % 2)))) *p.inexact = (u32)p.mark;
            }
        }
        out[0] = make_uint4(w[0], w[1], w[2], w[3]), out[1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) *(uint4*)(tile + row * ROW + 16 * ((column / 8 + h) ^ (row % 8))) = out[h];
}

template <Kind KIND>
RULE float scale_of(const Operand& x, u64 row, u64 part) {
    return KIND == FP8_WIDE ? wide_scale(x, row, part) : 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_tiles(const __grid_constant__ Params given) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Params own;
    u32 index = blockIdx.x, group;
    if (GROUPING != ALONE) {
        u32 wide = (u32)((given.output.cols + SIDE - 1) / SIDE);
        if (!find_group(given.left.groups, given.output.rows, SIDE, wide, index, group)) return;
        if (threadIdx.x == 0) own = product_of(given, group);
        __syncthreads();
    }
    const Params& p = GROUPING == ALONE ? given : (const Params&)own;
    constexpr u32 BYTES = SIDE * ROW;  // of one operand's tile
    // Bands of BAND tiles of rows, column after column: concurrent blocks find both operands in the
    // cache.
    u32 wide = (u32)((p.output.cols + SIDE - 1) / SIDE), high = (u32)((p.output.rows + SIDE - 1) / SIDE);
    u32 band = index / (wide * BAND) * BAND, within = index - band * wide, height = min(BAND, high - band);
    u64 first_row = (u64)(band + within % height) * SIDE, first_column = (u64)(within / height) * SIDE;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = warp / 4 * 64, left = warp % 4 * 32;
    float sums[4][4][4] = {}, totals[PROMOTES ? 4 : 1][4][4] = {};
    Chunk a[CHUNKS], b[CHUNKS];
    auto fetch = [&](u64 from) {
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            u32 row, column;
            place<A_TRANSPOSED>(i, row, column);
            a[i] = load<A, A_TRANSPOSED>(p.a, first_row + row, from + column, p.k);
            place<B_TRANSPOSED>(i, row, column);
            b[i] = load<B, B_TRANSPOSED>(p.b, first_column + row, from + column, p.k);
        }
    };
    auto put = [&](u32 stage) {
        u8* to = shared + stage * 2 * BYTES;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            u32 row, column;
            place<A_TRANSPOSED>(i, row, column);
            store<A>(to, row, column, a[i], (Format)p.a.format, p);
            place<B_TRANSPOSED>(i, row, column);
            store<B>(to + BYTES, row, column, b[i], (Format)p.b.format, p);
        }
    };
    u32 steps = (u32)((p.k + DEPTH - 1) / DEPTH);
    fetch(0);
    put(0);
    fetch(DEPTH);
    __syncthreads();
    for (u32 step = 0; step < steps; step++) {
        // The buffer was last read before the previous barrier. Columns beyond K are zeros.
        put((step + 1) % 2);
        fetch((u64)(step + 2) * DEPTH);
        u32 at = (u32)__cvta_generic_to_shared(shared) + step % 2 * 2 * BYTES;
#pragma unroll
        for (u32 h = 0; h < DEPTH / 32; h++) {
            u32 x[4][2][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 row = top + 16 * i + lane % 16, piece = 4 * h + 2 * half + lane / 16;
                    uint4 v = load_matrices(at + row * ROW + 16 * (piece ^ (row % 8)));
                    x[i][half][0] = v.x, x[i][half][1] = v.y, x[i][half][2] = v.z, x[i][half][3] = v.w;
                }
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 row = left + 8 * j + lane % 8, piece = 4 * h + lane / 8;
                uint4 v = load_matrices(at + BYTES + row * ROW + 16 * (piece ^ (row % 8)));
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    mma(sums[i][j], x[i][0], v.x, v.y);
                    mma(sums[i][j], x[i][1], v.z, v.w);
                }
            }
        }
        if (PROMOTES && (step % 2 == 1 || step + 1 == steps)) {
            u64 part = step / 2;
            float columns[4][2];
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                columns[j / 2][j % 2] = scale_of<B>(p.b, first_column + left + 8 * (j / 2) + lane % 4 * 2 + j % 2, part);
            }
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                float row = scale_of<A>(p.a, first_row + top + 16 * (i / 2) + lane / 4 + 8 * (i % 2), part);
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    float& sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
                    float& total = totals[PROMOTES ? i / 2 : 0][j / 2][i % 2 * 2 + j % 2];
                    total += sum * row * columns[j / 2][j % 2];
                    sum = 0.0f;
                }
            }
        }
        __syncthreads();
    }
    // Sums through shared memory, where the tiles were: outputs are then written side by side.
    float* tile = (float*)shared;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            float* at = tile + (top + 16 * (i / 2) + lane / 4 + 8 * (i % 2)) * SIDE + left + 8 * j + lane % 4 * 2;
            const float* from = PROMOTES ? totals[PROMOTES ? i / 2 : 0][j] : sums[i / 2][j];
            *(float2*)at = make_float2(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < SIDE * SIDE / 2; i += THREADS) {
        u64 row = first_row + i / (SIDE / 2), column = first_column + i % (SIDE / 2) * 2;
        if (row >= p.output.rows || column >= p.output.cols) continue;
        float na = numerator(p.output.a, row), y[2];
        u64 at = row * p.output.cols + column;
        bool both = column + 1 < p.output.cols;
#pragma unroll 1
        for (u32 h = 0; h < 1 + both; h++) {
            Factors f = factors(p.output, na, numerator(p.output.b, column + h));
            y[h] = finish(p.output, f, tile[2 * i + h], bias_of(p.output, column + h), at + h);
        }
        if (both && p.output.pairs) {
            store_pair(p.output.out + SIZE * at, y[0], y[1]);
            continue;
        }
        store_output(p.output, at, y[0]);
        if (both) store_output(p.output, at + 1, y[1]);
    }
}
