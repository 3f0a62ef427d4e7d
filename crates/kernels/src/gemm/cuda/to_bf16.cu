// Both operands of a product as bf16, in one launch, for a library that multiplies bf16. NVFP4
// values are without their global scale and times 2⁻⁷, FP8 ones without the scale of a whole matrix:
// exact, as are those of MXFP8 unless they are too small for bf16, which is noted. Beside them the
// two factors of the product. Settings before this text: Kind; A and B, the operands' kinds; MATH;
// those of output.cuh.

struct Matrix {
    const u8* codes;
    const u8* scales;
    uint4* out;
    u64 units;   // of eight elements
    u32 across;  // units side by side
    u32 groups;  // of threads that decode it
    u64 format;  // of FP8 codes
};

struct Params {
    Matrix a, b;
    Side left, right;
    float* factors;  // α and β of each product
    u32* inexact;    // the mark if a value does not fit
    float alpha, beta, undo;
    u32 mark;
    u32 count;  // of products: each has two factors, and of either side a number of its own
    u32 padding;
};
static_assert(sizeof(Params) == 184, "as in to_bf16.rs");

constexpr u32 THREADS = 256, PER_THREAD = 4;

// Whether one of eight values lost bits.
RULE bool lost(const float (&values)[8], const float (&factors)[8], uint4 packed) {
    u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    bool any = false;
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        any |= fp8::lost_in_bf16(values[k] * factors[k], (u16)(words[k / 2] >> 16 * (k % 2)));
    }
    return any;
}

template <Kind KIND>
RULE void decode(const Matrix& m, u32 group, u32* inexact, u32 mark) {
    u64 first = (u64)group * (THREADS * PER_THREAD) + threadIdx.x;
    uint2 codes[PER_THREAD], bytes[PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        u64 unit = first + THREADS * i;
        if (unit >= m.units) break;
        if (KIND == NVFP4) {
            codes[i].x = __ldg((const u32*)m.codes + unit), bytes[i].x = m.scales[unit / 2];
            continue;
        }
        codes[i] = __ldg((const uint2*)m.codes + unit);
        if (KIND == FP8_BYTES) bytes[i].x = m.scales[unit / (MX_BLOCK / 8)];
        if (KIND == FP8_COLUMNS) {
            u64 row = unit / m.across, at = unit - row * m.across;
            bytes[i] = __ldg((const uint2*)m.scales + row / MX_BLOCK * m.across + at);
        }
    }
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; i++) {
        u64 unit = first + THREADS * i;
        if (unit >= m.units) break;
        if (KIND == NVFP4) {
            m.out[unit] = decode_in_order(codes[i].x, token_scale(bytes[i].x));
            continue;
        }
        float v[8], f[8];
        if (m.format == E4M3) fp8::decode_four(codes[i].x, E4M3, v), fp8::decode_four(codes[i].y, E4M3, v + 4);
        else fp8::decode_four(codes[i].x, E5M2, v), fp8::decode_four(codes[i].y, E5M2, v + 4);
        bool small = false;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            u32 byte = KIND == FP8_COLUMNS ? (k < 4 ? bytes[i].x : bytes[i].y) >> 8 * (k % 4) & 0xFF : bytes[i].x;
            f[k] = KIND == FP8_CODES ? 1.0f : e8m0::decode(byte);
            small |= KIND != FP8_CODES && byte < fp8::LEAST_NORMAL;
        }
        uint4 out = make_uint4(pack_bf16(v[0] * f[0], v[1] * f[1]), pack_bf16(v[2] * f[2], v[3] * f[3]),
                               pack_bf16(v[4] * f[4], v[5] * f[5]), pack_bf16(v[6] * f[6], v[7] * f[7]));
        if (small && lost(v, f, out)) *inexact = mark;
        m.out[unit] = out;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_to_bf16(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (u32 i = threadIdx.x; blockIdx.x == 0 && i < p.count; i += THREADS) {
        float denominator = p.left.denominator * p.right.denominator;
        p.factors[2 * i] = numerator(p.left, i) * numerator(p.right, i) / denominator * p.alpha * p.undo;
        p.factors[2 * i + 1] = p.beta;
    }
    if (A != PLAIN && blockIdx.x < p.a.groups) decode<A>(p.a, blockIdx.x, p.inexact, p.mark);
    else if (B != PLAIN) decode<B>(p.b, blockIdx.x - p.a.groups, p.inexact, p.mark);
}
