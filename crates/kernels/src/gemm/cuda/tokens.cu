// NVFP4 tokens as numbers of 16 bits: without their global scale and times 2⁻⁷, which is exact. A
// thread decodes a block. The padding after the last column of a row is multiplied by zeros, which
// the weights have there.

struct Params {
    const u8* codes;
    const u8* scales;
    u8* out;  // rows of whole blocks
    u64 first, rows, cols;  // rows from the first on
    u32 swizzled;
    u32 aligned;  // whether every block's codes start at a multiple of 8 bytes
};

extern "C" __global__ void __launch_bounds__(256) gemm_tokens(const __grid_constant__ Params p) {
#if !defined(PORTABLE) && __CUDA_ARCH__ >= 900
    // The product that follows may start once the work before this kernel has finished.
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x, blocks = (p.cols + BLOCK - 1) / BLOCK, pitch = (p.cols + 1) / 2;
    if (at >= p.rows * blocks) return;
    u64 index = p.first * blocks + at, row = 0, column = 0;
    u32 words[2] = {};
    if (p.aligned && !p.swizzled) {
        uint2 codes = __ldg((const uint2*)p.codes + index);
        words[0] = codes.x, words[1] = codes.y;
    } else {
        row = index / blocks, column = index % blocks;
        for (u32 i = 0; i < 8 && 8 * column + i < pitch; i++) words[i / 4] |= (u32)p.codes[row * pitch + 8 * column + i] << 8 * (i % 4);
    }
    u32 scale = token_scale(p.scales[p.swizzled ? swizzle::offset(row, column, blocks) : index]);
#pragma unroll
    for (u32 k = 0; k < 2; k++) ((uint4*)p.out)[2 * at + k] = decode_in_order(words[k], scale);
}
