// The row direction in 1×16 blocks. Read matrix.cuh first. Settings before this text: PER_THREAD,
// the blocks of a thread at a time, and FLAT, whether the matrix is one row of whole blocks under
// one amax.

// Every amax is known. Blocks are distributed in memory order over as many threads as the device
// holds. A thread loads its next blocks before it quantizes the current ones.
struct Batch {
    Elements<INPUT> x[PER_THREAD];
};

// A block by its index in the matrix.
RULE Position position_of(const Params& p, u32 index) {
    if (FLAT) return {0, index, index, BLOCK};
    u32 row = divided(index, p.divisor_magic, p.divisor_shift), block = index - row * (u32)blocks_of(p.row);
    return {row, index, block, width_at(block, p.row.cols)};
}

RULE Batch load_batch(const Params& p, u32 first, u32 total) {
    Batch batch;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u32 index = first + 128 * i;
        if (index >= total) break;
        Position at = position_of(p, index);
        batch.x[i] = load(p, at.row, at.block, at.width);
    }
    return batch;
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) quantize_rows(const __grid_constant__ Params p) {
    const Direction& d = p.row;
    u32 rows = GROUPED ? p.groups.offsets[p.groups.count] : (u32)d.rows, blocks = (u32)blocks_of(d);
    u32 total = rows * blocks, step = gridDim.x * (128 * PER_THREAD);
    Scaling s;
    if (!GROUPED && !d.per_row) s = scaling_of<Row>(d.amax[0], d);
    // The group of the last block, and its bounds.
    u32 group = 0, begin = 0, end = GROUPED ? p.groups.offsets[1] : 0;
    if (GROUPED && !d.per_row && total > 0) s = scaling_of<Row>(d.amax[0], d);
    u32 first = blockIdx.x * (128 * PER_THREAD) + threadIdx.x;
    Batch batch = load_batch(p, first, total);
#pragma unroll 1
    for (; first < total; first += step) {
        Batch next = load_batch(p, first + step, total);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            u32 index = first + 128 * i;
            if (index >= total) break;
            Position at = position_of(p, index);
            if (GROUPED && at.row >= end) {
                while (at.row >= end) begin = end, end = p.groups.offsets[++group + 1];
                if (!d.per_row) s = scaling_of<Row>(d.amax[group], d);
            }
            if (GROUPED) at.group = group, at.within = index - begin * blocks;
            if (!FLAT && d.per_row) s = scaling_of<Row>(d.amax[at.row], d);
            auto y = prepared<Row>(batch.x[i], d.signs);
            quantize_and_store<Row>(y, largest(y), s, d, at);
        }
        batch = next;
    }
}
