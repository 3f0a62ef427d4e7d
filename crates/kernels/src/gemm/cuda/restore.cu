// From prepared weights (weights.cuh) to a matrix of bf16, row by row: values without their global
// scale and times 2⁻⁷, which is exact. 128 threads decode a tile into shared memory, then write its
// rows.

struct Params {
    const u8* weights;
    u8* out;
    u64 rows, cols;  // a multiple of 8
    u32 tiles;       // along K
    u32 count;       // of all tiles
};

extern "C" __global__ void __launch_bounds__(128) gemm_restore(const __grid_constant__ Params p) {
    // A row has 16 bytes more than its values, so that lanes find theirs in different banks.
    __shared__ __align__(16) u32 values[TILE][TILE / 2 + 4];
    u32 t = threadIdx.x, w = t / 32, g = t / 4 % 8, q = t % 4;
    const u8* from = p.weights + (u64)blockIdx.x * TILE_BYTES;
    uint4 codes = ((const uint4*)from)[t];
    uint2 scales = ((const uint2*)(from + TILE_CODES))[t / 4];
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, factors[2][2], x[2][2][4];
    scale_words(scales.x, factors[0]), scale_words(scales.y, factors[1]);
    unpack(words[0], words[1], x[0]), unpack(words[2], words[3], x[1]);
#pragma unroll
    for (u32 step = 0; step < 4; step++) {
        u32 a[4];
        fragment(x[step / 2][step % 2], factors[step / 2][step % 2], a);
#pragma unroll
        for (u32 j = 0; j < 4; j++) values[16 * w + 2 * g + j % 2][8 * step + q + 4 * (j / 2)] = a[j];
    }
    __syncthreads();
    u64 first = (u64)(blockIdx.x / p.tiles) * TILE, column = (u64)(blockIdx.x % p.tiles) * TILE;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = i * 16 + t / 8, part = t % 8;
        if (first + row >= p.rows || column + 8 * part >= p.cols) continue;
        *(uint4*)(p.out + 2 * ((first + row) * p.cols + column + 8 * part)) = *(const uint4*)&values[row][4 * part];
    }
}
