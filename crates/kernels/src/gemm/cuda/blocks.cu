// What a product on block-scaled tensor cores needs beside codes: the scales of both operands in
// tiles of 128 × 4, which these units read, and the two factors of the product, in one launch.
// Beside them a note of what these units do not have: negative scales of NVFP4, and values of MXFP8
// below the normal numbers of binary32. Settings before this text: MX, whether the operands are
// MXFP8 instead of NVFP4; those of output.cuh.

struct Matrix {
    const u8* codes;
    const u8* scales;
    u8* to;                // null where scales are in tiles already
    u64 rows, across;      // of the scales as a product takes them, along K
    u64 down, right;       // from a scale to the one of the next row and of the next column
    u64 code, code_right;  // from the first code of a row to that of the next, and to the next code
    u32 groups;            // of threads for it
    u32 by_columns;        // whether neighbouring threads have neighbouring rows
};

struct Params {
    Matrix a, b;
    Side left, right;
    float* factors;  // α and β
    u32* odd;        // the mark if these units do not have a value
    float alpha, beta;
    u64 mark;
};
static_assert(sizeof(Params) == 240, "as in blocks.rs");

constexpr u32 THREADS = 256;

// Whether units that have no such scale need not have it: all that it scales is zero.
RULE bool all_zero(const Matrix& m, u64 row, u64 column) {
    const u8* codes = m.codes + row * m.code + column * MX_BLOCK * m.code_right;
    u32 any = 0;
#pragma unroll 1
    for (u32 i = 0; i < MX_BLOCK; i++) any |= codes[i * m.code_right] & 0x7F;
    return any == 0;
}

RULE bool is_odd(const Matrix& m, u64 row, u64 column, u32 byte) {
    return MX ? byte < fp8::LEAST_NORMAL && !all_zero(m, row, column) : byte >= 0x80;
}

// Four neighbouring scales of a row, which stay neighbours; padding is zero.
RULE void arrange(const Matrix& m, u32 group, u32* odd, u32 mark) {
    u64 fours = (m.across + 3) / 4, padded = (m.rows + 127) / 128 * 128;
    u64 index = (u64)group * THREADS + threadIdx.x;
    if (index >= fours * padded) return;
    u64 row = m.by_columns ? index % padded : index / fours;
    u64 column = (m.by_columns ? index / padded : index % fours) * 4;
    u64 tiled = swizzle::offset(row, column, m.across);
    u32 word = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (row >= m.rows || column + i >= m.across) break;
        u32 byte = m.scales[m.to ? row * m.down + (column + i) * m.right : tiled + i];
        if (is_odd(m, row, column + i, byte)) *odd = mark;
        word |= byte << 8 * i;
    }
    if (m.to) *(u32*)(m.to + tiled) = word;
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_blocks(const __grid_constant__ Params p) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        float denominator = p.left.denominator * p.right.denominator;
        p.factors[0] = numerator(p.left, 0) * numerator(p.right, 0) / denominator * p.alpha;
        p.factors[1] = p.beta;
    }
    if (blockIdx.x < p.a.groups) arrange(p.a, blockIdx.x, p.odd, (u32)p.mark);
    else arrange(p.b, blockIdx.x - p.a.groups, p.odd, (u32)p.mark);
}
