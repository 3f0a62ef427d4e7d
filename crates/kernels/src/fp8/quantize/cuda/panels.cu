// The column direction, with or without the row direction, and squares. A group of 256 threads
// reads a panel of 128 × 128 elements once and keeps it in registers. Read units.cuh first.
//
// A thread has four rows of one unit: sixteen columns. Its lane and its warp say which: lanes 0 … 7
// have the eight units of rows 0 … 3, and so on, so that a warp has 16 rows and two warps have 32,
// a block of MXFP8's columns and the height of its squares. Shared memory is used to exchange maxima
// and multipliers, and to transpose codes.

constexpr int SIDE = 128, ROWS = 4, UNITS = 8, WARPS = 8;
// Whether columns have scales, and so codes, of their own.
constexpr bool OWN_SCALES = COLUMN && (SCALING == BLOCKS_128 || SCALING == BLOCKS_32);
// Whether columns are written as rows of the transposed matrix.
constexpr bool TRANSPOSED = COLUMN && !MX;
// Whether there is one maximum for the panel.
constexpr bool ONE_MAXIMUM = AMAX || SCALING == SQUARES_128;
// Tiles of a column within a panel.
constexpr int BANDS = MX ? SIDE / MX_BLOCK : 1;

struct PanelMemory {
    // Codes of columns: 16 rows at index `row / 16 ^ column / 16` of a column, so that neither
    // writes nor reads have bank conflicts.
    uint4 transposed[TRANSPOSED ? SIDE : 1][UNITS];
    float multipliers[OWN_SCALES ? BANDS : 1][SIDE];
    u32 of_columns[OWN_SCALES ? WARPS : 1][UNITS * WORDS];
    u32 of_warps[WARPS];
    // Maxima of the 16 rows of a warp and 32 columns: halves of squares.
    u32 of_halves[SCALING == SQUARES_32 ? WARPS : 1][SIDE / MX_BLOCK];
};

// The codes of four rows of sixteen columns, as four rows of every column, into the panel's memory.
RULE void transpose(const uint4 codes[ROWS], PanelMemory& m, u32 warp, u32 lane) {
    u32 unit = lane % UNITS, word = lane / UNITS;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 w[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) w[i] = j == 0 ? codes[i].x : j == 1 ? codes[i].y : j == 2 ? codes[i].z : codes[i].w;
        u32 low[2] = {permute(w[0], w[1], 0x5140), permute(w[2], w[3], 0x5140)};
        u32 high[2] = {permute(w[0], w[1], 0x7362), permute(w[2], w[3], 0x7362)};
        u32 column = unit * BLOCK + 4 * j;
        u32* to = (u32*)&m.transposed[column][warp ^ unit] + word;
        constexpr int NEXT = UNITS * 4;  // words to the next column
        to[0] = permute(low[0], low[1], 0x5410), to[NEXT] = permute(low[0], low[1], 0x7632);
        to[2 * NEXT] = permute(high[0], high[1], 0x5410), to[3 * NEXT] = permute(high[0], high[1], 0x7632);
    }
}

// The maxima of columns: a warp's lanes combine those of its 16 rows and store them in the panel's
// memory.
RULE void find_maxima_of_columns(const Elements<INPUT> x[ROWS], PanelMemory& m, u32 warp, u32 lane) {
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) word = larger_seen(word, magnitudes(x[i].w[k], INPUT), INPUT);
#pragma unroll
        for (int distance = UNITS; distance < 32; distance *= 2) {
            word = larger_seen(word, __shfl_xor_sync(0xFFFFFFFF, word, distance), INPUT);
        }
        if (lane < UNITS) m.of_columns[warp][lane * WORDS + k] = word;
    }
}

