// A panel: the part of a matrix that a group of threads turns for the column direction. Read
// matrix.cuh first.

constexpr int HEIGHT = 128, WIDTH = 64;                  // rows and columns of a panel
constexpr int WORDS = INPUT == F32 ? WIDTH : WIDTH / 2;  // of a row of a panel
constexpr int BANDS = HEIGHT / 16, STRIPS = WIDTH / 16;  // blocks of a column and of a row

constexpr u32 THREADS = MOST_THREADS;

// The amax of a direction or of a group, for all lanes of a warp. Maxima of parts come from the
// kernel before, which may still run; the first block of threads stores the largest.
RULE float found_amax(const Direction& d, u32 group) {
    if (!d.parts) return d.amax[group];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    u32 lane = threadIdx.x % 32, bits = 0;
    uint4 found[MOST_PARTS / 128];
    // All loads are in flight together. What lies between the last one and a multiple of four is not
    // written, and not counted.
#pragma unroll
    for (u32 i = 0; i < MOST_PARTS / 128; i++) {
        u32 first = 4 * (lane + 32 * i);
        found[i] = first < d.parts ? __ldcg((const uint4*)(d.amax + first)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (u32 i = 0; i < MOST_PARTS / 128; i++) {
        u32 first = 4 * (lane + 32 * i), w[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (first + k < d.parts) bits = bits > w[k] ? bits : w[k];
        }
    }
    float amax = from_bits(__reduce_max_sync(0xFFFFFFFF, bits));
    if (lane == 0 && blockIdx.x == 0) *d.stored = amax;
    return amax;
}

// The scalings of both directions, by two warps.
RULE void find_scalings(const Params& p, u32 group, Scaling& row, Scaling& col) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && Row::WANTED && !p.row.per_row) {
        float amax = found_amax(p.row, group);
        if (lane == 0) row = scaling_of<Row>(amax, p.row);
    }
    if (warp == 1 && !p.col.per_row) {
        float amax = found_amax(p.col, group);
        if (lane == 0) col = scaling_of<Col>(amax, p.col);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Sixteen elements of a column of the panel, from row `first` on.
RULE Elements<INPUT> column_elements(const u32 (*tile)[WORDS], int column, int first) {
    Elements<INPUT> x;
#pragma unroll
    for (int k = 0; k < BLOCK; k++) {
        if (INPUT == F32) x.w[k] = tile[first + k][column];
        else {
            u32 e = tile[first + k][column / 2] >> 16 * (column % 2) & 0xFFFF;
            x.w[k / 2] = k % 2 ? x.w[k / 2] | e << 16 : e;
        }
    }
    return x;
}

// The elements of two neighbouring columns of 16-bit elements, given as words of a row each. The
// factor is that of the transform.
template <class S>
RULE void column_pair(const u32 w[BLOCK], u32 signs, decltype(prepared<S>(Elements<INPUT>(), 0))* out,
                      float factor = HADAMARD_FACTOR) {
    if constexpr (S::TRANSFORM) {
        float v[BLOCK];
#pragma unroll
        for (int k = 0; k < BLOCK; k++) v[k] = low_element(w[k], INPUT);
        out[0] = rotated<S>(v, signs, factor);
#pragma unroll
        for (int k = 0; k < BLOCK; k++) v[k] = high_element(w[k], INPUT);
        out[1] = rotated<S>(v, signs, factor);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[0].w[k] = permute(w[2 * k], w[2 * k + 1], 0x5410);
            out[1].w[k] = permute(w[2 * k], w[2 * k + 1], 0x7632);
        }
    }
}

// Stores the values of a panel's columns from row `first_row` and column `first_col` on, given its
// codes and scales: a line of codes for each 16 rows. Those of a column are 256 bytes side by side.
template <class Byte>
RULE void store_column_values(const Direction& d, const u64 (*codes)[WIDTH + 2], Byte byte, u32 first_row, u32 first_col, u32 cols) {
    constexpr u32 UNITS = HEIGHT / 8;  // of eight values
#pragma unroll 2
    for (u32 i = threadIdx.x; i < WIDTH * UNITS; i += THREADS) {
        u32 c = i / UNITS, unit = i % UNITS;
        if (!FULL && first_col + c >= cols) break;
        u32 word = ((const u32*)&codes[unit / 2][c])[unit % 2];
        u8* to = d.codes + ((first_col + c) * d.cols + first_row + unit * 8) * 2;
        *(uint4*)to = values_of(word, byte(c, unit / 2));
    }
}

// Stores the scales of a column from block `first` on, `BANDS` bytes side by side, or in tiles twice
// 4. A row of the direction has `blocks` of them.
template <class S>
RULE void store_column_scales(u8* all, u32 column, u32 first, u32 blocks, u64 scales) {
    constexpr int RUN = S::SWIZZLED ? 4 : BANDS;
#pragma unroll
    for (int i = 0; i < BANDS; i += RUN) {
        u64 part = scales >> 8 * i;
        u8* to = all + (S::SWIZZLED ? swizzle::offset(column, first + i, blocks) : (u64)column * blocks + first + i);
        if ((u64)to % RUN) for (int k = 0; k < RUN; k++) to[k] = (u8)(part >> 8 * k);
        else if (S::SWIZZLED) *(u32*)to = (u32)part;
        else *(u64*)to = part;
    }
}
