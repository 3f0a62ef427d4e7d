// The column direction, with or without the row direction. A group of 128 or 256 threads reads a
// panel of 128 rows × 64 columns once and transposes it through shared memory. Read panel.cuh and squares.cuh
// first. Settings before this text: FULL, whether all panels lie within the matrix.

constexpr int UNITS = HEIGHT * STRIPS / MOST_THREADS;  // blocks of each direction that a thread has
constexpr int TILES = BANDS * STRIPS;

struct PanelMemory {
    u32 tile[HEIGHT][WORDS];
    // Of the columns, a line for each 16 rows. Padded by two columns, so that the codes of one
    // column are in different banks.
    u64 codes[BANDS][WIDTH + 2];
    u8 scales[BANDS][WIDTH];
    Scaling row, col;
};

// Quantizes the `UNITS` blocks of a thread. `store(i, codes, byte)` stores the results,
// `reload(tile, row)` returns the elements of any row of a square tile. All threads call this.
template <class S, Precision P, class Store, class Reload>
RULE void quantize_units(const Elements<P>* x, const int* tile, const int* row, const Position* at, const Direction& d,
                         Scaling s, Squares<S, TILES>& shared, Store store, Reload reload) {
    if constexpr (S::SQUARE) {
        if (threadIdx.x < TILES) shared.largest[threadIdx.x] = 0, shared.amax[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < UNITS; i++) combine_maxima(x[i], tile[i], shared);
        __syncthreads();
        Scaled scaled[UNITS];
        square_scales<S, P, UNITS, TILES>(x, tile, row, s, d, shared, scaled, reload);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (FULL || at[i].width) store(i, square_codes<S>(x[i], scaled[i], s, d, at[i]), scaled[i].byte);
        }
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (!FULL && !at[i].width) continue;
            if (d.per_row) s = scaling_of<S>(d.amax[at[i].row], d);
            Result r = quantize_block<S>(x[i], largest(x[i]), s, d, at[i]);
            store(i, r.codes, r.byte);
        }
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, MIN_BLOCKS) quantize_panels(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    PanelMemory& m = *(PanelMemory*)memory;
    u32 panels = (u32)((p.cols + WIDTH - 1) / WIDTH), cols = (u32)p.cols, t = threadIdx.x;
    u32 down = divided(blockIdx.x, p.divisor_magic, p.divisor_shift);
    Group g = GROUPED ? group_at(p.groups, down * HEIGHT) : Group{0, 0, 0, p.rows};
    // Rows count from the group's first one.
    u32 rows = (u32)g.rows, first_row = down * HEIGHT - g.padded, first_col = (blockIdx.x - down * panels) * WIDTH;
    if (GROUPED && first_row >= rows) return;
    Position at[UNITS];
    int tile[UNITS], row[UNITS];
    {
        // Four neighbouring threads have the four blocks of a row.
        Elements<INPUT> x[UNITS];
        u32 blocks = (u32)blocks_of(p.row), block = first_col / BLOCK + t % STRIPS;
        u32 width = FULL || block * BLOCK < cols ? width_at(block, cols) : 0;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            u32 r = i * (THREADS / STRIPS) + t / STRIPS;
            u32 at_row = first_row + r;
            u32 stored_row = g.first + at_row;
            at[i] = {stored_row, stored_row * blocks + block, block, FULL || at_row < rows ? width : 0, g.index, at_row * blocks + block};
            tile[i] = r / 16 * STRIPS + t % STRIPS, row[i] = r % 16;
            x[i] = load(p, stored_row, block, at[i].width);
        }
        // Two warps compute the scalings for all while the loads are in flight.
        find_scalings(p, g.index, m.row, m.col);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            uint4* to = (uint4*)&m.tile[i * (THREADS / STRIPS) + t / STRIPS][t % STRIPS * (WORDS / STRIPS)];
#pragma unroll
            for (int k = 0; k < WORDS / STRIPS / 4; k++) {
                to[k] = make_uint4(x[i].w[4 * k], x[i].w[4 * k + 1], x[i].w[4 * k + 2], x[i].w[4 * k + 3]);
            }
        }
        __syncthreads();
        if constexpr (Row::WANTED) {
            decltype(prepared<Row>(x[0], 0)) y[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; i++) y[i] = prepared<Row>(x[i], p.row.signs);
            auto store = [&](int i, u64 codes, u32 byte) {
                store_block<Row>(p.row, at[i], codes, byte);
            };
            auto reload = [&](int tile, int r) {
                u32 at_row = first_row + tile / STRIPS * 16 + r, at_block = first_col / BLOCK + tile % STRIPS;
                bool inside = at_row < rows && at_block * BLOCK < cols;
                return prepared<Row>(load(p, g.first + at_row, at_block, inside ? width_at(at_block, cols) : 0), p.row.signs);
            };
            quantize_units<Row>(y, tile, row, at, p.row, m.row, *(Squares<Row, TILES>*)(&m + 1), store, reload);
        }
    }
    // A warp has one or two bands of 16 rows; a thread has two neighbouring columns of 16-bit elements in
    // each, or two of 32 bits.
    const Direction& d = p.col;
    decltype(prepared<Col>(Elements<INPUT>(), 0)) y[UNITS];
    u32 column[UNITS], band[UNITS];
    // Of a row of the direction; and before the group's.
    u32 blocks = GROUPED ? (u32)g.height() / BLOCK : (u32)blocks_of(d), before = GROUPED ? g.padded / BLOCK * cols : 0;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        u32 c = INPUT == F32 ? i % 2 * 32 + t % 32 : t % 32 * 2 + i % 2, b = t / 32 + i / 2 * (THREADS / 32);
        u32 at_col = first_col + c, block = first_row / BLOCK + b;
        // A group's padding is written too.
        bool inside = FULL || (at_col < cols && (GROUPED || block * BLOCK < rows));
        at[i] = {g.index * cols + at_col, before + at_col * blocks + block, block, inside ? width_at(block, rows) : 0, g.index,
                 at_col * blocks + block};
        tile[i] = c / 16 * BANDS + b, row[i] = c % 16, column[i] = c, band[i] = b;
        if constexpr (INPUT == F32) y[i] = prepared<Col>(column_elements(m.tile, c, b * BLOCK), d.signs);
        else if (i % 2 == 0) {
            u32 w[BLOCK];
#pragma unroll
            for (int k = 0; k < BLOCK; k++) w[k] = m.tile[b * BLOCK + k][c / 2];
            column_pair<Col>(w, d.signs, y + i);
        }
    }
    bool whole = p.wide_codes && (FULL || GROUPED || first_row + HEIGHT <= rows);
    u64 previous;
    auto store = [&](int i, u64 codes, u32 byte) {
        if (!whole) {
            store_block<Col>(d, at[i], codes, byte);
            return;
        }
        m.scales[band[i]][column[i]] = (u8)byte;
        if (INPUT == F32) m.codes[band[i]][column[i]] = codes;
        else if (i % 2 == 0) previous = codes;
        else *(ulonglong2*)&m.codes[band[i]][column[i] - 1] = make_ulonglong2(previous, codes);
    };
    auto reload = [&](int tile, int r) {
        return prepared<Col>(column_elements(m.tile, tile / BANDS * 16 + r, tile % BANDS * BLOCK), d.signs);
    };
    quantize_units<Col>(y, tile, row, at, d, m.col, *(Squares<Col, TILES>*)(&m + 1), store, reload);
    if (!whole) return;
    __syncthreads();
    if constexpr (Col::VALUES) {
        auto byte = [&](u32 c, u32 band) { return (u32)m.scales[band][c]; };
        store_column_values(d, m.codes, byte, first_row, first_col, cols);
        return;
    }
    // A column's codes are 64 bytes side by side, its scales 8, or in tiles twice 4.
    u64 pitch = (u64)blocks * 8;
    u8* all_codes = d.codes + (u64)before * 8;
#pragma unroll
    for (int i = 0; i < 4 * WIDTH / THREADS; i++) {
        u32 c = i * (THREADS / 4) + t / 4, part = t % 4;
        if (!FULL && first_col + c >= cols) break;
        u8* to = all_codes + (first_col + c) * pitch + first_row / 2 + 16 * part;
        *(ulonglong2*)to = make_ulonglong2(m.codes[2 * part][c], m.codes[2 * part + 1][c]);
    }
    if (t < WIDTH && (FULL || first_col + t < cols)) {
        u64 scales = 0;
#pragma unroll
        for (int i = 0; i < BANDS; i++) scales |= (u64)m.scales[i][t] << 8 * i;
        store_column_scales<Col>(d.scales + (Col::SWIZZLED ? 0 : before), first_col + t, first_row / BLOCK, blocks, scales);
    }
}
