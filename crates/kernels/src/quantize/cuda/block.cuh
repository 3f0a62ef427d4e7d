// A block of 16 elements in the registers of one thread: its largest magnitude, its scale, its
// codes. Read rules.cuh and elements.cuh first.
//
// An ordinary block is computed by faster operations with the same results: profile
// TransformerEngine, kernel specials, no NaN, every scaled element at most 6.5. All other blocks are
// computed by the rules themselves.
//
// Settings of a direction are constants of a type `S`: S::RULE_OF (six, 4over6 by MAE or MSE, or a
// search of scales), S::SQUARE, S::STOCHASTIC, S::TRANSFORM, S::SIGNS (of the transform, or −1 for those of the call),
// S::SPECIALS, S::PROFILE, S::SWIZZLED (the layout of scales), S::VALUES (whether values are written
// instead of codes). WHOLE means: all blocks are whole, rows
// of elements are aligned to 16 bytes, rows of codes to 8. GROUPED means: the rows of the matrix are
// in groups (groups.cuh). These settings come before this text.

// The parameters of a direction, as the host passes them. 88 bytes of addresses and counts, then
// small numbers.
struct Direction {
    u8* codes;  // or values
    u8* scales;
    float* amax;               // one, or one per row of the direction; or maxima of parts
    float* stored;             // of the maxima of parts: where the largest goes
    const u8* random_bytes;    // 16 per block, or null
    const u64* offset_memory;  // added to the offset, or null
    u64 seed, offset, first_block;
    u64 rows, cols;            // of the direction
    float six_e;
    u32 per_row, error, signs;
    u32 parts;  // how many maxima of parts there are; 0 if the amax itself is there
    u32 padding;
};

template <class S>
constexpr bool PLAIN = S::PROFILE == TRANSFORMER_ENGINE && S::SPECIALS == KERNEL;

template <class S>
constexpr Metric METRIC = S::RULE_OF == FOUR_OVER_SIX_MSE ? MSE : MAE;

// Whether scales are searched for: those blocks go by the rule.
template <class S>
constexpr bool SEARCHED = S::RULE_OF == LEAST_SQUARES || S::RULE_OF == MODEL_OPT_SWEEP || S::RULE_OF == MODEL_OPT_FOUR_OVER_SIX;

// How the blocks under one amax are scaled.
struct Scaling {
    scale::Global global;
    float multiplier;  // of the rule "six"
    bool regular;      // whether the decode scale is so far from its limits that nothing overflows
};

template <class S>
RULE Scaling scaling_of(float amax, const Direction& d) {
    scale::Global global = scale::global(amax, d.six_e, S::SPECIALS);
    bool regular = global.decode >= 0x1p-44f && global.decode <= 0x1p41f;
    // 4over6 also multiplies by the amax itself, which a decode scale of 1 may not tell: it stands
    // for 0 and infinity too.
    if (S::RULE_OF != SIX) regular = regular && amax > 0.0f && amax <= FLOAT_MAX;
    return {global, global.encode * SIXTH, PLAIN<S> && regular};
}

// A block is ordinary if its scaling is regular and its largest scaled element at most this.
constexpr float ORDINARY_LIMIT = 6.5f;

// Twin of e4m3::encode where the scaling is regular; the bytes of others are not used.
RULE u32 scale_byte(float x) {
#if HARDWARE_E4M3
    return e4m3::convert(x);
#else
    return e4m3::encode(x);
#endif
}

RULE float scale_value(u32 byte) { return from_bits(byte << 20) * 0x1p120f; }

// 1/x to nearest, for x within 2^±100: the hardware's approximation and one step of Newton's
// method, which is what a division compiles to beside its checks. Zero gives NaN.
RULE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// Twin of scale::inverse_scale where the scaling is regular. A scale of 0 gives FLOAT_MAX.
RULE float inverse_of(float value, const Scaling& s) { return fminf(reciprocal(value * s.global.decode), FLOAT_MAX); }

// The amax of a block that has a NaN.
template <class S>
RARE float amax_beside_nan(const float x[BLOCK]) {
    u32 bits = 0;
    for (int i = 0; i < BLOCK; i++) {
        u32 b = scale::magnitude_bits(x[i], profile::amax_specials(S::PROFILE, S::SPECIALS));
        bits = bits > b ? bits : b;
    }
    return from_bits(bits);
}

// ---- Codes ----

