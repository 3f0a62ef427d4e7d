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
    Groups groups;
};

RULE void decode_block(u8* out, u64 to, uint2 codes, u32 byte) {
    u32 scale = token_scale(byte);
    ((uint4*)out)[2 * to] = decode_in_order(codes.x, scale), ((uint4*)out)[2 * to + 1] = decode_in_order(codes.y, scale);
}

// The same of groups along K (groups.cuh), which come side by side: a warp has 128 columns of four
// rows.
extern "C" __global__ void __launch_bounds__(256) gemm_grouped_tokens(const __grid_constant__ Params p) {
    u32 lane = threadIdx.x % 32, block = lane % 8;
    u64 row = (u64)blockIdx.y * 32 + threadIdx.x / 32 * 4 + lane / 8;
    Group g = group_at(p.groups, blockIdx.x * GROUP_ROWS);
    if (g.index >= p.groups.count || row >= p.rows) return;
    u64 from = (p.rows * g.padded + row * g.height() + blockIdx.x * GROUP_ROWS - g.padded) / BLOCK + block;
    decode_block(p.out, row * (p.cols / BLOCK) + blockIdx.x * (GROUP_ROWS / BLOCK) + block, __ldg((const uint2*)p.codes + from), p.scales[from]);
}

extern "C" __global__ void __launch_bounds__(256) gemm_tokens(const __grid_constant__ Params p) {
#if !defined(PORTABLE) && __CUDA_ARCH__ >= 900
    // The product that follows may start at once: it waits for this kernel to end.
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x, blocks = (p.cols + BLOCK - 1) / BLOCK, pitch = (p.cols + 1) / 2;
    if (at >= p.rows * blocks) return;
    u64 index = p.first * blocks + at, row = 0, column = 0;
    u32 words[2] = {};
    uint2 codes;
    if (p.aligned && !p.swizzled) {
        codes = __ldg((const uint2*)p.codes + index);
    } else {
        row = index / blocks, column = index % blocks;
        for (u32 i = 0; i < 8 && 8 * column + i < pitch; i++) words[i / 4] |= (u32)p.codes[row * pitch + 8 * column + i] << 8 * (i % 4);
        codes = make_uint2(words[0], words[1]);
    }
    decode_block(p.out, at, codes, p.scales[p.swizzled ? swizzle::offset(row, column, blocks) : index]);
}