// The scales of columns, from the maxima that all warps stored; multipliers go to the panel's
// memory.
RULE void scale_columns(const Params& p, PanelMemory& m, const Group& g, u64 first_row, u64 first_col) {
#pragma unroll
    for (u32 item = threadIdx.x; item < BANDS * SIDE; item += 256) {
        u32 band = item / SIDE, c = item % SIDE, word = 0;
#pragma unroll
        for (int w = 0; w < WARPS / BANDS; w++) {
            word = larger_seen(word, m.of_columns[band * (WARPS / BANDS) + w][INPUT == F32 ? c : c / 2], INPUT);
        }
        float amax = INPUT == F32 ? from_bits(word) : c % 2 ? high_element(word, INPUT) : low_element(word, INPUT);
        TileScale scale = tile_scale(p, amax);
        m.multipliers[band][c] = scale.multiplier;
        u64 column = first_col + c, row = first_row + band * (SIDE / BANDS);
        if (column >= p.cols || row >= g.rows) continue;
        u64 down = (g.height() + SIDE - 1) / SIDE, before = g.padded / SIDE * p.cols;
        u64 at = SCALING == BLOCKS_32 ? (g.padded + row) / MX_BLOCK * p.cols + column : before + column * down + row / SIDE;
        store_scale(p.col_scales, at, scale);
    }
}

// The scale of a square of 32, from the maxima that its two warps stored.
RULE TileScale scale_of_square(const Params& p, const PanelMemory& m, u32 band, u32 square) {
    u32 upper = m.of_halves[2 * band][square], lower = m.of_halves[2 * band + 1][square];
    return tile_scale(p, from_bits(upper > lower ? upper : lower));
}

