// From a quantized matrix to prepared weights (weights.cuh). 128 threads load a tile into shared
// memory, 16 bytes of codes each, and write it in its new order, 16 bytes each. Settings before this
// text: GROUPED, whether there is one matrix after the other, whose tiles come side by side
// (groups.cuh).

struct Params {
    const u8* codes;
    const u8* scales;
    u8* out;
    u64 rows, cols;
    u32 tiles;  // along K
    u32 count;  // of all tiles
    u32 swizzled;
    u32 aligned;  // whether every 32 columns' codes start at a multiple of 16 bytes
    Groups groups;
};

constexpr u32 TILES_AT_ONCE = 2;

// The stored number of an E4M3 byte without its sign.
RULE u32 prepared_scale(u32 byte) {
    if (byte == 0x7F) return 0xFF;
    if (byte == 0) return 0;
    // As binary32 it is normal: the exponent's last five bits after a change of bias, and three
    // bits of mantissa.
    return (to_bits(e4m3::decode(byte)) >> 20) - ((127 - 22) << 3);
}

// The element of a column, which is that of all groups.
RULE u64 element_of(const Params& p, const Group& g, u64 row, u64 column) {
    return p.rows * g.padded + row * g.height() + column - g.padded;
}

// Codes of 32 columns from `column` on; zeros where there are none.
RULE uint4 load_codes(const Params& p, const Group& g, u64 row, u64 column) {
    u32 words[4] = {};
    if (row >= p.rows || column >= p.cols) return make_uint4(0, 0, 0, 0);
    if (GROUPED) return __ldg((const uint4*)(p.codes + element_of(p, g, row, column) / 2));
    u64 pitch = (p.cols + 1) / 2, start = column / 2;
    const u8* from = p.codes + row * pitch;
    if (p.aligned) return __ldg((const uint4*)(from + start));
    for (u32 i = 0; i < 16 && start + i < pitch; i++) words[i / 4] |= (u32)from[start + i] << 8 * (i % 4);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Scale bytes of 64 columns from `column` on; zeros where there are none.
RULE u32 load_scales(const Params& p, const Group& g, u64 row, u64 column) {
    u64 blocks = (p.cols + BLOCK - 1) / BLOCK, first = column / BLOCK;
    u32 word = 0;
    if (row >= p.rows) return 0;
    if (GROUPED) return *(const u32*)(p.scales + element_of(p, g, row, column) / BLOCK);
    for (u32 i = 0; i < 4 && first + i < blocks; i++) {
        word |= (u32)p.scales[p.swizzled ? swizzle::offset(row, first + i, blocks) : row * blocks + first + i] << 8 * i;
    }
    return word;
}

extern "C" __global__ void __launch_bounds__(128 * TILES_AT_ONCE) gemm_prepare(const __grid_constant__ Params p) {
    // A row has a word more than its codes, so that lanes find theirs in different banks.
    __shared__ u32 codes[TILES_AT_ONCE][TILE][9], scales[TILES_AT_ONCE][TILE];
    u32 t = threadIdx.x % 128, slot = threadIdx.x / 128;
    u64 tile = (u64)blockIdx.x * TILES_AT_ONCE + slot, first = tile / p.tiles * TILE, column = tile % p.tiles * TILE;
    Group group = {};
    if (GROUPED && tile < p.count) group = group_at(p.groups, (u32)column);
    if (tile < p.count && (!GROUPED || group.index < p.groups.count)) {
        uint4 words = load_codes(p, group, first + t / 2, column + t % 2 * 32);
        u32* row = &codes[slot][t / 2][t % 2 * 4];
        row[0] = words.x, row[1] = words.y, row[2] = words.z, row[3] = words.w;
        if (t < TILE) scales[slot][t] = load_scales(p, group, first + t, column);
    }
    __syncthreads();
    if (tile >= p.count || (GROUPED && group.index >= p.groups.count)) return;
    u32 w = t / 32, g = t / 4 % 8, q = t % 4, words[4] = {}, numbers[2] = {};
#pragma unroll
    for (u32 step = 0; step < 4; step++) {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u32 row = 16 * w + 2 * g + h, byte = scales[slot][row] >> 8 * step & 0xFF, magnitude = byte & 0x7F;
            numbers[step / 2] |= turned_back(prepared_scale(magnitude), 28 - 16 * h - 8 * (step % 2));
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                // Element k % 2 of register h + 2·(k / 2).
                u32 at = 16 * step + 2 * q + 8 * (k / 2) + k % 2, j = h + 2 * (k / 2);
                u32 code = codes[slot][row][at / 8] >> 4 * (at % 8) & 15;
                if (magnitude == 0 || column + at >= p.cols) code = 0;
                else if (byte & 0x80) code ^= E2M1_SIGN;
                // In its place, and from there to where `unpack` finds it.
                u32 bits = turned_back(((code & 7) << 6 | code >> 3 << 15) << 16 * (k % 2), TURNS[step % 2][j]);
                u32 in_first = j == 3 ? IN_FIRST : step % 2 == 0 ? ~0u : 0;
                words[step / 2 * 2] |= bits & in_first, words[step / 2 * 2 + 1] |= bits & ~in_first;
            }
        }
    }
    u8* out = p.out + tile * TILE_BYTES;
    ((uint4*)out)[t] = make_uint4(words[0], words[1], words[2], words[3]);
    if (q == 0) ((uint2*)(out + TILE_CODES))[8 * w + g] = make_uint2(numbers[0], numbers[1]);
}
