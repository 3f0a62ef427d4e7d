// The first element that is NaN or infinite. A thread reads 16 bytes at a time. One that finds such
// an element writes its index and kind; the smallest index wins. Settings before this text: INPUT.

struct Params {
    const u8* x;
    u64 len;
    u64* found;
    u32 aligned, padding;
};

constexpr int SIZE = INPUT == F32 ? 4 : 2;
constexpr int STRIP = 16 / SIZE;  // elements that a thread looks at
constexpr u32 EXPONENT = INPUT == F32 ? 0x7F800000 : INPUT == BF16 ? 0x7F80 : 0x7C00;

// Finite numbers, and they alone, have a zero in their exponent.
RULE bool all_finite(u32 word) {
    bool low = (word & EXPONENT) != EXPONENT;
    return INPUT == F32 ? low : low && (word >> 16 & EXPONENT) != EXPONENT;
}

extern "C" __global__ void __launch_bounds__(256) first_not_finite(const __grid_constant__ Params p) {
    u64 strips = (p.len + STRIP - 1) / STRIP;
    for (u64 s = (u64)blockIdx.x * 256 + threadIdx.x; s < strips; s += (u64)gridDim.x * 256) {
        if (p.aligned && (s + 1) * STRIP <= p.len) {
            uint4 v = ((const uint4*)p.x)[s];
            if (all_finite(v.x) && all_finite(v.y) && all_finite(v.z) && all_finite(v.w)) continue;
        }
        u64 end = (s + 1) * STRIP < p.len ? (s + 1) * STRIP : p.len;
        for (u64 i = s * STRIP; i < end; i++) {
            u32 bits = INPUT == F32 ? ((const u32*)p.x)[i] : ((const u16*)p.x)[i];
            if (all_finite(bits)) continue;
            bool nan = bits & (EXPONENT & -EXPONENT) - 1, negative = bits >> (8 * SIZE - 1);
            atomicMin(p.found, 4 * i + (nan ? 2 : negative));
            break;
        }
    }
}
