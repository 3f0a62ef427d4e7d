// As panels.cu, where every panel lies within the matrix, or within a group whose missing rows are
// zeros, tiles are 1×16, elements have 16 bits and rows of the columns' codes are aligned to 16
// bytes. Blocks come one after the other, each from shared memory: the code is short, and few
// registers leave room for many groups of threads. Read panel.cuh first.

struct PanelMemory {
    u32 tile[HEIGHT][WORDS];
    // Of the columns, a line for each 16 rows. Padded by two columns, so that the codes of one
    // column are in different banks.
    u64 codes[BANDS][WIDTH + 2];
    u8 scales[WIDTH][BANDS];
    Scaling row, col;
};

// Copies the panel to shared memory, 16 bytes per thread at a time; rows of a group that are not
// there are zeros. Does not wait.
RULE void start_copy(const Params& p, PanelMemory& m, const Group& g, u32 first_row, u32 first_col) {
    constexpr u32 ROWS = THREADS / 8;  // at a time
    u32 row = threadIdx.x / 8, part = threadIdx.x % 8;
    const u8* from = p.x + ((u64)(g.first + first_row + row) * p.stride + first_col) * SIZE + part * 16;
    u32 to = (u32)__cvta_generic_to_shared(&m.tile[row][part * 4]);
    u64 step = ROWS * p.stride * SIZE;
#pragma unroll
    for (int i = 0; i < HEIGHT / ROWS; i++) {
        bool there = !GROUPED || first_row + row + ROWS * i < g.rows;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * ROWS * WORDS * 4), "l"(there ? from + i * step : p.x),
                     "r"(there ? 16 : 0));
    }
}

RULE void wait_for_copy() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Whether elements of the column direction come without the transform's factor of 1/4. Errors of
// 4over6 are squared, which may underflow.
constexpr bool FOURFOLD = Col::TRANSFORM && Col::RULE_OF == SIX;

// A scaling of elements that are four times as large: it leads to the same bits, as long as nothing
// underflows or overflows.
RULE Scaling of_fourfold(const Scaling& s) {
    scale::Global g = s.global;
    return {{g.amax * 4.0f, g.six_e, g.encode * 0.25f, g.decode * 4.0f}, s.multiplier * 0.25f, s.regular};
}

// A block of a transformed column by the rules.
template <class S>
RARE Result column_by_rule(const PanelMemory& m, const Direction& d, scale::Global global, Position at, u32 column, u32 first) {
    float values[BLOCK];
    unpack(prepared<S>(column_elements(m.tile, column, first), d.signs), values);
    return block_by_rule<S, BF16>(values, global, d, at);
}

// A block of a column. Four times its elements have the same codes, unless its largest one is close
// to underflow or overflow, or its scale is 0; elements that underflow beside a larger one have the
// code 0 anyway.
template <class S, Precision P>
RULE Result quantize_column(const PanelMemory& m, const Elements<P>& x, const Scaling& s, const Direction& d, const Position& at,
                            u32 column, u32 first) {
    float l = largest(x);
    if constexpr (FOURFOLD) {
        Scaling fourfold = of_fourfold(s);
        float ratio = l * fourfold.multiplier;
        bool exact = l == 0.0f || (ratio >= E4M3_MIN_POSITIVE && ratio <= 0x1p20f);
        if (!s.regular || !exact) return column_by_rule<S>(m, d, s.global, at, column, first);
        return quantize_block<S>(x, l, fourfold, d, at);
    } else {
        return quantize_block<S>(x, l, s, d, at);
    }
}

