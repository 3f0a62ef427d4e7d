// The column direction, with or without the row direction: a block of 256 threads has 128 rows and columns, which it reads
// once and turns through shared memory. Read squares.cuh first.

constexpr int PANEL = 128;  // rows and columns of a panel
constexpr int WORDS = INPUT == F32 ? PANEL : PANEL / 2;  // of a row of a panel
constexpr int UNITS = 4;    // blocks of each direction that a thread has: 256 threads, 128 × 8 blocks

struct PanelMemory {
    u32 tile[PANEL][WORDS];
    u64 codes[PANEL][9];  // of the columns; 9 and not 8, so that neighbouring columns lie in different banks
    u8 scales[PANEL][8];
};

// Quantizes `UNITS` blocks of a panel that a thread has; `store(i, codes, byte)` gets the results. All threads call this.
template <class S, Precision P, class Store>
RULE void quantize_units(const Elements<P>* x, const int* tile, const int* row, const Place* at, const Direction& d,
                         Squares<S, 64>& shared, Store store) {
    Scaling s;
    if (!d.per_row) s = scaling_of<S>(d.amax[0], d);
    if constexpr (S::SQUARE) {
        if (threadIdx.x < 64) shared.largest[threadIdx.x] = 0, shared.amax[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < UNITS; i++) combine_maxima(x[i], tile[i], shared);
        __syncthreads();
        Scaled scaled[UNITS];
        square_scales<S, P, UNITS, 64>(x, tile, row, s, d, shared, scaled);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (at[i].width) store(i, codes_of<S>(x[i], scaled[i], s, d, at[i]), scaled[i].byte);
        }
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            if (!at[i].width) continue;
            if (d.per_row) s = scaling_of<S>(d.amax[at[i].row], d);
            Result r = quantize_block<S>(x[i], largest(x[i]), s, d, at[i]);
            store(i, r.codes, r.byte);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) quantize_panels(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    PanelMemory& m = *(PanelMemory*)memory;
    u32 panels = (u32)((p.cols + PANEL - 1) / PANEL);
    u64 first_row = (u64)(blockIdx.x / panels) * PANEL, first_col = (u64)(blockIdx.x % panels) * PANEL;
    int t = threadIdx.x;
    Place at[UNITS];
    int tile[UNITS], row[UNITS];
    {
        // Eight neighbouring threads have the eight blocks of a row.
        Elements<INPUT> x[UNITS];
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            int r = i * 32 + t / 8, b = t % 8;
            u64 at_row = first_row + r;
            u32 block = (u32)(first_col / BLOCK) + b;
            bool inside = at_row < p.rows && (u64)block * BLOCK < p.cols;
            at[i] = {at_row, at_row * blocks_of(p.row) + block, block, inside ? width_at(block, p.cols) : 0};
            tile[i] = r / 16 * 8 + b, row[i] = r % 16;
            x[i] = load(p, at_row, block, at[i].width);
        }
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            uint4* to = (uint4*)&m.tile[i * 32 + t / 8][t % 8 * (WORDS / 8)];
#pragma unroll
            for (int k = 0; k < WORDS / 32; k++) {
                to[k] = make_uint4(x[i].w[4 * k], x[i].w[4 * k + 1], x[i].w[4 * k + 2], x[i].w[4 * k + 3]);
            }
        }
        if constexpr (Row::WANTED) {
            decltype(prepared<Row>(x[0], 0)) y[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; i++) y[i] = prepared<Row>(x[i], p.row.signs);
            auto store = [&](int i, u64 codes, u32 byte) {
                store_codes(p.row, at[i], codes);
                store_scale(p.row, at[i], byte);
            };
            quantize_units<Row>(y, tile, row, at, p.row, *(Squares<Row, 64>*)(&m + 1), store);
        }
    }
    __syncthreads();
    // A warp has 16 rows of the panel, a thread two neighbouring columns of 16-bit elements, or one of 32 bits.
    const Direction& d = p.col;
    decltype(prepared<Col>(Elements<INPUT>(), 0)) y[UNITS];
    int column[UNITS], band = t / 32;
    auto place = [&](int i, int c) {
        u64 at_col = first_col + c, start = first_row + band * BLOCK;
        bool inside = at_col < p.cols && start < p.rows;
        u32 block = (u32)(start / BLOCK);
        at[i] = {at_col, at_col * blocks_of(d) + block, block, inside ? width_at(block, p.rows) : 0};
        tile[i] = c / 16 * 8 + band, row[i] = c % 16, column[i] = c;
    };
    if constexpr (INPUT == F32) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            int c = i * 32 + t % 32;
            Elements<INPUT> x;
#pragma unroll
            for (int k = 0; k < BLOCK; k++) x.w[k] = m.tile[band * BLOCK + k][c];
            y[i] = prepared<Col>(x, d.signs);
            place(i, c);
        }
    } else {
#pragma unroll
        for (int i = 0; i < UNITS; i += 2) {
            int word = i / 2 * 32 + t % 32;
            Elements<INPUT> even, odd;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 a = m.tile[band * BLOCK + 2 * k][word], b = m.tile[band * BLOCK + 2 * k + 1][word];
                even.w[k] = permute(a, b, 0x5410), odd.w[k] = permute(a, b, 0x7632);
            }
            y[i] = prepared<Col>(even, d.signs), y[i + 1] = prepared<Col>(odd, d.signs);
            place(i, 2 * word), place(i + 1, 2 * word + 1);
        }
    }
    bool whole = d.code_alignment == 16 && first_row + PANEL <= p.rows;
    auto store = [&](int i, u64 codes, u32 byte) {
        m.codes[column[i]][band] = codes;
        m.scales[column[i]][band] = (u8)byte;
        if (!whole) store_codes(d, at[i], codes);
        if (!whole || d.swizzled) store_scale(d, at[i], byte);
    };
    quantize_units<Col>(y, tile, row, at, d, *(Squares<Col, 64>*)(&m + 1), store);
    if (!whole) return;
    __syncthreads();
    // A column's codes are 64 bytes side by side, its scales 8.
    u64 pitch = d.cols / 2, blocks = blocks_of(d);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int c = i * 64 + t / 4, part = t % 4;
        if (first_col + c >= p.cols) break;
        const u64* from = &m.codes[c][2 * part];
        uint4 v = make_uint4((u32)from[0], (u32)(from[0] >> 32), (u32)from[1], (u32)(from[1] >> 32));
        *(uint4*)(d.codes + (first_col + c) * pitch + first_row / 2 + 16 * part) = v;
    }
    if (!d.swizzled && t < PANEL && first_col + t < p.cols) {
        u8* to = d.scales + (first_col + t) * blocks + first_row / BLOCK;
        if ((u64)to % 8 == 0) *(u64*)to = *(const u64*)m.scales[t];
        else for (int i = 0; i < 8; i++) to[i] = m.scales[t][i];
    }
}
