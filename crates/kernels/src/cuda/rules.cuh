// The rules of nvfp4-spec for the device: a namespace per module, a function per rule, each the
// twin of the Rust function of the same name (read that one for ties, extremes and source). Plain
// arithmetic, so that a C++ compiler for the host builds the very same text and the tests can hold
// it against the Rust; every operation rounds once (`--fmad=false`, `-ffp-contract=off`). Constants
// come before this text, printed from the Rust ones.
//
// A hardware instruction stands behind one `#if` beside the portable body that it must equal.
// PORTABLE turns all of them off.

#if !defined(PORTABLE) && __CUDA_ARCH__ >= 890
#define HARDWARE_E4M3 1
#endif
#if !defined(PORTABLE) && (defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
                           defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL))
#define HARDWARE_E2M1 1
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define RULE __device__ __forceinline__
#define METHOD RULE
#define RARE __device__ __noinline__
RULE u32 to_bits(float x) { return __float_as_uint(x); }
RULE float from_bits(u32 x) { return __uint_as_float(x); }
RULE float fma_once(float a, float b, float c) { return __fmaf_rn(a, b, c); }
RULE float absolute(float x) { return fabsf(x); }
RULE u32 mul_high(u32 a, u32 b) { return __umulhi(a, b); }
#else
#define RULE static inline
#define METHOD inline
#define RARE static
RULE u32 to_bits(float x) { return __builtin_bit_cast(u32, x); }
RULE float from_bits(u32 x) { return __builtin_bit_cast(float, x); }
RULE float fma_once(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RULE float absolute(float x) { return from_bits(to_bits(x) & 0x7FFFFFFF); }
RULE u32 mul_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
#endif

constexpr int BLOCK = 16;
constexpr float FLOAT_MAX = 3.4028234663852886e38f;

enum Specials { KERNEL, REFERENCE };
enum Profile { TRANSFORMER_ENGINE, MODEL_OPT, LLM_COMPRESSOR, TORCH_AO };
enum Precision { F32, BF16, F16 };
enum Metric { MAE, MSE };
enum ErrorPath { STRICT, FAST };
enum ScaleRule { SIX, FOUR_OVER_SIX_MAE, FOUR_OVER_SIX_MSE, LEAST_SQUARES, MODEL_OPT_SWEEP, MODEL_OPT_FOUR_OVER_SIX };
enum Order { FOLDED, ONE_ROW, BOTH_ROWS };

RULE bool is_nan(float x) { return (to_bits(x) & 0x7FFFFFFF) > 0x7F800000; }

// Specials::min_with_max
RULE float min_with_max(float x, Specials specials) {
    if (specials == REFERENCE && is_nan(x)) return x;
    return x < FLOAT_MAX ? x : FLOAT_MAX;
}

namespace precision {

RULE float from_bf16(u16 bits) { return from_bits((u32)bits << 16); }

RULE float from_f16(u16 bits) {
    u32 magnitude = bits & 0x7FFF, sign = (u32)(bits & 0x8000) << 16;
    // Shifted into place the exponent is 112 too small, subnormals included; infinities and NaN
    // have their own exponent.
    if (magnitude >= 0x7C00) return from_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));
}