// Codes by truncation. L(y) = min(2y, y + 2, y/2 + 4) is the line through the codes: a value of the
// grid has its code there, and between two values it is linear. At 2⁻¹⁴ of its size, where the
// smallest normal number of binary16 stands for 1, y cut off to binary16 has the bits
// floor(512·L(y)). One instruction cuts off two numbers.
constexpr float CODE_UNIT = 0x1p-14f;

// Two numbers cut off to binary16, the first in the low half.
RULE u32 cut_off(float low, float high) {
    u32 word;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The high bytes of four such numbers, in two words.
RULE u32 high_bytes(u32 first, u32 second) { return permute(first, second, 0x7531); }

// Bits of `a` where `mask` has ones, of `b` elsewhere.
RULE u32 merged(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }

// Cut off after one half is added, L(y) is rounded to nearest with all ties up. Ties go to the even
// code: at 1/4, 5/4, 5/2 and 5 down, at 3/4, 7/4 and 7/2 up. A mantissa of the former is less than
// 11/8, one of the latter more. The sum moves y up by a unit in its last place where its mantissa is
// more than 11/8, the product moves every y down by one.
RULE float with_ties(float y) { return __fmul_rz(__fmaf_rn(y, 4.0f / 11.0f * 0x1p-23f, y), 0x1.FFFFFEp-1f); }

// A byte full of the sign of each 16-bit element of two words: bytes 1, 5, 3, 7.
RULE u32 sign_bytes(u32 a, u32 b) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, 0xFBD9;" : "=r"(bytes) : "r"(a), "r"(b));
    return bytes;
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
    // Bytes 1 and 3 of a word hold the signs of its elements; even elements go to low nibbles, odd
    // ones to high nibbles.
    u32 first = sign_bytes(x.w[4 * h], x.w[4 * h + 1]), second = sign_bytes(x.w[4 * h + 2], x.w[4 * h + 3]);
    u32 even = permute(first, second, 0x5410), odd = permute(first, second, 0x7632);
    return (even & 0x08080808) | (odd & 0x80808080);
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
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = with_ties(__fmul_rn(element(x, 8 * h + i), inverse * CODE_UNIT));
        // A byte of floor(2·L(y)), at most 14, under its sign. One more makes bits 1 to 3 the code.
        u32 even = high_bytes(cut_off(y[0], y[2]), cut_off(y[4], y[6])) + 0x01010101;
        u32 odd = high_bytes(cut_off(y[1], y[3]), cut_off(y[5], y[7])) + 0x01010101;
        even = merged(even >> 1, even >> 4, 0x07070707);
        odd = merged(odd << 3, odd, 0x70707070);
        half[h] = merged(even, odd, 0x0F0F0F0F);
#endif
    }
    return both_halves(half[0], half[1]);
}

// Twin of stochastic::encode, for an ordinary block. The random part of the code is r/256 in every
// step of the grid, so the code is the integer part of L(y) + r/256, and 8 bits of L's fraction are
// enough. But the rule rounds y plus its random part. That matters below 1/4 alone: what is within
// 2⁻²⁶ below a value of the grid is rounded up to it. Adding that much to y, rounded down, does the
// same, and changes nothing from 1/4 on.
template <Precision P>
RULE u64 stochastic_codes(const Elements<P>& x, float inverse, const philox::Words& random) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            y[i] = __fadd_rd(__fmul_rn(absolute(element(x, 8 * h + i)), inverse * CODE_UNIT), 0x1p-26f * CODE_UNIT);
        }
        // Elements 0 and 2, 1 and 3, 4 and 6, 5 and 7, with their bytes of randomness.
        u32 sums[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int first = i / 2 * 4 + i % 2;
            u32 r = permute(random.w[2 * h + i / 2], 0, i % 2 ? 0x4341 : 0x4240);
            sums[i] = __vminu2(cut_off(y[first], y[first + 2]) + r * 2, 0x0FFF0FFF);
        }
        u32 even = high_bytes(sums[0], sums[2]), odd = high_bytes(sums[1], sums[3]);
        half[h] = (even >> 1 & 0x07070707) | (odd << 3 & 0x70707070) | sign_bits(x, h);
    }
    return both_halves(half[0], half[1]);
}

template <Precision P>
RULE void unpack(const Elements<P>& x, float out[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) out[i] = element(x, i);
}

// The amax of a block, given its largest magnitude or NaN.
template <class S, Precision P>
RULE float counted(const Elements<P>& x, float largest) {
    if (!is_nan(largest)) return largest;
    float values[BLOCK];
    unpack(x, values);
    return amax_beside_nan<S>(values);
}