// Stores the values of a block of a row. Neighbouring threads have neighbouring blocks of 32 bytes, and
// store them together, one after the other: whole sectors of the memory instead of halves.
RULE void store_with_neighbour(const Direction& d, const Position& at, const Result& r) {
    bool second = threadIdx.x % 2;
    uint4 low = values_of((u32)r.codes, r.byte), high = values_of((u32)(r.codes >> 32), r.byte);
    uint4 give = second ? low : high, got;
    got.x = __shfl_xor_sync(0xFFFFFFFF, give.x, 1), got.y = __shfl_xor_sync(0xFFFFFFFF, give.y, 1);
    got.z = __shfl_xor_sync(0xFFFFFFFF, give.z, 1), got.w = __shfl_xor_sync(0xFFFFFFFF, give.w, 1);
    // Of the four pieces of both blocks a thread has every other one.
    uint4* to = (uint4*)(d.codes + (u64)(at.index - second) * (BLOCK * 2)) + second;
    to[0] = second ? got : low;
    to[2] = second ? high : got;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, MIN_BLOCKS) quantize_full_panels(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    PanelMemory& m = *(PanelMemory*)memory;
    u32 panels = (u32)(p.cols / WIDTH), t = threadIdx.x;
    u32 down = divided(blockIdx.x, p.divisor_magic, p.divisor_shift);
    Group g = GROUPED ? group_at(p.groups, down * HEIGHT) : Group{0, 0, 0, p.rows};
    // Rows count from the group's first one.
    u32 first_row = down * HEIGHT - g.padded, first_col = (blockIdx.x - down * panels) * WIDTH;
    if (GROUPED && first_row >= g.rows) return;
    start_copy(p, m, g, first_row, first_col);
    // Two warps compute the scalings for all meanwhile.
    find_scalings(p, g.index, m.row, m.col);
    wait_for_copy();
    __syncthreads();
    if constexpr (Row::WANTED) {
        // Four neighbouring threads have the four blocks of a row.
        const Direction& d = p.row;
        u32 blocks = (u32)blocks_of(d), block = first_col / BLOCK + t % STRIPS;
        const u8* from = (const u8*)&m.tile[t / STRIPS][t % STRIPS * (WORDS / STRIPS)];
        Scaling s = m.row;
#pragma unroll 1
        for (int i = 0; i < HEIGHT * STRIPS / THREADS; i++) {
            u32 within = first_row + i * (THREADS / STRIPS) + t / STRIPS, row = g.first + within;
            if (GROUPED && within >= g.rows) break;
            Position at = {row, row * blocks + block, block, BLOCK, g.index, within * blocks + block};
            if (d.per_row) s = scaling_of<Row>(d.amax[row], d);
            auto y = prepared<Row>(load_whole<INPUT>(from + i * (THREADS / STRIPS) * WORDS * 4), d.signs);
            if constexpr (Row::VALUES) {
                Result r = quantize_block<Row>(y, largest(y), s, d, at);
                store_with_neighbour(d, at, r);
            } else quantize_and_store<Row>(y, largest(y), s, d, at);
        }
    }
    // A thread has two neighbouring columns in one or two bands of 16 rows.
    const Direction& d = p.col;
    u32 column = t % 32 * 2;
    // Blocks of a row of the direction; and before the group's.
    u32 blocks = GROUPED ? (u32)g.height() / BLOCK : (u32)blocks_of(d), before = GROUPED ? g.padded / BLOCK * (u32)p.cols : 0;
    Scaling s = m.col;
#pragma unroll 1
    for (u32 band = t / 32; band < BANDS; band += THREADS / 32) {
        u32 w[BLOCK];
#pragma unroll
        for (int k = 0; k < BLOCK; k++) w[k] = m.tile[band * BLOCK + k][column / 2];
        decltype(prepared<Col>(Elements<INPUT>(), 0)) y[2];
        column_pair<Col>(w, d.signs, y, FOURFOLD ? HADAMARD_FACTOR * 4.0f : HADAMARD_FACTOR);
        Result r[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 at_col = first_col + column + i, block = first_row / BLOCK + band;
            u32 within = at_col * blocks + block, row = GROUPED ? g.index * (u32)p.cols + at_col : at_col;
            Position at = {row, before + within, block, BLOCK, g.index, within};
            if (d.per_row) s = scaling_of<Col>(d.amax[row], d);
            r[i] = quantize_column<Col>(m, y[i], s, d, at, column + i, band * BLOCK);
            m.scales[column + i][band] = (u8)r[i].byte;
        }
        *(ulonglong2*)&m.codes[band][column] = make_ulonglong2(r[0].codes, r[1].codes);
    }
    __syncthreads();
    if constexpr (Col::VALUES) {
        auto byte = [&](u32 c, u32 band) { return (u32)m.scales[c][band]; };
        store_column_values(d, m.codes, byte, first_row, first_col, (u32)p.cols);
        return;
    }
    // A column's codes are 64 bytes side by side.
    u64 pitch = (u64)blocks * 8;
    u8* all_codes = d.codes + (u64)before * 8;
#pragma unroll
    for (int i = 0; i < 4 * WIDTH / THREADS; i++) {
        u32 c = i * (THREADS / 4) + t / 4, part = t % 4;
        u8* to = all_codes + (first_col + c) * pitch + first_row / 2 + 16 * part;
        *(ulonglong2*)to = make_ulonglong2(m.codes[2 * part][c], m.codes[2 * part + 1][c]);
    }
    if (t < WIDTH) {
        store_column_scales<Col>(d.scales + before, first_col + t, first_row / BLOCK, blocks, *(const u64*)m.scales[t]);
    }
}
