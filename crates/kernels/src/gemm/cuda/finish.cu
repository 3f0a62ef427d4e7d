// Outputs from sums that a library left in binary32. A thread has two neighbouring columns and every
// row that many groups of threads away. Settings before this text: those of output.cuh.

struct Params {
    Output output;
    const float* sums;  // rows × cols, an even number of columns
    u64 across;         // groups of threads side by side; a multiple of it is launched
};
static_assert(sizeof(Params) == 120, "as in blocks.rs");

extern "C" __global__ void __launch_bounds__(256) gemm_finish(const __grid_constant__ Params p) {
    u32 across = (u32)p.across, down = gridDim.x / across;
    u64 column = 2 * ((u64)(blockIdx.x % across) * 256 + threadIdx.x);
    if (column >= p.output.cols) return;
    PairWriter writer(p.output, column);
    for (u64 row = blockIdx.x / across; row < p.output.rows; row += down) {
        float2 sums = *(const float2*)(p.sums + row * p.output.cols + column);
        writer.write(row, sums.x, sums.y);
    }
}
