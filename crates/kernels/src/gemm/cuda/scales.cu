// A transposed matrix of 32-bit numbers: 32 × 32 at a time, through shared memory.

struct Params {
    const float* from;
    float* to;
    u32 rows, cols;
};

extern "C" __global__ void __launch_bounds__(256) gemm_scales(const __grid_constant__ Params p) {
    // A column more, so that lanes find theirs in different banks.
    __shared__ float tile[32][33];
    u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
#pragma unroll
    for (u32 i = y; i < 32; i += 8) {
        u32 row = blockIdx.x * 32 + i, col = blockIdx.y * 32 + x;
        if (row < p.rows && col < p.cols) tile[i][x] = p.from[(u64)row * p.cols + col];
    }
    __syncthreads();
#pragma unroll
    for (u32 i = y; i < 32; i += 8) {
        u32 row = blockIdx.x * 32 + x, col = blockIdx.y * 32 + i;
        if (row < p.rows && col < p.cols) p.to[(u64)col * p.rows + row] = tile[x][i];
    }
}