// To nearest even. NaN becomes a quiet NaN.
RULE u16 to_bf16(float x) {
    u32 bits = to_bits(x);
    if (is_nan(x)) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

RULE u16 to_f16(float x) {
    u32 bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (u16)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return (u16)(sign | 0x7C00);  // 65520 and more
    // Below 2^-14 adding 2^-1 leaves units of 2^-24, the smallest subnormal, and rounds to them.
    if (magnitude < 0x38800000) return (u16)(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3F000000));
    return (u16)(sign | ((magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

RULE float round(float x, Precision p) {
    return p == F32 ? x : p == BF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x));
}

RULE float min_normal(Precision p) { return p == F16 ? 0x1p-14f : 0x1p-126f; }

RULE float max(Precision p) { return p == F32 ? FLOAT_MAX : p == BF16 ? BF16_MAX : F16_MAX; }

}  // namespace precision

namespace e2m1 {

RULE u32 nan_code(Specials specials) { return specials == KERNEL ? 7 : 0; }

RULE u32 sign(float x, Specials specials) {
    bool negative = specials == KERNEL ? to_bits(x) >> 31 != 0 : x < 0.0f;
    return negative ? E2M1_SIGN : 0;
}

// Rounding is monotone, so the code is the number of thresholds that are not above the magnitude.
RULE u32 encode(float x, Specials specials) {
    if (is_nan(x)) return nan_code(specials);
    float a = absolute(x);
    u32 code = 0;
    for (int i = 0; i < 7; i++) code += a >= E2M1_FIRSTS[i];
    return code | sign(x, specials);
}

// The magnitudes are 0, 0.5, and from code 2 on one mantissa bit with an exponent.
RULE float decode(u32 code) {
    u32 c = code & 7;
    u32 bits = c < 2 ? c * 0x3F000000 : (c + 252) << 22;
    return from_bits(bits | (code & E2M1_SIGN) << 28);
}

}  // namespace e2m1

namespace e4m3 {

#if HARDWARE_E4M3
// The byte of any value, sign included.
RULE u32 convert(float x) {
    u32 byte;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %1, %2; mov.b16 h, 0; mov.b32 %0, {l, h}; }"
        : "=r"(byte) : "f"(0.0f), "f"(x));
    return byte;
}
#endif

// The byte of a value that is not negative, or NaN.
RULE u32 encode(float x) {
#if HARDWARE_E4M3
    return convert(x) & 0x7F;
#else
    if (is_nan(x)) return E4M3_NAN_BYTE;
    x = x < E4M3_MAX ? x : E4M3_MAX;
    // Adding a power of two that leaves three mantissa bits (below 2^-6: units of 2^-9) rounds to
    // nearest even.
    u32 smallest = to_bits(E4M3_MIN_NORMAL), exponent = to_bits(x) & 0x7F800000;
    if (exponent < smallest) exponent = smallest;
    u32 magic = exponent + (20u << 23);
    return to_bits(x + from_bits(magic)) - magic + ((exponent - smallest) >> 20);
#endif
}

#if HARDWARE_E4M3
// The bytes of four numbers, the first one lowest.
RULE u32 encode_four(float a, float b, float c, float d) {
    u32 bytes;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
        : "=r"(bytes) : "f"(a), "f"(b), "f"(c), "f"(d));
    return bytes;
}
#endif

// Shifted into place the exponent is 120 too small; the product is exact and normalises subnormals.
RULE float decode(u32 byte) {
    u32 magnitude = byte & 0x7F, sign = (byte & 0x80) << 24;
    return magnitude == E4M3_NAN_BYTE ? from_bits(0x7FC00000) : from_bits(sign | magnitude << 20) * 0x1p120f;
}

}  // namespace e4m3

namespace scale {

RULE u32 magnitude_bits(float x, Specials specials) {
    u32 bits = to_bits(x) & 0x7FFFFFFF;
    return specials == KERNEL && bits > 0x7F800000 ? 0 : bits;
}

struct Global {
    float amax, six_e, encode, decode;
};

RULE Global global(float amax, float six_e, Specials specials) {
    float guarded = min_with_max(six_e / amax, specials);
    float encode = amax == 0.0f ? (specials == KERNEL ? 1.0f : FLOAT_MAX) : guarded == 0.0f ? 1.0f : guarded;
    return {amax, six_e, encode, 1.0f / encode};
}

RULE u32 block_scale(float block_amax, const Global& global, Specials specials) {
    float multiplier = global.encode * SIXTH;
    return e4m3::encode(min_with_max(block_amax * multiplier, specials));
}

RULE float inverse_scale(u32 byte, const Global& global, Specials specials) {
    return min_with_max(1.0f / (e4m3::decode(byte) * global.decode), specials);
}

enum Unit { AMAX, MULTIPLIER, DIVISOR };

// Unit::decode_factor; `reciprocal` is fl(1/6E) for an amax and not looked at otherwise.
RULE float decode_factor(u32 byte, float stored, Unit unit, float reciprocal) {
    float value = e4m3::decode(byte);
    return unit == AMAX ? value * stored * reciprocal : unit == MULTIPLIER ? value * stored : value / stored;
}

}  // namespace scale

