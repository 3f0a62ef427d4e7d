// A block of 16 elements in the registers of one thread: its largest magnitude, its scale, its codes. Read rules.cuh first.
//
// The rules are followed by other means where the block is ordinary: profile TransformerEngine, kernel edge, no NaN, every
// scaled element at most 6.5. All other blocks go by the rules themselves.
//
// Settings of a direction are constants of a type `S`: S::RULE_OF (six, or 4over6 by MAE or MSE), S::SQUARE, S::STOCHASTIC,
// S::TRANSFORM, S::EDGE, S::PROFILE. WHOLE says that all blocks are whole, rows of elements aligned to 16 bytes, rows of codes
// to 8, and scales linear. All come before this text.

// Elements of a block as they lie in memory, two of the 16-bit types to a word.
template <Precision P>
struct Elements {
    static constexpr Precision PRECISION = P;
    u32 w[P == F32 ? 16 : 8];
};

RULE float low_element(u32 word, Precision p) {
    if (p == BF16) return from_bits(word << 16);
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(word));
    return x;
}

RULE float high_element(u32 word, Precision p) {
    if (p == BF16) return from_bits(word & 0xFFFF0000);
    float x;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(word));
    return x;
}

// Element i; i is a constant after unrolling.
template <Precision P>
RULE float element(const Elements<P>& x, int i) {
    if (P == F32) return from_bits(x.w[i]);
    return i % 2 ? high_element(x.w[i / 2], P) : low_element(x.w[i / 2], P);
}

// The magnitudes of a word.
RULE u32 magnitudes(u32 word, Precision p) { return word & (p == F32 ? 0x7FFFFFFF : 0x7FFF7FFF); }

// The larger magnitudes of two words of magnitudes; NaN wins.
RULE u32 larger(u32 a, u32 b, Precision p) {
    u32 m;
    if (p == BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else if (p == F16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else {
        float f;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(f) : "f"(from_bits(a)), "f"(from_bits(b)));
        m = to_bits(f);
    }
    return m;
}

// The largest magnitude of a block; NaN if there is one.
template <Precision P>
RULE float largest(const Elements<P>& x) {
    constexpr int N = P == F32 ? 16 : 8;
    u32 m[N];
#pragma unroll
    for (int i = 0; i < N; i++) m[i] = magnitudes(x.w[i], P);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) m[i] = larger(m[i], m[i + half], P);
    }
    return P == F32 ? from_bits(m[0]) : low_element(larger(m[0], m[0] >> 16, P), P);
}

// Two values rounded to bf16, the first in the low half.
RULE u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

