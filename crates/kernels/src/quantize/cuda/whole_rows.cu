// The row direction in 1×16 blocks with the amax of each row: a group of threads reads a row once.
// Read matrix.cuh first. Settings before this text: PER_THREAD, the most blocks of a thread, and
// MOST_THREADS.

// The maximum of magnitudes over the threads of a block, as integers, so that NaN counts as larger
// than everything.
RULE float block_maximum(float mine, u32* shared) {
    u32 bits = __reduce_max_sync(0xFFFFFFFF, to_bits(mine));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
    __syncthreads();
    u32 warps = blockDim.x / 32;
    bits = threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0;
    return from_bits(__reduce_max_sync(0xFFFFFFFF, bits));
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) quantize_whole_rows(const __grid_constant__ Params p) {
    __shared__ u32 maxima[32];
    const Direction& d = p.row;
    u32 blocks = (u32)blocks_of(d);
    u32 row = blockIdx.x;
    decltype(prepared<Row>(Elements<INPUT>(), 0)) x[PER_THREAD];
    float m[PER_THREAD], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u32 block = threadIdx.x + i * blockDim.x;
        if (block < blocks) x[i] = prepared<Row>(load(p, row, block, width_at(block, d.cols)), d.signs);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u32 block = threadIdx.x + i * blockDim.x;
        if (block >= blocks) break;
        m[i] = largest(x[i]);
        float c = counted<Row>(x[i], m[i]);
        amax = to_bits(c) > to_bits(amax) ? c : amax;
    }
    amax = block_maximum(amax, maxima);
    if (threadIdx.x == 0) d.amax[row] = amax;
    Scaling s = scaling_of<Row>(amax, d);
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        u32 block = threadIdx.x + i * blockDim.x;
        if (block >= blocks) break;
        quantize_and_store<Row>(x[i], m[i], s, d, {row, row * blocks + block, block, width_at(block, d.cols)});
    }
}