namespace profile {

struct Factor {
    bool divide;
    float by;
};

RULE float apply(const Factor& factor, float x) { return factor.divide ? x / factor.by : x * factor.by; }

RULE float stored(float amax, float six_e, Profile profile, Precision p) {
    if (profile == TRANSFORMER_ENGINE) return amax;
    if (profile == LLM_COMPRESSOR) {
        float least = precision::min_normal(p);
        // f32::max: the other operand where one is NaN.
        float at_least = amax > least ? amax : least;
        float g = precision::round(precision::round(1.0f / at_least, p) * six_e, p);
        return absolute(g) <= FLOAT_MAX ? g : 1.0f;
    }
    float g = amax / six_e;
    return g == 0.0f ? 1.0f : g;
}

RULE float at_least(float least, float x) { return x < least ? least : x; }

RULE u32 block_scale(float block_amax, const scale::Global& global, Profile profile, Precision p, Specials specials) {
    if (profile == TRANSFORMER_ENGINE) return scale::block_scale(block_amax, global, specials);
    float g = stored(global.amax, global.six_e, profile, p);
    if (profile == MODEL_OPT) {
        float s = block_amax / (6.0f * g);
        return e4m3::encode(s == 0.0f ? 1.0f : at_least(E4M3_MIN_POSITIVE, s));
    }
    if (profile == LLM_COMPRESSOR) {
        u32 byte = e4m3::encode(g * precision::round(block_amax / 6.0f, p));
        return byte == 0 ? LLM_COMPRESSOR_ZERO : byte;
    }
    return e4m3::encode(at_least(E4M3_MIN_NORMAL, block_amax / 6.0f / g));
}

RULE Factor factor(u32 byte, const scale::Global& global, Profile profile, Precision p, Specials specials) {
    if (profile == TRANSFORMER_ENGINE) return {false, scale::inverse_scale(byte, global, specials)};
    float g = stored(global.amax, global.six_e, profile, p), value = e4m3::decode(byte);
    if (profile == MODEL_OPT) return {true, value * g};
    if (profile == LLM_COMPRESSOR) return {true, value / g};
    return {false, 1.0f / g / value};
}

RULE constexpr Specials code_specials(Profile profile, Specials specials) {
    return profile == TRANSFORMER_ENGINE ? specials : profile == TORCH_AO ? KERNEL : REFERENCE;
}

RULE constexpr Specials amax_specials(Profile profile, Specials specials) { return profile == TRANSFORMER_ENGINE ? specials : REFERENCE; }

// Scaling::code, to nearest.
RULE u32 code(float y, Profile profile, Specials specials) {
    if (profile == MODEL_OPT && is_nan(y)) return 7;
    return e2m1::encode(y, code_specials(profile, specials));
}

}  // namespace profile

namespace philox {

struct Words {
    u32 w[4];
};

RULE Words philox4x32(Words c, u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        u32 high0 = mul_high(PHILOX_MULTIPLIERS[0], c.w[0]), low0 = PHILOX_MULTIPLIERS[0] * c.w[0];
        u32 high1 = mul_high(PHILOX_MULTIPLIERS[1], c.w[2]), low1 = PHILOX_MULTIPLIERS[1] * c.w[2];
        c = {{high1 ^ c.w[1] ^ key0, low1, high0 ^ c.w[3] ^ key1, low0}};
        key0 += PHILOX_KEY_STEPS[0];
        key1 += PHILOX_KEY_STEPS[1];
    }
    return c;
}

}  // namespace philox