RULE u32 pack_f16(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// n / d for n < 2³¹, with the multiplier and the shift that the host found for d; a multiplier of 0 is for d = 1.
RULE u32 divided(u32 n, u32 magic, u32 shift) { return magic ? __umulhi(n, magic) >> shift : n; }

RULE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Twin of hadamard::transform, signs already changed.
RULE Elements<BF16> transformed(float v[BLOCK]) {
    hadamard::butterflies(v);
    Elements<BF16> out;
#pragma unroll
    for (int i = 0; i < 8; i++) out.w[i] = pack_bf16(v[2 * i] * HADAMARD_FACTOR, v[2 * i + 1] * HADAMARD_FACTOR);
    return out;
}

// What a direction is asked for, as the host passes it. 80 bytes of addresses and counts, then small numbers.
struct Direction {
    u8* codes;
    u8* scales;
    float* amax;               // one, or one per row of the direction
    const u8* random_bytes;    // 16 per block, or null
    const u64* offset_memory;  // added to the offset, or null
    u64 seed, offset, first_block;
    u64 rows, cols;            // of the direction
    float six_e;
    u32 per_row, swizzled, error, signs;
    u32 code_alignment;        // what every row of codes is aligned to: 1, 8 or 16 bytes
};

template <class S>
constexpr bool PLAIN = S::PROFILE == TRANSFORMER_ENGINE && S::EDGE == KERNEL;

template <class S>
constexpr Metric METRIC = S::RULE_OF == FOUR_OVER_SIX_MSE ? MSE : MAE;

// How the blocks under one amax are scaled.
struct Scaling {
    scale::Global global;
    float multiplier;  // of the rule "six"
    float unit;        // what a scale's value is multiplied by to get a code's unit in the error of 4over6
    bool within;       // whether that unit is in the filter's range for every normal scale
};

template <class S>
RULE Scaling scaling_of(float amax, const Direction& d) {
    scale::Global global = scale::global(amax, d.six_e, S::EDGE);
    float unit = d.error == STRICT ? amax * (1.0f / d.six_e) : global.decode;
    return {global, global.encode * SIXTH, unit, unit >= 0x1p-44f && unit <= 0x1p41f};
}

// A block's scale byte, and what elements are multiplied by where the block is ordinary.
struct Scaled {
    u32 byte;
    float inverse;
    bool ordinary;
};

constexpr float ORDINARY_LIMIT = 6.5f;

// Twin of scale::inverse_scale. A scale of 0 gives infinity, which only zeros and blocks that are not ordinary see.
RULE float inverse_of(u32 byte, const Scaling& s) {
    return min_with_max(1.0f / (from_bits(byte << 20) * 0x1p120f * s.global.decode), KERNEL);
}

// What counts in an amax of a block with a NaN.
template <class S>
RARE float amax_beside_nan(const float x[BLOCK]) {
    u32 bits = 0;
    for (int i = 0; i < BLOCK; i++) {
        u32 b = scale::magnitude_bits(x[i], profile::amax_edge(S::PROFILE, S::EDGE));
        bits = bits > b ? bits : b;
    }
    return from_bits(bits);
}

// ---- Codes ----

// Where 1.5·2²³ is added, a sum rounds to an integer, which its low bits hold.
constexpr float MAGIC = 12582912.0f;
constexpr u32 MAGIC_BITS = 0x4B400000;

// The code of 0 ≤ y ≤ 6.5 in the low bits of MAGIC + code. Codes are min(2y, y + 2, y/2 + 4), rounded to nearest even: the
// three lines meet at the values 2 and 4 where the grid's step changes, and rounding is monotone. Each sum rounds once.
RULE float nearest_code(float y) {
    return fminf(fminf(__fmaf_rn(y, 2.0f, MAGIC), __fadd_rn(y, MAGIC + 2.0f)), __fmaf_rn(y, 0.5f, MAGIC + 4.0f));
}

// The same lines rounded down, for t = |y| plus its random part; t may exceed 6.
RULE float floor_code(float t) {
    float code = fminf(__fmaf_rd(t, 2.0f, MAGIC), __fadd_rd(t, MAGIC + 2.0f));
    return fminf(code, fminf(__fmaf_rd(t, 0.5f, MAGIC + 4.0f), MAGIC + 7.0f));
}

// Signs of elements 8h … 8h+7 at the top bits of eight nibbles.
template <Precision P>
RULE u32 sign_bits(const Elements<P>& x, int h) {
    if (P == F32) {
        u32 signs = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) signs |= (x.w[8 * h + i] >> 31) << (4 * i + 3);
        return signs;
    }
    // Bytes 1 and 3 of a word hold the signs of its elements; even elements go to low nibbles, odd ones to high nibbles.
    u32 first = permute(x.w[4 * h], x.w[4 * h + 1], 0x7351), second = permute(x.w[4 * h + 2], x.w[4 * h + 3], 0x7351);
    u32 even = permute(first, second, 0x5410), odd = permute(first, second, 0x7632);
    return (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

// 16 codes, element 0 in the lowest nibble.
RULE u64 both_halves(u32 low, u32 high) { return (u64)high << 32 | low; }

// Twin of e2m1::encode of every element times `inverse`, for an ordinary block.
template <Precision P>
RULE u64 nearest_codes(const Elements<P>& x, float inverse) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#if HARDWARE_E2M1
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = __fmul_rn(element(x, 8 * h + i), inverse);
        asm("{ .reg .b8 a, b, c, d;\n"
            "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
            "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
            "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
            "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
            "mov.b32 %0, {a, b, c, d}; }"
            : "=r"(half[h])
            : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
#else
        u32 codes = 0;
#pragma unroll
        for (int i = 7; i >= 0; i--) {
            float y = __fmul_rn(absolute(element(x, 8 * h + i)), inverse);
            codes = codes * 16 + to_bits(nearest_code(y));
        }
        // The bits of MAGIC came along eight times.
        half[h] = (codes - MAGIC_BITS * 0x11111111u) | sign_bits(x, h);
#endif
    }
    return both_halves(half[0], half[1]);
}

// Twin of stochastic::encode, for an ordinary block. With e the power of two at or below max(y, 1) the step at y is e/2, so
// the random part is (r/512)·e.
template <Precision P>
RULE u64 stochastic_codes(const Elements<P>& x, float inverse, const philox::Words& random) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 codes = 0;
#pragma unroll
        for (int i = 7; i >= 0; i--) {
            float y = __fmul_rn(absolute(element(x, 8 * h + i)), inverse);
            float e = fmaxf(from_bits(to_bits(y) & 0x7F800000), 1.0f);
            // 2¹⁴ + r/512, by putting the byte below the leading bit.
            float r = __fadd_rn(from_bits(permute(random.w[2 * h + i / 4], 0x46800000, 0x7650 | i % 4)), -16384.0f);
            codes = codes * 16 + to_bits(floor_code(__fmaf_rn(r, e, y)));
        }
        half[h] = (codes - MAGIC_BITS * 0x11111111u) | sign_bits(x, h);
    }
    return both_halves(half[0], half[1]);
}

