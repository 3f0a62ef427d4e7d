// Sixteen neighbouring elements in the registers of a thread, in memory order. Read rules.cuh
// first.
//
// A C++ compiler for the host builds this text too, so what a chip has an instruction for stands
// beside plain arithmetic.

// Sixteen elements, two of the 16-bit types to a word.
template <Precision P>
struct Elements {
    static constexpr Precision PRECISION = P;
    u32 w[P == F32 ? 16 : 8];
};

#ifdef __CUDACC__

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

// The same where NaN is not seen; the first word has none.
RULE u32 larger_seen(u32 a, u32 b, Precision p) {
    u32 m;
    if (p == BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else if (p == F16) asm("max.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else m = to_bits(fmaxf(from_bits(a), from_bits(b)));
    return m;
}

#if __CUDA_ARCH__ >= 860
// The larger magnitudes of two words of 16-bit elements, under signs that mean nothing; NaN wins.
RULE u32 larger_magnitudes(u32 a, u32 b, Precision p) {
    u32 m;
    if (p == BF16) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
}
#endif

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

#else

RULE float low_element(u32 word, Precision p) {
    return p == BF16 ? precision::from_bf16((u16)word) : precision::from_f16((u16)word);
}

RULE float high_element(u32 word, Precision p) { return low_element(word >> 16, p); }

// Magnitudes are in the order of their bits, NaN above all.
RULE u32 larger(u32 a, u32 b, Precision p) {
    if (p == F32) return a > b ? a : b;
    u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a : b, high = a >> 16 > b >> 16 ? a : b;
    return (low & 0xFFFF) | (high & 0xFFFF0000);
}

RULE u32 larger_seen(u32 a, u32 b, Precision p) {
    u32 infinity = p == F32 ? 0x7F800000 : p == BF16 ? 0x7F80 : 0x7C00;
    if (p == F32) return larger(a, b > infinity ? 0 : b, p);
    u32 low = b & 0xFFFF, high = b >> 16;
    return larger(a, (low > infinity ? 0 : low) | (high > infinity ? 0 : high) << 16, p);
}

RULE u32 pack_bf16(float low, float high) { return precision::to_bf16(low) | (u32)precision::to_bf16(high) << 16; }

RULE u32 pack_f16(float low, float high) { return precision::to_f16(low) | (u32)precision::to_f16(high) << 16; }

#endif

// Element i; i is a constant after unrolling.
template <Precision P>
RULE float element(const Elements<P>& x, int i) {
    if (P == F32) return from_bits(x.w[i]);
    return i % 2 ? high_element(x.w[i / 2], P) : low_element(x.w[i / 2], P);
}

// The magnitudes of a word.
RULE u32 magnitudes(u32 word, Precision p) { return word & (p == F32 ? 0x7FFFFFFF : 0x7FFF7FFF); }

// The largest magnitude of sixteen; NaN if there is one.
template <Precision P>
RULE float largest(const Elements<P>& x) {
    constexpr int N = P == F32 ? 16 : 8;
    u32 m[N];
#if __CUDA_ARCH__ >= 860
    if constexpr (P != F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = larger_magnitudes(x.w[i], x.w[i + 4], P);
        m[0] = larger_magnitudes(larger_magnitudes(m[0], m[2], P), larger_magnitudes(m[1], m[3], P), P);
        return absolute(low_element(larger_magnitudes(m[0], m[0] >> 16, P), P));
    }
#endif
#pragma unroll
    for (int i = 0; i < N; i++) m[i] = magnitudes(x.w[i], P);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) m[i] = larger(m[i], m[i + half], P);
    }
    return P == F32 ? from_bits(m[0]) : low_element(larger(m[0], m[0] >> 16, P), P);
}

// Sixteen elements that lie at a multiple of 16 bytes.
template <Precision P>
RULE Elements<P> load_whole(const u8* from) {
    Elements<P> x;
#pragma unroll
    for (int i = 0; i < (P == F32 ? 4 : 2); i++) {
        uint4 v = ((const uint4*)from)[i];
        x.w[4 * i] = v.x, x.w[4 * i + 1] = v.y, x.w[4 * i + 2] = v.z, x.w[4 * i + 3] = v.w;
    }
    return x;
}

// The first `width` of sixteen elements that lie anywhere; the others are zero.
template <Precision P>
RULE Elements<P> load_some(const u8* from, u32 width) {
    Elements<P> x;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (P == F32) x.w[i] = i < width ? ((const u32*)from)[i] : 0;
        else {
            u32 e = i < width ? ((const u16*)from)[i] : 0;
            x.w[i / 2] = i % 2 ? x.w[i / 2] | e << 16 : e;
        }
    }
    return x;
}

// n / d for n < 2³¹, with the multiplier and the shift that the host found for d; a multiplier of 0
// is for d = 1.
RULE u32 divided(u32 n, u32 magic, u32 shift) { return magic ? mul_high(n, magic) >> shift : n; }

RULE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Twin of hadamard::transform, signs already changed. Another factor is for multiples of it.
RULE Elements<BF16> transformed(float v[BLOCK], float factor = HADAMARD_FACTOR) {
    hadamard::butterflies(v);
    Elements<BF16> out;
#pragma unroll
    for (int i = 0; i < 8; i++) out.w[i] = pack_bf16(v[2 * i] * factor, v[2 * i + 1] * factor);
    return out;
}