namespace stochastic {

RULE float grid_step(float a) { return a >= 4.0f ? 2.0f : a >= 2.0f ? 1.0f : 0.5f; }

RULE u32 encode(float y, u32 random, Specials specials) {
    if (is_nan(y)) return e2m1::nan_code(specials);
    float a = absolute(y), t = fma_once((float)random / 256.0f, grid_step(a), a), step = grid_step(t);
    float steps = t / step;
    // Beyond 6 everything saturates, infinities included; below, a conversion rounds towards zero
    // as `floor` does.
    float magnitude = t >= 6.0f ? 6.0f : (float)(int)steps * step;
    return e2m1::encode(magnitude, specials) | e2m1::sign(y, specials);
}

// Stream::block: the four words that serve a block.
RULE philox::Words block(u64 seed, u64 offset, u64 index) {
    philox::Words counter = {{(u32)index, (u32)(index >> 32), (u32)offset, (u32)(offset >> 32)}};
    return philox::philox4x32(counter, (u32)seed, (u32)(seed >> 32));
}

}  // namespace stochastic

namespace hadamard {

// Transforms 16 values in place; what is left is to quarter them, round them to bf16 and take
// those. Sums of elements that are `END` or more apart are left out.
template <int END = BLOCK>
RULE void butterflies(float v[BLOCK]) {
#pragma unroll
    for (int distance = 1; distance < END; distance *= 2) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            if (i & distance) continue;
            float a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
    }
}

// Negates the elements whose bits in `signs` are set.
RULE void negate(float v[BLOCK], u32 signs) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) v[i] = from_bits(to_bits(v[i]) ^ (signs >> i & 1) << 31);
}

RULE void transform(float v[BLOCK], u32 signs) {
    negate(v, signs);
    butterflies(v);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) v[i] = precision::round(v[i] * HADAMARD_FACTOR, BF16);
}

}  // namespace hadamard

namespace four_over_six {

struct Pair {
    u32 six, four;
};

RULE Pair candidate_scales(float block_amax, const scale::Global& global, Specials specials) {
    float base = block_amax / 6.0f * global.encode;
    return {e4m3::encode(min_with_max(base, specials)), e4m3::encode(min_with_max(base * 1.5f, specials))};
}

RULE float strict_error(u32 code, u32 byte, float x, const scale::Global& global) {
    return e2m1::decode(code) * e4m3::decode(byte) * global.amax / global.six_e - x;
}

RULE float fast_error(u32 code, u32 byte, float x, const scale::Global& global) {
    return e2m1::decode(code) * e4m3::decode(byte) - x * global.encode;
}

// The error of one row of a tile, summed in element order.
// By value, so that callers keep their copies in registers.
RARE float row_error(const float x[BLOCK], u32 byte, scale::Global global, Metric metric, ErrorPath path, Specials specials) {
    float inverse = scale::inverse_scale(byte, global, specials), sum = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        u32 code = e2m1::encode(x[i] * inverse, specials);
        float e = path == STRICT ? strict_error(code, byte, x[i], global) : fast_error(code, byte, x[i], global);
        sum = sum + (metric == MAE ? absolute(e) : e * e);
    }
    return sum;
}

// The rows' errors as a tree; `rows[j * stride]` is the error of row j.
RULE float sum_rows(const float* rows, int stride) {
    float sum[8];
    for (int j = 0; j < 8; j++) sum[j] = rows[j * stride] + rows[(j + 8) * stride];
    for (int j = 0; j < 4; j++) sum[j] = sum[j] + sum[j + 4];
    for (int j = 0; j < 2; j++) sum[j] = sum[j] + sum[j + 2];
    return sum[0] + sum[1];
}

}  // namespace four_over_six

