// From FP8 codes and scales to values. Twin of spec's fp8::dequantize. Read cuda/fp8_rules.cuh and
// cuda/elements.cuh first.
//
// A thread decodes units of 16 bytes of values and writes each with one store. Settings before this
// text: OUTPUT, the type of the values; FORMAT of the codes; TILE, which elements share a scale;
// E8M0, whether scales are bytes.

struct Params {
    const u8* codes;
    const u8* scales;
    u8* out;
    u64 rows, cols;
    u32 divisor_magic, divisor_shift;  // for blocks of 16 in a row
    // Whole blocks of 16; codes at multiples of 8 bytes, values of 16, bytes of scales of 8.
    u32 aligned;
    u32 padding;
};
static_assert(sizeof(Params) == 56, "as the host has them");

constexpr int SIZE = OUTPUT == F32 ? 4 : 2;
constexpr int UNIT = 16 / SIZE;  // elements of a unit
constexpr int PER_THREAD = 4;    // units of a thread

RULE float factor_of(const u8* scales, u64 index) {
    return E8M0 ? e8m0::decode(scales[index]) : ((const float*)scales)[index];
}

// The scale of the first element of a unit: the unit's, or for COLUMN_32 one of a scale for each
// element.
RULE u64 scale_index(const Params& p, u64 row, u64 column) {
    if (TILE == TENSOR) return 0;
    if (TILE == COLUMN_32) return row / MX_BLOCK * p.cols + column;
    u64 side = TILE == ROW_32 ? MX_BLOCK : FP8_BLOCK, across = (p.cols + side - 1) / side;
    return (TILE == SQUARE_128 ? row / FP8_BLOCK : row) * across + column / side;
}

// The four or eight codes of a unit; missing ones are zero.
RULE uint2 load_codes(const Params& p, u64 at, u32 width) {
    const u8* from = p.codes + at;
    if (p.aligned) return UNIT == 4 ? make_uint2(*(const u32*)from, 0) : *(const uint2*)from;
    u32 w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        if (i < width) w[i / 4] |= (u32)from[i] << 8 * (i % 4);
    }
    return make_uint2(w[0], w[1]);
}

extern "C" __global__ void __launch_bounds__(256) dequantize_fp8(const __grid_constant__ Params p) {
    constexpr int UNITS = BLOCK / UNIT;  // of a block
    u64 blocks = (p.cols + BLOCK - 1) / BLOCK, total = p.rows * blocks * UNITS;
    u64 first = (u64)blockIdx.x * (256 * PER_THREAD) + threadIdx.x;
    u64 rows[PER_THREAD], columns[PER_THREAD];
    uint2 codes[PER_THREAD];
    float factors[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u64 index = first + 256 * i, block = index / UNITS;
        if (index >= total) break;
        rows[i] = p.rows == 1 ? 0 : divided((u32)block, p.divisor_magic, p.divisor_shift);
        columns[i] = (block - rows[i] * blocks) * BLOCK + index % UNITS * UNIT;
        u64 left = columns[i] < p.cols ? p.cols - columns[i] : 0;
        codes[i] = load_codes(p, rows[i] * p.cols + columns[i], left < UNIT ? (u32)left : UNIT);
        if (TILE != COLUMN_32) factors[i] = left ? factor_of(p.scales, scale_index(p, rows[i], columns[i])) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u64 index = first + 256 * i;
        if (index >= total) break;
        float f[UNIT], v[8];
        if (TILE != COLUMN_32) {
#pragma unroll
            for (int k = 0; k < UNIT; k++) f[k] = factors[i];
        } else if (E8M0 && p.aligned) {
            const u8* from = p.scales + scale_index(p, rows[i], columns[i]);
            uint2 bytes = UNIT == 4 ? make_uint2(*(const u32*)from, 0) : *(const uint2*)from;
#pragma unroll
            for (int k = 0; k < UNIT; k++) f[k] = e8m0::decode((k < 4 ? bytes.x : bytes.y) >> 8 * (k % 4) & 0xFF);
        } else {
            u64 at = scale_index(p, rows[i], columns[i]);
#pragma unroll
            for (int k = 0; k < UNIT; k++) f[k] = columns[i] + k < p.cols ? factor_of(p.scales, at + k) : 0.0f;
        }
        fp8::decode_four(codes[i].x, FORMAT, v);
        if (UNIT == 8) fp8::decode_four(codes[i].y, FORMAT, v + 4);
        u32 w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (OUTPUT == F32) w[k] = to_bits(v[k] * f[k % UNIT]);
            else {
                float low = v[2 * k] * f[2 * k % UNIT], high = v[2 * k + 1] * f[(2 * k + 1) % UNIT];
                w[k] = OUTPUT == F16 ? pack_f16(low, high) : pack_bf16(low, high);
            }
        }
        u8* to = p.out + (rows[i] * p.cols + columns[i]) * SIZE;
        if (p.aligned) {
            *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
            continue;
        }
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (columns[i] + k >= p.cols) break;
            if (OUTPUT == F32) ((u32*)to)[k] = w[k % 4];
            else ((u16*)to)[k] = (u16)(w[k / 2 % 4] >> 16 * (k % 2));
        }
    }
}
