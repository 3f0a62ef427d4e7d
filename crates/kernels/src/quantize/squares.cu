// The row direction in 16×16 tiles: a block of 128 threads has 32 tiles side by side, a warp four of their rows.
// Read squares.cuh first.

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) quantize_squares(const __grid_constant__ Params p) {
    __shared__ Squares<Row, 32> shared;
    const Direction& d = p.row;
    u32 blocks = (u32)blocks_of(d), groups = (blocks + 31) / 32;
    u32 band = blockIdx.x / groups, group = blockIdx.x % groups;
    u32 lane = threadIdx.x % 32, block = group * 32 + lane;
    u64 first = (u64)band * 16 + threadIdx.x / 32 * 4;
    if (threadIdx.x < 32) shared.largest[lane] = 0, shared.amax[lane] = 0;
    Scaling s = scaling_of<Row>(d.amax[0], d);
    Elements<INPUT> x[4];
    u32 width = block < blocks ? width_at(block, d.cols) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = load(p, first + i, block, first + i < d.rows ? width : 0);
    decltype(prepared<Row>(x[0], 0)) y[4];
    int tile[4], row[4];
    __syncthreads();
    // The maximum of a thread's four rows first: one update of shared memory instead of four.
    float m = 0.0f, c = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i] = prepared<Row>(x[i], d.signs);
        tile[i] = lane, row[i] = threadIdx.x / 32 * 4 + i;
        float l = largest(y[i]), k = counted<Row>(y[i], l);
        m = to_bits(l) > to_bits(m) ? l : m;
        c = to_bits(k) > to_bits(c) ? k : c;
    }
    atomicMax(&shared.largest[lane], to_bits(m));
    atomicMax(&shared.amax[lane], to_bits(c));
    __syncthreads();
    Scaled scaled[4];
    square_scales<Row, decltype(prepared<Row>(x[0], 0))::PRECISION, 4, 32>(y, tile, row, s, d, shared, scaled);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (width == 0 || first + i >= d.rows) break;
        Place at = {first + i, (first + i) * blocks + block, block, width};
        store_codes(d, at, codes_of<Row>(y[i], scaled[i], s, d, at));
        store_scale(d, at, scaled[i].byte);
    }
}
