// Just enough of CUDA for g++ to build and run a kernel: the threads of a group are fibers that are
// scheduled round-robin, and wait at the kernel's barriers. For tests; comes before a kernel's
// text.

#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __syncthreads() emulated::wait(emulated::groups, 0, blockDim.x)

// Loads and stores of these trap where they are not aligned, as on a GPU.
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

static struct { unsigned x; } threadIdx, blockIdx, gridDim, blockDim;

namespace emulated {

constexpr unsigned MOST = 256, STACK = 1 << 16;
static ucontext_t fibers[MOST], scheduler;
static bool running[MOST];
// How often a thread waited for its group and its warp; what its warp exchanges.
static unsigned groups[MOST], warps[MOST], exchanged[2][MOST];

// Waits for the threads from `first` to `end` to have waited as often. One that has returned is an
// error.
static void wait(unsigned* counts, unsigned first, unsigned end) {
    unsigned me = threadIdx.x, count = ++counts[me];
    for (unsigned t = first; t < end; t++) {
        while (counts[t] < count) {
            if (!running[t]) abort();
            swapcontext(&fibers[me], &scheduler);
        }
    }
}

// Shares a value with the warp; returns the values of all its lanes.
static const unsigned* exchange(unsigned value) {
    unsigned first = threadIdx.x / 32 * 32, *to = exchanged[warps[threadIdx.x] % 2];
    to[threadIdx.x] = value;
    wait(warps, first, first + 32);
    return to + first;
}

}  // namespace emulated

static inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int distance) {
    if (mask != 0xFFFFFFFF) abort();
    return emulated::exchange(value)[threadIdx.x % 32 ^ distance];
}

static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    if (mask != 0xFFFFFFFF) abort();
    const unsigned* values = emulated::exchange(value);
    for (int i = 0; i < 32; i++) value = value > values[i] ? value : values[i];
    return value;
}

static inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    if (mask != 0xFFFFFFFF) abort();
    const unsigned* values = emulated::exchange(value);
    value = 0;
    for (int i = 0; i < 32; i++) value += values[i];
    return value;
}

static inline unsigned atomicMax(unsigned* at, unsigned value) {
    unsigned old = *at;
    *at = old > value ? old : value;
    return old;
}

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}