namespace mse {

// The search's binary64 sum for one scale byte.
RARE double row_error(const float x[BLOCK], u32 byte, scale::Global global, Profile of, Precision p, Specials specials) {
    profile::Factor factor = profile::factor(byte, global, of, p, specials);
    scale::Unit unit = of == TRANSFORMER_ENGINE ? scale::AMAX : of == LLM_COMPRESSOR ? scale::DIVISOR : scale::MULTIPLIER;
    float decode = scale::decode_factor(byte, profile::stored(global.amax, global.six_e, of, p), unit, 1.0f / global.six_e);
    double sum = 0.0;
    for (int i = 0; i < BLOCK; i++) {
        u32 code = profile::code(profile::apply(factor, x[i]), of, specials);
        double e = (double)x[i] - (double)(e2m1::decode(code) * decode);
        sum = sum + e * e;
    }
    return sum;
}

// The scale byte that a search around the one of "six" finds.
RARE u32 search(const float x[BLOCK], u32 centre, scale::Global global, Profile of, Precision p, Specials specials) {
    if (centre >= E4M3_NAN_BYTE) return centre;
    // From the nearest on, the smaller first: 0, -1, 1, -2, 2, -3, 3, -4, 4, then 5 and 6.
    u32 best = centre;
    double least = row_error(x, centre, global, of, p, specials);
    if (!(least < 1.0 / 0.0)) least = 1.0 / 0.0;
    for (int i = 1; i < 11; i++) {
        int offset = i < 9 ? (i % 2 ? -(i + 1) / 2 : i / 2) : i - 4;
        int byte = (int)centre + offset;
        if (byte < 1 || byte >= (int)E4M3_NAN_BYTE) continue;
        double sum = row_error(x, (u32)byte, global, of, p, specials);
        if (sum < least) least = sum, best = (u32)byte;
    }
    return best;
}

}  // namespace mse

namespace modelopt {

RULE float swept_amax(u32 byte, float global) { return e4m3::decode(byte) / E4M3_MAX * global; }

RULE float swept_scale(u32 byte, float global) {
    float scale = swept_amax(byte, global) / 6.0f;
    return scale == 0.0f ? 1.0f : scale;
}

RULE float tried_scale(float block_amax, float global) {
    float range = global * 1.75f / 6.0f, unit = E4M3_MAX / (range <= 0x1p-24f ? 1.0f : range);
    float scaled = block_amax / 6.0f * unit;
    return e4m3::decode(e4m3::encode(scaled < E4M3_MAX ? scaled : E4M3_MAX)) * (1.0f / unit);
}

RARE float error(const float x[BLOCK], float scale) {
    bool usable = scale != 0.0f && absolute(scale) <= FLOAT_MAX;
    float divisor = usable ? scale : 1.0f, squares[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float value = e2m1::decode(e2m1::encode(absolute(x[i]) / divisor, KERNEL)) * divisor;
        float e = absolute(x[i]) - (scale == 0.0f ? 0.0f : value);
        squares[i] = e * e;
    }
    for (int i = 0; i < 8; i++) squares[i] = squares[i] + squares[i + 8];
    for (int width = 4; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) squares[i] = squares[2 * i] + squares[2 * i + 1];
    }
    return squares[0];
}

RULE u32 exported(float block_amax, const scale::Global& global) {
    float scale = block_amax / 6.0f;
    if (scale == 0.0f) scale = 1.0f;
    return e4m3::encode(profile::at_least(E4M3_MIN_POSITIVE, scale * (global.six_e / 6.0f) / (global.amax / 6.0f)));
}

// The scale byte that either search finds; `six` is that of the rule "six".
RARE u32 search(const float x[BLOCK], float block_amax, u32 six, scale::Global global, ScaleRule rule) {
    bool searched = global.amax > 0.0f && global.amax <= FLOAT_MAX;
    for (int i = 0; i < BLOCK; i++) searched = searched && absolute(x[i]) <= FLOAT_MAX;
    if (!searched) return six;
    float best = 0.0f, least = 1.0f / 0.0f;
    int count = rule == MODEL_OPT_SWEEP ? E4M3_NAN_BYTE - 1 : 2;
    for (int i = 0; i < count; i++) {
        float amax = rule == MODEL_OPT_SWEEP ? swept_amax(1 + i, global.amax) : block_amax * (i == 0 ? 1.0f : 1.5f);
        float sum = error(x, rule == MODEL_OPT_SWEEP ? swept_scale(1 + i, global.amax) : tried_scale(amax, global.amax));
        if (i == 0) best = amax;
        if (sum < least) least = sum, best = amax;
    }
    return exported(best, global);
}

}  // namespace modelopt

namespace swizzle {

// Where the scale of row r, column c goes in a matrix of `cols` columns.
RULE u64 offset(u64 r, u64 c, u64 cols) {
    u64 tile = r / 128 * ((cols + 3) / 4) + c / 4;
    return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

}  // namespace swizzle
