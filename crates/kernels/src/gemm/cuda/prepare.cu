// From a quantized matrix to prepared weights (weights.cuh). A thread writes one word of codes and the scale bytes of its two
// rows, if it is the first of the four threads that share them.

struct Params {
    const u8* codes;
    const u8* scales;
    u8* out;
    u64 rows, cols;
    u32 tiles;  // along K
    u32 swizzled;
};

// The stored byte of an E4M3 byte without its sign.
RULE u32 prepared_scale(u32 byte) {
    if (byte == 0x7F) return 0xFF;
    if (byte == 0) return 0;
    // As binary32 it is normal: the exponent's last five bits after a change of bias, and three bits of mantissa.
    u32 number = (to_bits(e4m3::decode(byte)) >> 20) - ((127 - 22) << 3);
    return number >> 4 | (number & 15) << 4;
}

extern "C" __global__ void __launch_bounds__(512) gemm_prepare(const __grid_constant__ Params p) {
    u64 tile = blockIdx.x, first = tile / p.tiles * TILE, column = tile % p.tiles * TILE;
    u32 t = threadIdx.x / 4, step = threadIdx.x % 4, w = t / 32, g = t / 4 % 8, q = t % 4;
    u64 blocks = (p.cols + BLOCK - 1) / BLOCK, pitch = (p.cols + 1) / 2, block = column / BLOCK + step;
    u8* out = p.out + tile * TILE_BYTES;
    u32 word = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u64 row = first + 16 * w + 2 * g + h;
        u32 byte = 0;
        if (row < p.rows && block < blocks) byte = p.scales[p.swizzled ? swizzle::offset(row, block, blocks) : row * blocks + block];
        u32 magnitude = byte & 0x7F, flip = byte & 0x80 ? 8 : 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            // Element k % 2 of register h + 2·(k / 2).
            u64 at = column + 16 * step + 2 * q + 8 * (k / 2) + k % 2;
            u32 code = 0;
            if (row < p.rows && at < p.cols && magnitude != 0) code = (p.codes[row * pitch + at / 2] >> at % 2 * 4 & 15) ^ flip;
            int j = h + 2 * (k / 2);
            word |= ((code & 7) << MAGNITUDES[j] | code >> 3 << SIGNS[j]) << 16 * (k % 2);
        }
        if (q == 0) out[TILE_CODES + 8 * (8 * w + g) + 2 * step + h] = (u8)prepared_scale(magnitude);
    }
    ((u32*)out)[4 * t + step] = word;
}
