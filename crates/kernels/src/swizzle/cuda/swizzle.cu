// Scale bytes between row-major order and tiles of 128 × 4. Twin of spec's swizzle. A thread has
// four neighbouring bytes of a row, which stay neighbours. Settings before this text: TO_TILES, the
// direction.

struct Params {
    const u8* from;
    u8* to;
    u64 rows, cols;  // of the scale matrix
};

extern "C" __global__ void __launch_bounds__(256) swizzle_scales(const __grid_constant__ Params p) {
    u64 fours = (p.cols + 3) / 4, padded = (p.rows + 127) / 128 * 128;
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x, r = index / fours, c = index % fours * 4;
    if (r >= padded) return;
    u64 tiled = swizzle::offset(r, c, p.cols), linear = r * p.cols + c;
    int n = r >= p.rows ? 0 : p.cols - c < 4 ? (int)(p.cols - c) : 4;
    if (TO_TILES) {
        for (int i = 0; i < 4; i++) p.to[tiled + i] = i < n ? p.from[linear + i] : 0;
    } else {
        for (int i = 0; i < n; i++) p.to[linear + i] = p.from[tiled + i];
    }
}