// Twin of Scaling::code of every element: any block, any profile.
template <class S>
RARE u64 codes_by_rule(const float x[BLOCK], u32 byte, scale::Global global, Precision p, philox::Words random) {
    profile::Factor factor = profile::factor(byte, global, S::PROFILE, p, S::SPECIALS);
    constexpr Specials specials = profile::code_specials(S::PROFILE, S::SPECIALS);
    u64 codes = 0;
#pragma unroll 1
    for (int i = 0; i < BLOCK; i++) {
        float y = profile::apply(factor, x[i]);
        u32 code;
        if (S::STOCHASTIC && !(S::PROFILE == MODEL_OPT && is_nan(y))) code = stochastic::encode(y, (i < 8 ? i < 4 ? random.w[0] : random.w[1] : i < 12 ? random.w[2] : random.w[3]) >> (8 * (i % 4)) & 255, specials);
        else code = profile::code(y, S::PROFILE, S::SPECIALS);
        codes |= (u64)code << (4 * i);
    }
    return codes;
}

// ---- 4over6 ----
//
// The choice by a filter, as in the AVX2 version (quantize/avx2/four_over_six.rs has the argument;
// here is what differs). With y = fl(x·inv), the rule's own product, and q its code's value, d = q
// − y is exact (Sterbenz, or q = 0). The error in units of the input is e = q·f − x = f·d + (f·y −
// x); inv is 1/f within four roundings and y adds one, so |f·y − x| is at most 5.05u·x ≤ 33u·f. The
// rule's computed errors are e within 12.2u·f + u·|e|. A lane adds 16 terms, 16 lanes of a square
// tile add up in 4 more steps: at most 22 roundings against the rule's 20.
//
// MAE: the sums differ by at most u·(46·n·f + 48·Ê). MSE: |Δ| ≤ 46u·f per element, squares differ
// by |Δ|·(2.14·f + |Δ|) < 99u·f²; plus one rounding per square: u·(100·n·f² + 50·Ê). Used are 48,
// 104 and 64.
//
// f is the scale's value times a unit that both candidates share, so all is compared in that unit.

// 0 ≤ y ≤ 6.5 rounded to the grid, both in units of `one`, a power of two. With e the power of two at
// or below max(y, 1) the grid's step is e/2. c·2²² is a multiple of that: if c is y, y is a multiple
// of 2⁻²³e. Numbers as large as y − c·2²² are e/2 apart, so it is rounded to the grid, ties to even;
// where they are e/4 apart, y is next to e and becomes e. Adding c·2²² again is exact.
RULE float grid_value(float y, float one) {
    float c = fmaxf(y, one * 0x1.000004p0f);
    return __fmaf_rn(c, 0x1p22f, __fmaf_rn(c, -0x1p22f, y));
}

// Candidates are scaled by GRID_UNIT, which changes no rounding: there a small type has values of
// the grid as bytes that are their codes, shifted.
#if HARDWARE_E4M3
constexpr float GRID_UNIT = 0x1p-6f;
constexpr int GRID_SHIFT = 2;
RULE u32 grid_bytes(float a, float b, float c, float d) { return e4m3::encode_four(a, b, c, d); }
#else
constexpr float GRID_UNIT = CODE_UNIT;
constexpr int GRID_SHIFT = 1;
RULE u32 grid_bytes(float a, float b, float c, float d) { return high_bytes(cut_off(a, b), cut_off(c, d)); }
#endif

// 16 codes that lack the signs of their elements.
template <Precision P>
RULE u64 with_signs(u32 low, u32 high, const Elements<P>& x) {
    return both_halves(low | sign_bits(x, 0), high | sign_bits(x, 1));
}

// A row of 16 with one of the candidates: its codes without signs, those of even and of odd elements
// apart, and its filtered error in units of GRID_UNIT·f or its square.
struct Filtered {
    u32 even[2], odd[2];
    float error;
};

RULE u32 joined(u32 even, u32 odd) { return even >> GRID_SHIFT | odd << (4 - GRID_SHIFT); }

template <Precision P>
RULE Filtered filtered(const Elements<P>& x, float inverse, Metric metric) {
    Filtered f;
    float error[2];
    inverse = inverse * GRID_UNIT;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float y = __fmul_rn(absolute(element(x, 8 * h + i)), inverse);
            values[i] = grid_value(y, GRID_UNIT);
            float d = __fadd_rn(values[i], -y);
            if (h == 0 && i < 2) error[i] = metric == MAE ? absolute(d) : __fmul_rn(d, d);
            else error[i % 2] = metric == MAE ? __fadd_rn(error[i % 2], absolute(d)) : __fmaf_rn(d, d, error[i % 2]);
        }
        f.even[h] = grid_bytes(values[0], values[2], values[4], values[6]);
        f.odd[h] = grid_bytes(values[1], values[3], values[5], values[7]);
    }
    f.error = __fadd_rn(error[0], error[1]);
    return f;
}

