// The row direction of tensors, blocks of 128 and blocks of 32. Read units.cuh first. Settings
// before this text: PER_THREAD, the units of a thread at a time, and FLAT, whether the matrix is
// one row of whole tiles.
//
// Units are distributed in memory order over as many threads as the device holds. A thread loads
// its next units before it encodes the current ones. Neighbouring lanes have the units of a tile,
// so rows are counted in whole tiles.

constexpr u32 GROUP = SCALING == BLOCKS_128 ? FP8_BLOCK / BLOCK : SCALING == BLOCKS_32 ? MX_BLOCK / BLOCK : 1;

struct Batch {
    Elements<INPUT> x[PER_THREAD];
};

struct Position {
    u64 row, column;
    u32 width;
};

// A unit by its index in the matrix.
RULE Position position_of(const Params& p, u32 index, u32 units, u32 total) {
    if (index >= total) return {0, 0, 0};
    if (FLAT) return {0, (u64)index * BLOCK, BLOCK};
    u32 row = divided(index, p.divisor_magic, p.divisor_shift);
    u64 column = (u64)(index - row * units) * BLOCK;
    return {row, column, width_at(column, p.cols)};
}

RULE Batch load_batch(const Params& p, u32 first, u32 units, u32 total) {
    Batch batch;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        Position at = position_of(p, first + 128 * i, units, total);
        batch.x[i] = load_unit(p, at.row, at.column, at.width);
    }
    return batch;
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) quantize_fp8_rows(const __grid_constant__ Params p) {
    u64 tiles = (p.cols + BLOCK * GROUP - 1) / (BLOCK * GROUP);
    u32 rows = GROUPED ? p.groups.offsets[p.groups.count] : (u32)p.rows;
    u32 units = (u32)(tiles * GROUP), total = rows * units, step = gridDim.x * (128 * PER_THREAD);
    TileScale scale;
    if (SCALING == TENSORS) {
        scale = tensor_scale(p, 0);
        u32 count = GROUPED ? p.groups.count : 1;
        for (u32 i = threadIdx.x; blockIdx.x == 0 && i < count; i += 128) store_scale(p.row_scales, GROUP_SCALES * i, tensor_scale(p, i));
    }
    // The group of the last unit, and where it ends.
    u32 group = 0, end = GROUPED ? p.groups.offsets[1] : 0;
    // Warps stay together, since their lanes exchange maxima: `first` is that of lane 0.
    u32 lane = threadIdx.x % 32, first = blockIdx.x * (128 * PER_THREAD) + threadIdx.x - lane, seen = 0;
    Batch batch = load_batch(p, first + lane, units, total);
#pragma unroll 1
    for (; first < total; first += step) {
        Batch next = load_batch(p, first + lane + step, units, total);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            u32 index = first + lane + 128 * i;
            u32 m = SCALING != TENSORS || AMAX ? seen_in(batch.x[i]) : 0;
            Position at = position_of(p, index, units, total);
            if (GROUPED && at.row >= end) {
                if (AMAX && seen) atomicMax(p.amax + group, word_maximum(seen)), seen = 0;
                while (at.row >= end) end = p.groups.offsets[++group + 1];
                if (SCALING == TENSORS) scale = tensor_scale(p, group);
            }
            if (AMAX) seen = larger_seen(seen, m, INPUT);
            if (SCALING != TENSORS) {
                scale = tile_scale(p, from_bits(maximum_over_lanes<1, GROUP / 2>(word_maximum(m))));
                if (index < total && index % GROUP == 0) store_scale(p.row_scales, index / GROUP, scale);
            }
            uint4 codes = encode_unit(batch.x[i], [&](int) { return scale.multiplier; });
            store_codes(p.row_codes + at.row * p.cols + at.column, codes, at.width, WHOLE);
        }
        batch = next;
    }
    // Lanes may have come to different groups.
    if (AMAX && GROUPED && seen) atomicMax(p.amax + group, word_maximum(seen));
    if (AMAX && !GROUPED) {
        u32 bits = __reduce_max_sync(0xFFFFFFFF, word_maximum(seen));
        if (lane == 0 && bits) atomicMax(p.amax, bits);
    }
}
