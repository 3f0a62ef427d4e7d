// The row direction in 16×16 tiles. A group of threads has 32 tiles side by side, a warp has
// PER_THREAD of their rows (a setting before this text). Read squares.cuh first.

extern "C" __global__ void __launch_bounds__(512 / PER_THREAD, MIN_BLOCKS) quantize_squares(const __grid_constant__ Params p) {
    __shared__ Squares<Row, 32> shared;
    const Direction& d = p.row;
    u32 blocks = (u32)blocks_of(d), groups = (blocks + 31) / 32;
    u32 band = blockIdx.x / groups, part = blockIdx.x % groups;
    Group g = GROUPED ? group_at(p.groups, band * 16) : Group{0, 0, 0, d.rows};
    // Rows count from the group's first one.
    u32 top = band * 16 - g.padded;
    if (GROUPED && top >= g.rows) return;
    u32 lane = threadIdx.x % 32, block = part * 32 + lane;
    u32 first = top + threadIdx.x / 32 * PER_THREAD;
    if (threadIdx.x < 32) shared.largest[lane] = 0, shared.amax[lane] = 0;
    Elements<INPUT> x[PER_THREAD];
    u32 width = block < blocks ? width_at(block, d.cols) : 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) x[i] = load(p, g.first + first + i, block, first + i < g.rows ? width : 0);
    // One thread computes the scaling for all while the loads are in flight.
    __shared__ Scaling scaling;
    if (threadIdx.x == 0) scaling = scaling_of<Row>(d.amax[g.index], d);
    decltype(prepared<Row>(x[0], 0)) y[PER_THREAD];
    int tile[PER_THREAD], row[PER_THREAD];
    __syncthreads();
    // The maximum of a thread's rows first, so that shared memory is updated once.
    float m = 0.0f, c = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        y[i] = prepared<Row>(x[i], d.signs);
        tile[i] = lane, row[i] = threadIdx.x / 32 * PER_THREAD + i;
        float l = largest(y[i]), k = counted<Row>(y[i], l);
        m = to_bits(l) > to_bits(m) ? l : m;
        c = to_bits(k) > to_bits(c) ? k : c;
    }
    atomicMax(&shared.largest[lane], to_bits(m));
    atomicMax(&shared.amax[lane], to_bits(c));
    __syncthreads();
    Scaling s = scaling;
    Scaled scaled[PER_THREAD];
    auto reload = [&](int t, int r) {
        u32 at_block = part * 32 + t, at_row = top + r;
        bool inside = at_block < blocks && at_row < g.rows;
        return prepared<Row>(load(p, g.first + at_row, at_block, inside ? width_at(at_block, d.cols) : 0), d.signs);
    };
    square_scales<Row, decltype(prepared<Row>(x[0], 0))::PRECISION, PER_THREAD, 32>(y, tile, row, s, d, shared, scaled, reload);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (width == 0 || first + i >= g.rows) break;
        u32 row = g.first + first + i;
        Position at = {row, row * blocks + block, block, width, g.index, (first + i) * blocks + block};
        store_block<Row>(d, at, square_codes<Row>(y[i], scaled[i], s, d, at), scaled[i].byte);
    }
}