// Twin of four_over_six::tile_error for one row of an ordinary tile: the rule's operations in the
// rule's order, with signs left out, which change no error. The division is a product corrected by
// its remainder, which rounds as a division does where nothing underflows (Markstein).
RARE float ordinary_error(const float x[BLOCK], float value, float inverse, scale::Global global, Metric metric,
                          ErrorPath path) {
    float sum = 0.0f, by = -global.six_e, reciprocal = 1.0f / global.six_e;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float a = absolute(x[i]), q = grid_value(__fmul_rn(a, inverse), 1.0f) * value, e;
        if (path == STRICT) {
            float product = q * global.amax, quotient = product * reciprocal;
            e = __fmaf_rn(__fmaf_rn(by, quotient, product), reciprocal, quotient) - a;
        } else e = q - a * global.encode;
        sum = sum + (metric == MAE ? absolute(e) : e * e);
    }
    return sum;
}

struct Candidate {
    u32 byte;
    float value, inverse;
};

RULE Candidate candidate(u32 byte, const Scaling& s) {
    float value = scale_value(byte);
    return {byte, value, inverse_of(value, s)};
}

struct Candidates {
    Candidate six, four;
};

// Twin of four_over_six::candidate_scales for a regular scaling. x/6 is a product, corrected by its
// remainder; where that underflows, both bytes are 0 anyway.
RULE Candidates candidates(float amax, const Scaling& s) {
    float sixth = amax * SIXTH;
    float base = __fmaf_rn(__fmaf_rn(sixth, -6.0f, amax), SIXTH, sixth) * s.global.encode;
    return {candidate(scale_byte(base), s), candidate(scale_byte(base * 1.5f), s)};
}

// Whether the argument above covers a tile: a regular scaling, elements of at most 6.5 (the other
// candidate's are not larger) and normal scales, or equal ones, which tie.
RULE bool covered(const Candidates& c, float largest, const Scaling& s) {
    return s.regular && largest * c.six.inverse <= ORDINARY_LIMIT &&
           !(c.six.byte < E4M3_MIN_NORMAL_BYTE && c.six.byte != c.four.byte);
}

enum Choice { SIX_WINS, FOUR_WINS, UNDECIDED };

// The choice between candidates with the filtered errors `six` and `four` over a tile of `elements`
// elements. A tie is six.
RULE Choice filter(const Candidates& c, float six, float four, int elements, Metric metric) {
    float u6 = metric == MAE ? c.six.value : c.six.value * c.six.value;
    float u4 = metric == MAE ? c.four.value : c.four.value * c.four.value;
    six = six * u6, four = four * u4;
    float term = metric == MAE ? 0x30p-24f * GRID_UNIT : 0x68p-24f * GRID_UNIT * GRID_UNIT;
    float bound = (six + four) * 0x40p-24f + (u6 + u4) * (term * elements);
    float difference = four - six;
    if (difference < -bound) return FOUR_WINS;
    return difference > bound || c.six.byte == c.four.byte ? SIX_WINS : UNDECIDED;
}

// ---- Positions ----

// The position of a block: its row in the direction, its index in the direction and in the row, and
// its number of elements; in a group also the group and its index there.
struct Position {
    u32 row, index, block, width, group, within;
};

RULE u64 blocks_of(const Direction& d) { return (d.cols + (WHOLE ? 0 : BLOCK - 1)) / BLOCK; }

template <class S>
RULE void store_scale(const Direction& d, const Position& at, u32 byte) {
    d.scales[S::SWIZZLED ? swizzle::offset(at.row, at.block, blocks_of(d)) : at.index] = (u8)byte;
}

RULE void store_codes(const Direction& d, const Position& at, u64 codes) {
    if (WHOLE) {
        *(u64*)(d.codes + (u64)at.index * 8) = codes;
        return;
    }
    u8* out = d.codes + at.row * ((d.cols + 1) / 2) + at.block * 8ull;
    // Codes of missing elements are zero, also where padding rounds to something else.
    if (at.width < BLOCK) codes &= (1ull << 4 * at.width) - 1;
    for (u32 i = 0; 2 * i < at.width; i++) out[i] = (u8)(codes >> 8 * i);
}

