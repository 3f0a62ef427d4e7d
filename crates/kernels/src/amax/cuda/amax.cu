// The largest magnitudes of a matrix, of its rows and of its columns, each read once. Twin of
// spec's matrix::amax.
//
// A thread has a strip of columns, 16 bytes wide; a warp has 32 strips and walks down the rows of
// its panel. Integer atomics combine the maxima in memory, in any order; the host sets them to zero
// first. Or each block of threads stores those of its own part, for a kernel that finds the largest.
// Settings before this text: SPECIALS, INPUT, OUTPUT_*, which say which maxima are computed, PARTS,
// and GROUPED, whether the rows are in groups (groups.cuh), which have maxima of their own.

constexpr int SIZE = INPUT == F32 ? 4 : 2;

struct Params {
    const u8* x;
    u64 rows, cols, stride;
    u32* tensor;
    u32* row;
    u32* col;
    u32* plain;  // the maximum of everything before the transform
    u32 aligned, signs, panel;  // rows of a panel, a multiple of 16
    u32 padding;
    Groups groups;
};

// The rows of a block of threads, which belong to one group, its elements and its maxima. There may
// be none.
struct Panel {
    u64 first, end;
    const u8* x;
    u32 *tensor, *row, *col, *plain;
};

RULE Panel panel_at(const Params& p, u64 index) {
    u64 first = index * p.panel;
    if (!GROUPED) return {first, first + p.panel < p.rows ? first + p.panel : p.rows, p.x, p.tensor, p.row, p.col, p.plain};
    Group g = group_at(p.groups, (u32)first);
    first -= g.padded;
    const u8* x = p.x + g.first * p.stride * SIZE;
    u64 end = first + p.panel < g.rows ? first + p.panel : g.rows;
    return {first, end, x, p.tensor + g.index, p.row + g.first, p.col + g.index * p.cols, p.plain + g.index};
}

constexpr int STRIP = 16 / SIZE;  // elements of a strip

// The larger magnitudes of two words. The specials decide whether NaN is ignored or wins.
RULE u32 larger_counted(u32 a, u32 b) {
    b = magnitudes(b, INPUT);
    return SPECIALS == REFERENCE ? larger(a, b, INPUT) : larger_seen(a, b, INPUT);
}

// The same under signs that mean nothing.
RULE u32 larger_under_signs(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
    if (INPUT != F32 && SPECIALS == KERNEL) {
        u32 m;
        if (INPUT == BF16) asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
        else asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
        return m;
    }
#endif
    return larger_counted(a, b);
}

// The largest of the magnitude `bits` and those of 16 values after the transform's sums. Ignoring
// NaN, the larger magnitude of a + b and a − b is |a| + |b|: the last sums are half as many.
RULE u32 transformed_maximum(float v[BLOCK], u32 bits) {
    if (SPECIALS == KERNEL) {
        hadamard::butterflies<BLOCK / 2>(v);
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) {
            bits = to_bits(fmaxf(from_bits(bits), absolute(v[i]) + absolute(v[i + BLOCK / 2])));
        }
        return bits;
    }
    hadamard::butterflies(v);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        u32 b = scale::magnitude_bits(v[i], SPECIALS);
        bits = bits > b ? bits : b;
    }
    return bits;
}

// The magnitude's bits in binary32 of the larger element of a word.
RULE u32 word_maximum(u32 word) {
    if (INPUT == F32) return word;
    return to_bits(low_element(larger_counted(word, word >> 16), INPUT));
}

// Combines the maxima of a warp's lanes, then with the one in memory.
RULE void meet(u32* at, u32 bits) {
    bits = __reduce_max_sync(0xFFFFFFFF, bits);
    if (threadIdx.x % 32 == 0 && bits) atomicMax(at, bits);
}

