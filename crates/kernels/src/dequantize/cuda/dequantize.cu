// From codes and scales to values. Twin of spec's matrix::dequantize. Settings before this text:
// OUTPUT, the type of the values.

struct Params {
    const u8* codes;
    const u8* scales;
    const float* stored;
    u8* out;
    u64 rows, cols;
    // aligned: whole blocks, codes at multiples of 4 bytes, values at multiples of 16
    u32 per_row, unit, swizzled, aligned;
    float reciprocal;  // fl(1/6E), where the stored number is an amax
    u32 divisor_magic, divisor_shift;
    u32 padding;
};

constexpr int SIZE = OUTPUT == F32 ? 4 : 2;
constexpr int UNIT = 16 / SIZE;  // elements that a thread decodes at a time: 16 bytes, one store
constexpr int PER_THREAD = 4;    // times

// The values of codes 0 … 7 under a factor, in 16 bits, low bytes and high bytes separate: eight of
// each fill two words, and `prmt` selects with three bits of a code.
struct Table {
    u32 low[2], high[2];
};

RULE u32 pack_pair(float a, float b) { return OUTPUT == F16 ? pack_f16(a, b) : pack_bf16(a, b); }

RULE Table table_of(float f) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = pack_pair(__fmul_rn(e2m1::decode(2 * i), f), __fmul_rn(e2m1::decode(2 * i + 1), f));
    return {{permute(w[0], w[1], 0x6420), permute(w[2], w[3], 0x6420)},
            {permute(w[0], w[1], 0x7531), permute(w[2], w[3], 0x7531)}};
}

// Four codes (16 bits) to two words of two values.
RULE void four(const Table& t, u32 codes, u32 out[2]) {
    u32 magnitudes = codes & 0x7777;
    u32 low = permute(t.low[0], t.low[1], magnitudes), high = permute(t.high[0], t.high[1], magnitudes);
    // A code's sign is bit 3 of its nibble; spread to bit 7 of its high byte.
    u32 spread = (codes & 0x8) << 4 | (codes & 0x80) << 8 | (codes & 0x800) << 12 | (codes & 0x8000) << 16;
    high ^= spread;
    out[0] = permute(low, high, 0x5140), out[1] = permute(low, high, 0x7362);
}

extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ Params p) {
    constexpr int UNITS = BLOCK / UNIT;  // of a block
    u64 blocks = (p.cols + BLOCK - 1) / BLOCK, total = p.rows * blocks * UNITS;
    u64 first = (u64)blockIdx.x * (256 * PER_THREAD) + threadIdx.x, pitch = (p.cols + 1) / 2;
    u32 codes[PER_THREAD], bytes[PER_THREAD], rows[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u64 index = first + 256 * i, at = index / UNITS;
        if (index >= total) break;
        u32 row = p.rows == 1 ? 0 : divided((u32)at, p.divisor_magic, p.divisor_shift);
        rows[i] = row;
        if (p.aligned) codes[i] = OUTPUT == F32 ? ((const u16*)p.codes)[index] : ((const u32*)p.codes)[index];
        else {
            u64 start = (at - row * blocks) * 8 + index % UNITS * (UNIT / 2);
            codes[i] = 0;
            const u8* from = p.codes + row * pitch + start;
            for (int k = 0; k < UNIT / 2 && start + k < pitch; k++) codes[i] |= (u32)from[k] << 8 * k;
        }
        bytes[i] = p.scales[p.swizzled ? swizzle::offset(row, at - row * blocks, blocks) : at];
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u64 index = first + 256 * i;
        if (index >= total) break;
        float f = scale::decode_factor(bytes[i], p.stored[p.per_row ? rows[i] : 0], (scale::Unit)p.unit, p.reciprocal);
        u32 w[4];
        if (OUTPUT == F32) {
            // The values of the codes themselves are exact in 16 bits.
            u32 pairs[2];
            four(table_of(1.0f), codes[i], pairs);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                w[k] = to_bits(__fmul_rn(from_bits(k % 2 ? pairs[k / 2] & 0xFFFF0000 : pairs[k / 2] << 16), f));
            }
        } else {
            Table t = table_of(f);
            four(t, codes[i] & 0xFFFF, w);
            four(t, codes[i] >> 16, w + 2);
        }
        if (p.aligned) {
            *(uint4*)(p.out + index * 16) = make_uint4(w[0], w[1], w[2], w[3]);
            continue;
        }
        u64 column = (index / UNITS - rows[i] * blocks) * BLOCK + index % UNITS * UNIT;
        u8* to = p.out + (rows[i] * p.cols + column) * SIZE;
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (column + k >= p.cols) break;
            if (OUTPUT == F32) ((u32*)to)[k] = w[k % 4];
            else ((u16*)to)[k] = (u16)(w[k / 2 % 4] >> 16 * (k % 2));
        }
    }
}
