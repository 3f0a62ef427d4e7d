// The rules of FP8 and MXFP8 for the device, twins of nvfp4-spec's e5m2, e8m0, fp8::scale and
// fp8::delayed. Read cuda/rules.cuh first: the same conventions, the same tests.

enum Format { E4M3, E5M2 };
enum ScaleValues { ANY, POWERS_OF_TWO };
enum Algorithm { MAX_OF_HISTORY, MOST_RECENT };
enum Tile { TENSOR, ROW_128, SQUARE_128, ROW_32, COLUMN_32 };
enum Scaling { TENSORS, BLOCKS_128, SQUARES_128, BLOCKS_32, SQUARES_32 };
enum ScaleSource { VALUE, MEMORY, OF_AMAX };

namespace e8m0 {

RULE float decode(u32 byte) {
    return from_bits(byte == 0 ? 0x00400000 : byte == E8M0_NAN_BYTE ? 0x7FC00000 : byte << 23);
}

RULE float reciprocal(u32 byte) { return decode(byte == E8M0_NAN_BYTE ? byte : E8M0_MAX_BYTE - byte); }

RULE u32 encode_up(float x) {
    // Positive numbers are in the order of their bits: adding all ones of a mantissa carries unless
    // it is zero.
    u32 bits = to_bits(x) & 0x7FFFFFFF;
    if (bits > 0x7F800000) return E8M0_NAN_BYTE;
    if (bits <= 0x00400000) return 0;
    u32 byte = (bits + 0x007FFFFF) >> 23;
    return byte < E8M0_MAX_BYTE ? byte : E8M0_MAX_BYTE;
}

}  // namespace e8m0

namespace fp8 {

RULE constexpr float max(Format f) { return f == E4M3 ? E4M3_MAX : E5M2_MAX; }

// The byte of any number, by arithmetic: Format::encode.
RULE u32 encode(float x, Format f) {
    if (is_nan(x)) return f == E4M3 ? E4M3_NAN_BYTE : E5M2_NAN_BYTE;
    float a = absolute(x);
    a = a < max(f) ? a : max(f);
    // Adding a power of two that leaves the bits of the mantissa rounds to nearest even; below the
    // smallest normal value the steps of the grid shrink no more.
    u32 shift = 23 - (f == E4M3 ? E4M3_MANTISSA : E5M2_MANTISSA);
    u32 smallest = to_bits(f == E4M3 ? E4M3_MIN_NORMAL : E5M2_MIN_NORMAL), exponent = to_bits(a) & 0x7F800000;
    if (exponent < smallest) exponent = smallest;
    u32 magic = exponent + (shift << 23);
    u32 magnitude = to_bits(a + from_bits(magic)) - magic + ((exponent - smallest) >> shift);
    return magnitude | (to_bits(x) >> 24 & 0x80);
}

// The bytes of four numbers, the first one lowest.
RULE u32 encode_four(float a, float b, float c, float d, Format f) {
#if HARDWARE_E4M3
    // E5M2 came with it.
    if (f == E4M3) return e4m3::encode_four(a, b, c, d);
    u32 codes;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, %2, %1; cvt.rn.satfinite.e5m2x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
        : "=r"(codes) : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
#else
    return encode(a, f) | encode(b, f) << 8 | encode(c, f) << 16 | encode(d, f) << 24;
#endif
}

// Format::decode. E5M2 is the high byte of a binary16 number.
RULE float decode(u32 byte, Format f) { return f == E4M3 ? e4m3::decode(byte) : precision::from_f16((u16)(byte << 8)); }

#if HARDWARE_E4M3
// Four bytes in binary16, which has every value of both formats, the lowest one first.
RULE void decode_halves(u32 codes, Format f, u32 halves[2]) {
    if (f == E4M3)
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
            : "=r"(halves[0]), "=r"(halves[1]) : "r"(codes));
    else
        halves[0] = __byte_perm(codes, 0, 0x1404), halves[1] = __byte_perm(codes, 0, 0x3424);
}
#endif

// The values of four bytes, the lowest one first.
RULE void decode_four(u32 codes, Format f, float out[4]) {
#if HARDWARE_E4M3
    u32 halves[2];
    decode_halves(codes, f, halves);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
            : "=f"(out[2 * i]), "=f"(out[2 * i + 1]) : "r"(halves[i]));
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = decode(codes >> 8 * i & 0xFF, f);
#endif
}

// The least scale byte with which every value of MXFP8 is a normal bf16 number: the smallest of E5M2
// is 2⁻¹⁶.
constexpr u32 LEAST_NORMAL = 17;

// Whether a number is another one in bf16.
RULE bool lost_in_bf16(float exact, u16 bits) { return precision::from_bf16(bits) != exact && !is_nan(exact); }

// AmaxRule::scale; `overflow` is the largest value of the elements' type, of binary32 for the scale
// of a tensor.
RULE float scale(float amax, Format f, ScaleValues values, float epsilon, float overflow) {
    amax = amax < epsilon ? epsilon : amax;
    // Not for 0, infinity and NaN. Negative ones come from callers only.
    if (!(amax != 0.0f && absolute(amax) <= FLOAT_MAX)) return 1.0f;
    float quotient = max(f) / amax;
    float s = absolute(quotient) > FLOAT_MAX ? overflow : quotient;
    return values == ANY ? s : from_bits(to_bits(s) & 0xFF800000);
}

RULE u32 mx_byte(float amax, Format f) { return e8m0::encode_up(amax * (1.0f / max(f))); }

// The larger number; of a number and NaN, the number.
RULE float larger_number(float a, float b) { return is_nan(a) || b > a ? b : a; }

RULE float finite(float scale) { return scale > FLOAT_MAX ? FLOAT_MAX : scale; }

// Delayed::update of a tensor whose history is every `stride`-th of `length` numbers: the scale of
// the next step. `largest` is the magnitude that an amax is mapped to; `reduced` is 0 where there
// is none, and looked at in the bulk entry only.
RULE float update(float* history, u32 length, u32 stride, float scale, float largest, Algorithm algorithm, bool bulk,
                  float reduced) {
    float last = bulk && reduced != 0.0f ? reduced : history[0];
    if (bulk && last == 0.0f) return finite(scale);
    float amax = last;
    for (u32 i = 1; i < length; i++) {
        float earlier = history[(u64)i * stride];
        if (algorithm == MAX_OF_HISTORY) amax = larger_number(amax, earlier);
        if (i > 1) history[(u64)(i - 1) * stride] = earlier;
    }
    history[(u64)(length - 1) * stride] = last;
    history[0] = 0.0f;
    return finite(amax > 0.0f && amax <= FLOAT_MAX ? largest / amax : scale);
}

}  // namespace fp8