// The maximum of everything that a block of `WARPS` warps has: combined with the one in memory, or
// stored as that of a part. The kernel that reads those waits for all of this one. Each call has a
// NUMBER, and memory of its own: the first warp may still read that of the call before.
template <int WARPS, int NUMBER>
RULE void meet_all(u32* at, u32 bits) {
    __shared__ u32 maxima[WARPS];
    bits = __reduce_max_sync(0xFFFFFFFF, bits);
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    bits = __reduce_max_sync(0xFFFFFFFF, threadIdx.x < WARPS ? maxima[threadIdx.x] : 0);
    if (threadIdx.x == 0 && PARTS) at[blockIdx.x] = bits;
    else if (threadIdx.x == 0 && bits) atomicMax(at, bits);
}

// With maxima of parts: waits for earlier work, and lets the kernel after this one start to load.
RULE void follow() {
#if __CUDA_ARCH__ >= 900
    if (PARTS) asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

RULE uint4 load_strip(const Params& p, const u8* x, u64 r, u64 c) {
    const u8* from = x + (r * p.stride + c) * SIZE;
    if (p.aligned && c + STRIP <= p.cols) return *(const uint4*)from;
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < STRIP; i++) {
        if (c + i >= p.cols) continue;
        if (INPUT == F32) w[i] = ((const u32*)from)[i];
        else w[i / 2] |= (u32)((const u16*)from)[i] << 16 * (i % 2);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// A block of 256 threads: 8 warps side by side in one band of rows, or along the row if there is
// only one.
extern "C" __global__ void __launch_bounds__(256) amax(const __grid_constant__ Params p) {
    u64 strips = (p.cols + STRIP - 1) / STRIP, groups = (strips + 255) / 256;
    u64 strip = blockIdx.x % groups * 256 + threadIdx.x, c = strip * STRIP;
    Panel panel = panel_at(p, blockIdx.x / groups);
    if (panel.first >= panel.end) return;
    follow();
    u64 end = panel.end;
    bool mine = strip < strips;
    u32 m[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (u64 r = panel.first; r < end; r += 8) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = mine && r + i < end ? load_strip(p, panel.x, r + i, c) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (OUTPUT_ROWS && r + i < end) {
                u32 a = larger_counted(larger_counted(0, v[i].x), v[i].y);
                u32 b = larger_counted(larger_counted(0, v[i].z), v[i].w);
                meet(panel.row + r + i, word_maximum(larger_counted(a, b)));
            }
            m[0] = larger_counted(m[0], v[i].x), m[1] = larger_counted(m[1], v[i].y);
            m[2] = larger_counted(m[2], v[i].z), m[3] = larger_counted(m[3], v[i].w);
        }
    }
    if (OUTPUT_COLS && mine) {
#pragma unroll
        for (int i = 0; i < STRIP; i++) {
            if (c + i >= p.cols) break;
            u32 word = INPUT == F32 ? m[i] : m[i / 2] >> 16 * (i % 2);
            u32 bits = INPUT == F32 ? word : to_bits(low_element(word & 0xFFFF, INPUT));
            if (bits) atomicMax(panel.col + c + i, bits);
        }
    }
    if (OUTPUT_TENSOR) {
        u32 all = larger_counted(larger_counted(m[0], m[1]), larger_counted(m[2], m[3]));
        meet_all<8, 0>(panel.tensor, word_maximum(all));
    }
}

// The maxima after the transform along columns (`col`: one per column; or all of them, `tensor`),
// and that before it (`plain`): a thread has one column of f32 or two neighbouring ones, 16 rows at
// a time.
extern "C" __global__ void __launch_bounds__(128, 6) amax_hadamard(const __grid_constant__ Params p) {
    constexpr int WIDE = INPUT == F32 ? 1 : 2;
    u64 units = (p.cols + WIDE - 1) / WIDE, groups = (units + 127) / 128;
    u64 unit = blockIdx.x % groups * 128 + threadIdx.x, c = unit * WIDE;
    Panel panel = panel_at(p, blockIdx.x / groups);
    if (panel.first >= panel.end) return;
    follow();
    u32 m[2] = {0, 0}, before = 0;
    const u8* from = panel.x + (panel.first * p.stride + c) * SIZE;
    u64 step = p.stride * SIZE;
    bool wide = INPUT == F32 || (p.aligned && c + 1 < p.cols);
    u32 negated[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) negated[i] = (p.signs >> i & 1) * (INPUT == F32 ? 0x80000000 : 0x80008000);
#pragma unroll 1
    for (u64 r = panel.first; unit < units && r < panel.end; r += BLOCK, from += BLOCK * step) {
        u32 w[BLOCK];
        // One branch for all loads, so that all are in flight together.
        if (wide && (!GROUPED || r + BLOCK <= panel.end)) {
#pragma unroll
            for (int i = 0; i < BLOCK; i++) w[i] = *(const u32*)(from + i * step);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                const u8* at = from + i * step;
                // A group that ends within a block has zeros there.
                if (GROUPED && r + i >= panel.end) w[i] = 0;
                else if (INPUT == F32) w[i] = *(const u32*)at;
                else w[i] = *(const u16*)at | (c + 1 < p.cols ? (u32)((const u16*)at)[1] << 16 : 0);
            }
        }
#pragma unroll
        for (int i = 0; OUTPUT_PLAIN && i < BLOCK; i++) before = larger_under_signs(before, w[i]);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) w[i] ^= negated[i];
#pragma unroll
        for (int h = 0; h < WIDE; h++) {
            float v[BLOCK];
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                v[i] = INPUT == F32 ? from_bits(w[i]) : h ? high_element(w[i], INPUT) : low_element(w[i], INPUT);
            }
            // Quartering and rounding are monotone: they wait until the end.
            m[h] = transformed_maximum(v, m[h]);
        }
    }
