// A panel: the part of a matrix that a group of threads turns for the column direction. Read
// matrix.cuh first.

constexpr int HEIGHT = 128, WIDTH = 64;                  // rows and columns of a panel
constexpr int WORDS = INPUT == F32 ? WIDTH : WIDTH / 2;  // of a row of a panel
constexpr int BANDS = HEIGHT / 16, STRIPS = WIDTH / 16;  // blocks of a column and of a row

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