template <Precision P>
RULE void unpack(const Elements<P>& x, float out[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) out[i] = element(x, i);
}

// The part of a block that counts in an amax, given its largest magnitude or NaN.
template <class S, Precision P>
RULE float counted(const Elements<P>& x, float largest) {
    if (!is_nan(largest)) return largest;
    float values[BLOCK];
    unpack(x, values);
    return amax_beside_nan<S>(values);
}

// Twin of Scaling::code of every element: any block, any profile.
template <class S>
RARE u64 codes_by_rule(const float x[BLOCK], u32 byte, const scale::Global& global, Precision p, const philox::Words* random) {
    profile::Factor factor = profile::factor(byte, global, S::PROFILE, p, S::EDGE);
    constexpr Edge edge = profile::code_edge(S::PROFILE, S::EDGE);
    u64 codes = 0;
#pragma unroll 1
    for (int i = 0; i < BLOCK; i++) {
        float y = profile::apply(factor, x[i]);
        u32 code;
        if (S::PROFILE == MODEL_OPT && is_nan(y)) code = 7;
        else if (S::STOCHASTIC) code = stochastic::encode(y, random->w[i / 4] >> (8 * (i % 4)) & 255, edge);
        else code = e2m1::encode(y, edge);
        codes |= (u64)code << (4 * i);
    }
    return codes;
}

// ---- 4over6 ----
//
// The choice by a filter, as in the AVX2 version (quantize/avx2/four_over_six.rs has the argument; here is what differs).
// With y = fl(x·inv), the rule's own product, and q its code's value, d = q − y is exact (Sterbenz, or q = 0). The error in
// units of the input is e = q·f − x = f·d + (f·y − x); inv is 1/f within four roundings and y adds one, so |f·y − x| is at
// most 5.05u·x ≤ 33u·f. The rule's computed errors are e within 12.2u·f + u·|e|. A lane adds 16 terms, 16 lanes of a square
// tile add up in 4 more steps, f̂ carries 3 roundings: at most 24 roundings against the rule's 20.
// MAE: the sums differ by at most u·(46·n·f + 48·Ê). MSE: |Δ| ≤ 46u·f per element, squares differ by |Δ|·(2.14·f + |Δ|) <
// 99u·f²; plus one rounding per square: u·(100·n·f² + 50·Ê). Used are 48, 104 and 64.

// The filtered error of a row of 16 in units of f or f².
template <Precision P>
RULE float filtered_error(const Elements<P>& x, float inverse, Metric metric) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float y = __fmul_rn(absolute(element(x, i)), inverse);
        float e = fmaxf(from_bits(to_bits(y) & 0x7F800000), 1.0f);
        // Adding 1.5·2²²·e rounds y to multiples of e/2, the grid at y.
        float q = __fmaf_rn(e, -6291456.0f, __fmaf_rn(e, 6291456.0f, y));
        float d = __fadd_rn(q, -y);
        sum[i % 2] = metric == MAE ? __fadd_rn(sum[i % 2], absolute(d)) : __fmaf_rn(d, d, sum[i % 2]);
    }
    return __fadd_rn(sum[0], sum[1]);
}

struct Candidate {
    u32 byte;
    float inverse, factor;
};

RULE Candidate candidate(u32 byte, const Scaling& s) {
    float value = from_bits(byte << 20) * 0x1p120f;
    return {byte, inverse_of(byte, s), value * s.unit};
}

// Whether the argument above covers a tile: normal scales, units within 2^±50 (normal scales are 2⁻⁶ to 448), elements of at
// most 6.5. The other candidate's scale is not smaller, nor are its elements larger.
RULE bool covered(const Candidate& six, float largest, const Scaling& s) {
    return s.within && six.byte >= E4M3_MIN_NORMAL_BYTE && largest * six.inverse <= ORDINARY_LIMIT;
}

enum Choice { SIX_WINS, FOUR_WINS, UNDECIDED };

// The choice between candidates with the filtered errors `six` and `four` (in units of the factor or its square) over a
// tile of `elements` elements.
RULE Choice filter(const Candidate& c6, const Candidate& c4, float six, float four, int elements, Metric metric) {
    float u6 = metric == MAE ? c6.factor : c6.factor * c6.factor, u4 = metric == MAE ? c4.factor : c4.factor * c4.factor;
    six = six * u6, four = four * u4;
    float weight = (metric == MAE ? 48.0f : 104.0f) * elements;
    float bound = (64.0f * (six + four) + weight * (u6 + u4)) * 0x1p-24f;
    float difference = four - six;
    return difference < -bound ? FOUR_WINS : difference > bound ? SIX_WINS : UNDECIDED;
}

// ---- Places ----