#pragma unroll
    for (int h = 0; h < WIDE; h++) {
        float rounded = precision::round(from_bits(m[h]) * HADAMARD_FACTOR, BF16);
        m[h] = scale::magnitude_bits(rounded, SPECIALS);
    }
    if (OUTPUT_COLS && unit < units) {
        atomicMax(panel.col + c, m[0]);
        if (WIDE == 2 && c + 1 < p.cols) atomicMax(panel.col + c + 1, m[1]);
    }
    if (OUTPUT_TENSOR) meet_all<4, 0>(panel.tensor, WIDE == 2 && c + 1 < p.cols && m[1] > m[0] ? m[1] : m[0]);
    if (OUTPUT_PLAIN) meet_all<4, 1>(panel.plain, word_maximum(magnitudes(before, INPUT)));
}

// The maxima after the transform along rows (`row`: one per row; or all of them, `tensor`): a
// thread has a block of 16.
extern "C" __global__ void __launch_bounds__(256) amax_hadamard_rows(const __grid_constant__ Params p) {
    u64 units = p.cols / BLOCK, groups = (units + 255) / 256;
    u64 unit = blockIdx.x % groups * 256 + threadIdx.x;
    Panel panel = panel_at(p, blockIdx.x / groups);
    if (panel.first >= panel.end) return;
    u32 all = 0;
    for (u64 r = panel.first; r < panel.end; r++) {
        u32 m = 0;
        if (unit < units) {
            const u8* from = panel.x + (r * p.stride + unit * BLOCK) * SIZE;
            float v[BLOCK];
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                if (INPUT == F32) v[i] = ((const float*)from)[i];
                else v[i] = low_element(((const u16*)from)[i], INPUT);
            }
            hadamard::transform(v, p.signs);
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                u32 bits = scale::magnitude_bits(v[i], SPECIALS);
                m = m > bits ? m : bits;
            }
        }
        if (OUTPUT_ROWS) meet(panel.row + r, m);
        all = all > m ? all : m;
    }
    if (OUTPUT_TENSOR) meet(panel.tensor, all);
}
