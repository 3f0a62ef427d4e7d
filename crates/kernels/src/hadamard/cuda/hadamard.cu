// The Hadamard transform along rows. Twin of spec's matrix::transform. A thread has a group of 16.
// Settings before this text: INPUT, the type of the elements.

struct Params {
    const u8* x;
    u16* out;
    u64 rows, cols, stride;
    u32 signs, padding;
};

extern "C" __global__ void __launch_bounds__(256) hadamard_rows(const __grid_constant__ Params p) {
    u64 groups = p.cols / BLOCK, index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= p.rows * groups) return;
    u64 at = index / groups * p.stride + index % groups * BLOCK;
    float v[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        v[i] = INPUT == F32 ? ((const float*)p.x)[at + i] : low_element(((const u16*)p.x)[at + i], INPUT);
    }
    hadamard::negate(v, p.signs);
    Elements<BF16> out = transformed(v);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) p.out[index * BLOCK + i] = (u16)(out.w[i / 2] >> 16 * (i % 2));
}