// Where a block lies: its row in the direction, its index in the row and in the direction, and how many elements it has.
struct Place {
    u64 row, index;
    u32 block, width;
};

RULE u64 blocks_of(const Direction& d) { return (d.cols + BLOCK - 1) / BLOCK; }

RULE void store_scale(const Direction& d, const Place& at, u32 byte) {
    d.scales[!WHOLE && d.swizzled ? swizzle::offset(at.row, at.block, blocks_of(d)) : at.index] = (u8)byte;
}

RULE void store_codes(const Direction& d, const Place& at, u64 codes) {
    if (WHOLE) {
        ((u64*)d.codes)[at.index] = codes;
        return;
    }
    u8* out = d.codes + at.row * ((d.cols + 1) / 2) + (u64)at.block * 8;
    // Codes of missing elements are zero, also where padding rounds to something else.
    if (at.width < BLOCK) codes &= (1ull << 4 * at.width) - 1;
    for (u32 i = 0; 2 * i < at.width; i++) out[i] = (u8)(codes >> 8 * i);
}

RULE philox::Words random_of(const Direction& d, const Place& at) {
    if (d.random_bytes) {
        philox::Words words;
        const u8* bytes = d.random_bytes + 16 * at.index;
        for (int i = 0; i < 4; i++) {
            words.w[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | (u32)bytes[4 * i + 3] << 24;
        }
        return words;
    }
    u64 offset = d.offset + (d.offset_memory ? *d.offset_memory : 0);
    return stochastic::block(d.seed, offset, d.first_block + at.index);
}

// ---- From elements to codes ----

// The codes of a block whose scale is known.
template <class S, Precision P>
RULE u64 codes_of(const Elements<P>& x, const Scaled& s, const Scaling& scaling, const Direction& d, const Place& at) {
    philox::Words random;
    if (S::STOCHASTIC) random = random_of(d, at);
    if (PLAIN<S> && s.ordinary) return S::STOCHASTIC ? stochastic_codes(x, s.inverse, random) : nearest_codes(x, s.inverse);
    float values[BLOCK];
    unpack(x, values);
    return codes_by_rule<S>(values, s.byte, scaling.global, P, &random);
}

// The scale of a tile by the rule "six". `largest` may be NaN; `amax` is what the mode makes of it.
template <class S>
RULE Scaled scaled_by_six(float largest, float amax, const Scaling& s, Precision p) {
    if (PLAIN<S>) {
        u32 byte = e4m3::encode(min_with_max(amax * s.multiplier, KERNEL));
        float inverse = inverse_of(byte, s);
        return {byte, inverse, largest * inverse <= ORDINARY_LIMIT};
    }
    return {profile::block_scale(amax, s.global, S::PROFILE, p, S::EDGE), 0.0f, false};
}

// The choice between the candidates of a 1×16 block by the rule itself.
template <class S>
RARE Choice choice_by_rule(const float x[BLOCK], const four_over_six::Pair& bytes, const scale::Global& global, ErrorPath path) {
    float six = four_over_six::row_error(x, bytes.six, global, METRIC<S>, path, S::EDGE);
    float four = four_over_six::row_error(x, bytes.four, global, METRIC<S>, path, S::EDGE);
    return four < six ? FOUR_WINS : SIX_WINS;
}

// What is stored of a 1×16 block.
struct Result {
    u64 codes;
    u32 byte;
};

template <class S, Precision P>
RULE Result quantize_block(const Elements<P>& x, float largest, const Scaling& scaling, const Direction& d, const Place& at) {
    float amax = counted<S>(x, largest);
    if (S::RULE_OF == SIX) {
        Scaled s = scaled_by_six<S>(largest, amax, scaling, P);
        return {codes_of<S>(x, s, scaling, d, at), s.byte};
    }
    four_over_six::Pair bytes = four_over_six::candidate_scales(amax, scaling.global, S::EDGE);
    Candidate six = candidate(bytes.six, scaling), four = candidate(bytes.four, scaling);
    Choice choice = UNDECIDED;
    if (PLAIN<S> && covered(six, largest, scaling)) {
        float e6 = filtered_error(x, six.inverse, METRIC<S>), e4 = filtered_error(x, four.inverse, METRIC<S>);
        choice = filter(six, four, e6, e4, BLOCK, METRIC<S>);
    }
    // Equal bytes tie, and a tie is six.
    if (bytes.six == bytes.four) choice = SIX_WINS;
    if (choice == UNDECIDED) {
        float values[BLOCK];
        unpack(x, values);
        choice = choice_by_rule<S>(values, bytes, scaling.global, (ErrorPath)d.error);
    }
    Candidate won = choice == FOUR_WINS ? four : six;
    Scaled s = {won.byte, won.inverse, largest * won.inverse <= ORDINARY_LIMIT};
    return {codes_of<S>(x, s, scaling, d, at), s.byte};
}