// The scales of squares of 32 in the column direction: each column of a square has its byte.
RULE void store_scales_of_squares(const Params& p, const PanelMemory& m, const Group& g, u64 first_row, u64 first_col) {
#pragma unroll
    for (u32 item = threadIdx.x; item < BANDS * SIDE; item += 256) {
        u32 band = item / SIDE, c = item % SIDE;
        u64 column = first_col + c, row = first_row + band * MX_BLOCK;
        if (column >= p.cols || row >= g.rows) continue;
        store_scale(p.col_scales, (g.padded + row) / MX_BLOCK * p.cols + column, scale_of_square(p, m, band, c / MX_BLOCK));
    }
}

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) quantize_fp8_panels(const __grid_constant__ Params p) {
    __shared__ PanelMemory m;
    u32 across = (u32)((p.cols + SIDE - 1) / SIDE);
    u32 panel_row = divided(blockIdx.x, p.divisor_magic, p.divisor_shift), panel_col = blockIdx.x - panel_row * across;
    Group g = GROUPED ? group_at(p.groups, panel_row * SIDE) : Group{0, 0, 0, p.rows};
    // Rows count from the group's first one.
    u64 first_row = (u64)panel_row * SIDE - g.padded, first_col = (u64)panel_col * SIDE;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = lane % UNITS;
    u64 row = first_row + (warp * 4 + lane / UNITS) * ROWS, column = first_col + unit * BLOCK;
    u32 width = width_at(column, p.cols);
    if (GROUPED && SCALING == TENSORS && blockIdx.x == 0) {
        // Also of groups without rows.
        for (u32 i = threadIdx.x; i < p.groups.count; i += 256) {
            TileScale scale = tensor_scale(p, i);
            if (ROW) store_scale(p.row_scales, GROUP_SCALES * i, scale);
            if (COLUMN) store_scale(p.col_scales, GROUP_SCALES * i, scale);
        }
    }
    if (GROUPED && first_row >= g.rows) return;
    Elements<INPUT> x[ROWS];
    u32 seen[ROWS], all = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) x[i] = load_unit(p, g.first + row + i, column, row + i < g.rows ? width : 0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        seen[i] = ONE_MAXIMUM || SCALING != TENSORS ? seen_in(x[i]) : 0;
        all = larger_seen(all, seen[i], INPUT);
    }
    if (SCALING == SQUARES_32) {
        // Two lanes have 32 columns; those 8 and 16 further have the other rows of the warp.
        u32 half = maximum_over_lanes<UNITS, 16>(maximum_over_lanes<1, 1>(word_maximum(all)));
        if (lane < UNITS && lane % 2 == 0) m.of_halves[warp][lane / 2] = half;
    }
    if (ONE_MAXIMUM) {
        all = __reduce_max_sync(0xFFFFFFFF, word_maximum(all));
        if (lane == 0) m.of_warps[warp] = all;
    }
    if (OWN_SCALES) find_maxima_of_columns(x, m, warp, lane);
    if (ONE_MAXIMUM || OWN_SCALES || SCALING == SQUARES_32) __syncthreads();
    if (ONE_MAXIMUM) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) all = all > m.of_warps[w] ? all : m.of_warps[w];
        if (AMAX && threadIdx.x == 0 && all) atomicMax(p.amax + g.index, all);
    }
    if (OWN_SCALES) scale_columns(p, m, g, first_row, first_col);
    TileScale scale;
    if (SCALING == SQUARES_32) {
        scale = scale_of_square(p, m, warp / 2, unit / 2);
        if (COLUMN) store_scales_of_squares(p, m, g, first_row, first_col);
    }
    // One scale for the panel.
    if (SCALING == TENSORS || SCALING == SQUARES_128) {
        scale = SCALING == TENSORS ? tensor_scale(p, g.index) : tile_scale(p, from_bits(all));
        if (threadIdx.x == 0 && (SCALING == SQUARES_128 || (!GROUPED && blockIdx.x == 0))) {
            bool squares = SCALING == SQUARES_128;
            if (ROW) store_scale(p.row_scales, squares ? (u64)panel_row * across + panel_col : 0, scale);
            u64 in_columns = (u64)across * (g.padded / SIDE) + panel_col * (g.height() / SIDE) + first_row / SIDE;
            if (COLUMN) store_scale(p.col_scales, squares ? in_columns : 0, scale);
        }
    }
    uint4 codes[ROWS];
    if (ROW || !OWN_SCALES) {
        constexpr u32 GROUP = SCALING == BLOCKS_128 ? FP8_BLOCK / BLOCK : MX_BLOCK / BLOCK;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (SCALING == BLOCKS_128 || SCALING == BLOCKS_32) {
                scale = tile_scale(p, from_bits(maximum_over_lanes<1, GROUP / 2>(word_maximum(seen[i]))));
            }
            if (ROW && (SCALING == BLOCKS_128 || MX)) {
                u64 tiles = (p.cols + BLOCK * GROUP - 1) / (BLOCK * GROUP);
                if (unit % GROUP == 0 && width && row + i < g.rows) {
                    store_scale(p.row_scales, (g.first + row + i) * tiles + column / (BLOCK * GROUP), scale);
                }
            }
            codes[i] = encode_unit(x[i], [&](int) { return scale.multiplier; });
            if (row + i >= g.rows) continue;
            u64 at = (g.first + row + i) * p.cols + column;
            if (ROW) store_codes(p.row_codes + at, codes[i], width, WHOLE);
            // Squares of 32 have the same codes in both directions, as they lie.
            if (COLUMN && SCALING == SQUARES_32) store_codes(p.col_codes + at, codes[i], width, p.wide);
        }
    }
    if (!COLUMN) return;
    if (OWN_SCALES) {
        __syncthreads();
        const float* multipliers = m.multipliers[BANDS == 1 ? 0 : warp / (WARPS / BANDS)] + unit * BLOCK;
        float by[BLOCK];
#pragma unroll
        for (int k = 0; k < BLOCK; k++) by[k] = multipliers[k];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            codes[i] = encode_unit(x[i], [&](int k) { return by[k]; });
            if (TRANSPOSED || row + i >= g.rows) continue;
            store_codes(p.col_codes + (g.first + row + i) * p.cols + column, codes[i], width, p.wide);
        }
    }
    if (!TRANSPOSED) return;
    transpose(codes, m, warp, lane);
    __syncthreads();
    // Eight neighbouring threads have the 128 codes of a column.
#pragma unroll
    for (u32 i = 0; i < SIDE * UNITS / 256; i++) {
        u32 c = (i * 256 + threadIdx.x) / UNITS, part = threadIdx.x % UNITS;
        u64 at_col = first_col + c, at_row = first_row + part * BLOCK;
        if (at_col >= p.cols) break;
        // A group's padding is written too.
        u32 many = GROUPED ? BLOCK : width_at(at_row, g.rows);
        u64 pitch = GROUPED ? g.height() : p.rows, before = GROUPED ? g.padded * p.cols : 0;
        store_codes(p.col_codes + before + at_col * pitch + at_row, m.transposed[c][part ^ c / BLOCK], many, p.wide);
    }
}