RULE philox::Words random_of(const Direction& d, const Position& at) {
    if (d.random_bytes) {
        philox::Words words;
        const u8* bytes = d.random_bytes + 16ull * at.index;
        for (int i = 0; i < 4; i++) {
            words.w[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | (u32)bytes[4 * i + 3] << 24;
        }
        return words;
    }
    u64 offset = d.offset + (d.offset_memory ? *d.offset_memory : 0);
    // A group draws what it would draw as a matrix by itself, one call after the other.
    if (GROUPED) return stochastic::block(d.seed, offset + (u64)OFFSETS_PER_CALL * at.group, at.within);
    return stochastic::block(d.seed, offset, d.first_block + at.index);
}

// ---- From elements to codes ----

// The codes of a block whose scale is known, and whether it is ordinary.
template <class S, Precision P>
RULE u64 codes_of(const Elements<P>& x, u32 byte, float inverse, bool ordinary, const scale::Global& global, const Direction& d,
                  const Position& at) {
    philox::Words random = {};
    if (S::STOCHASTIC) random = random_of(d, at);
    if (PLAIN<S> && ordinary) return S::STOCHASTIC ? stochastic_codes(x, inverse, random) : nearest_codes(x, inverse);
    float values[BLOCK];
    unpack(x, values);
    return codes_by_rule<S>(values, byte, global, P, random);
}

// The results for a 1×16 block.
struct Result {
    u64 codes;
    u32 byte;
};

// A 1×16 block by the rules: any block, any mode. Arguments by value, so that callers keep theirs
// in registers.
template <class S, Precision P>
RARE Result block_by_rule(const float x[BLOCK], scale::Global global, const Direction& d, Position at) {
    u32 byte;
    float amax = amax_beside_nan<S>(x);
    if (S::RULE_OF == SIX || SEARCHED<S>) {
        byte = profile::block_scale(amax, global, S::PROFILE, P, S::SPECIALS);
        if (S::RULE_OF == LEAST_SQUARES) byte = mse::search(x, byte, global, S::PROFILE, P, S::SPECIALS);
        else if (SEARCHED<S>) byte = modelopt::search(x, amax, byte, global, S::RULE_OF);
    } else {
        four_over_six::Pair bytes = four_over_six::candidate_scales(amax, global, S::SPECIALS);
        float six = four_over_six::row_error(x, bytes.six, global, METRIC<S>, (ErrorPath)d.error, S::SPECIALS);
        float four = four_over_six::row_error(x, bytes.four, global, METRIC<S>, (ErrorPath)d.error, S::SPECIALS);
        byte = four < six ? bytes.four : bytes.six;
    }
    philox::Words random = {};
    if (S::STOCHASTIC) random = random_of(d, at);
    return {codes_by_rule<S>(x, byte, global, P, random), byte};
}

template <class S, Precision P>
RULE Result quantize_block(const Elements<P>& x, float largest, const Scaling& s, const Direction& d, const Position& at) {
    if (S::RULE_OF == SIX) {
        u32 byte = scale_byte(largest * s.multiplier);
        float inverse = inverse_of(scale_value(byte), s);
        if (s.regular && largest * inverse <= ORDINARY_LIMIT) {
            return {codes_of<S>(x, byte, inverse, true, s.global, d, at), byte};
        }
    } else if (!SEARCHED<S>) {
        Candidates c = candidates(largest, s);
        if (covered(c, largest, s)) {
            Filtered six = filtered(x, c.six.inverse, METRIC<S>), four = filtered(x, c.four.inverse, METRIC<S>);
            Choice choice = filter(c, six.error, four.error, BLOCK, METRIC<S>);
            bool four_wins = choice == FOUR_WINS;
            if (choice == UNDECIDED) {
                float values[BLOCK];
                unpack(x, values);
                ErrorPath path = (ErrorPath)d.error;
                float e6 = ordinary_error(values, c.six.value, c.six.inverse, s.global, METRIC<S>, path);
                float e4 = ordinary_error(values, c.four.value, c.four.inverse, s.global, METRIC<S>, path);
                four_wins = e4 < e6;
            }
            u32 low = joined(four_wins ? four.even[0] : six.even[0], four_wins ? four.odd[0] : six.odd[0]);
            u32 high = joined(four_wins ? four.even[1] : six.even[1], four_wins ? four.odd[1] : six.odd[1]);
            return {with_signs(low, high, x), four_wins ? c.four.byte : c.six.byte};
        }
    }
    float values[BLOCK];
    unpack(x, values);
    return block_by_rule<S, P>(values, s.global, d, at);
}
