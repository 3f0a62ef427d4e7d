// The bounds of groups from their sizes. One warp. Sizes come from memory or with the call.

constexpr u32 GIVEN = 256;

struct Params {
    const long long* sizes;  // in memory, or null
    u32* offsets;
    u32* padded;
    u32 first, count;  // the groups of this call; earlier calls had those before them
    u32 rows;          // of all groups together, at most
    u32 given[GIVEN];
};

RULE u64 sum_up_to(u64 mine) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u64 other = __shfl_up_sync(0xFFFFFFFF, mine, distance);
        if (threadIdx.x >= distance) mine += other;
    }
    return mine;
}

extern "C" __global__ void __launch_bounds__(32) groups(const __grid_constant__ Params p) {
    u32 lane = threadIdx.x;
    u64 at = p.first ? p.offsets[p.first] : 0, padded = p.first ? p.padded[p.first] : 0;
    if (p.first == 0 && lane == 0) p.offsets[0] = 0, p.padded[0] = 0;
    for (u32 i = 0; i < p.count; i += 32) {
        long long size = i + lane >= p.count ? 0 : p.sizes ? p.sizes[p.first + i + lane] : p.given[i + lane];
        // Whatever memory holds, groups stay within the matrix.
        size = size < 0 ? 0 : size > p.rows ? p.rows : size;
        u64 end = at + sum_up_to(size), begin = end - size;
        end = end < p.rows ? end : p.rows, begin = begin < p.rows ? begin : p.rows;
        u64 padded_end = padded + sum_up_to((end - begin + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS);
        if (i + lane < p.count) p.offsets[p.first + i + lane + 1] = end, p.padded[p.first + i + lane + 1] = padded_end;
        at = __shfl_sync(0xFFFFFFFF, end, 31), padded = __shfl_sync(0xFFFFFFFF, padded_end, 31);
    }
}
