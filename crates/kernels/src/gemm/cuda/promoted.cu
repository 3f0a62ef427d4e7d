// Products of FP8 codes on Hopper's FP8 tensor cores: out = A·Bᵀ. Their accumulators have few bits,
// so after 128 products a sum is multiplied by the scales of these 128 and added in binary32.
//
// A block has 192 × 128 outputs. Three warpgroups multiply, 64 rows each: while one adds sums, the
// others' instructions run. A warp of the fourth warpgroup fills STAGES stages, each with 128 columns
// of both operands; the other three fetch the scales of a stage. Two blocks with the same rows form
// a cluster: each copies half of A's rows into both.
//
// The products of several groups (groups.cuh) are one launch. A group along K is a matrix by itself,
// whose size the GPU knows: `gemm_group_maps` writes a map for each.
//
// Settings before this text: A_WIDE and B_WIDE, whether an operand has 32-bit scales for 128 values
// along K, else it has one for all; B_SQUARE, whether those of B are for 128 rows too; the function
// `wgmma`; those of output.cuh and parts.cuh. Read copies.cuh, wgmma.cuh and codes.cuh first.

struct Params {
    TensorMap a_map, b_map;
    const TensorMap* maps;  // where groups lie along K: A's and B's of each
    Operand a, b;
    Output output;
    u64 k;
    Part left, right;       // of operands in groups
};
static_assert(sizeof(Params) == 640, "as in promoted.rs");

constexpr u32 WARPGROUPS = 3, ROWS = 64;  // that multiply, and the rows of each
constexpr u32 HIGH = WARPGROUPS * ROWS, WIDE = 128, DEPTH = 128, CLUSTER = 2, STAGES = 4;
constexpr u32 CONSUMERS = 128 * WARPGROUPS;
constexpr u32 A_BYTES = HIGH * DEPTH, B_BYTES = WIDE * DEPTH, STAGE_BYTES = A_BYTES + B_BYTES;
// A lane of a quarter reads the scales of its columns 16 bytes at a time, from another bank than the
// other quarters.
constexpr u32 QUARTER = 4 * (WIDE / 4 + 4), A_SCALES = 4 * HIGH, SCALE_BYTES = A_SCALES + 4 * QUARTER;
constexpr u32 EXCHANGE_BYTES = 16 * 128;  // of a warp
constexpr u32 BARRIERS = 1024;  // bytes before the stages
constexpr u32 BAND = 8;         // tiles of rows that are worked on together
constexpr bool PROMOTES = A_WIDE || B_WIDE;
constexpr u32 SCALE_WARPS = PROMOTES ? 3 : 0;
constexpr u32 SUMS = ROWS * WIDE / 128;

RULE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

RULE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies a box to the same place of every block of the cluster, and arrives at the barrier of each.
RULE void copy_box_to_all(u32 to, const TensorMap* map, u32 column, u32 row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}

// Arrives at a barrier of every block of the cluster.
RULE void arrive_at_all(u32 bar) {
#pragma unroll
    for (u32 rank = 0; rank < CLUSTER; rank++) {
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
                         bar), "r"(rank)
                     : "memory");
    }
}

// A tile of outputs.
struct Work {
    u32 group, first;  // and the rows of A before it
    u32 row, column;   // within the group
    u32 steps;
};

struct Schedule {
    const Params& p;
    u32 at, step, wide;
    u32 group = 0, before = 0;  // the group, and the tiles of outputs before it

    RULE Schedule(const Params& p) : p(p) {
        at = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        wide = (u32)((p.output.cols + CLUSTER * WIDE - 1) / (CLUSTER * WIDE));
    }

    RULE bool next(Work& work) {
        u32 index = at, first = 0, high = (u32)((p.output.rows + HIGH - 1) / HIGH);
        u64 k = p.k;
        if (GROUPING == GROUPED_TOKENS) {
            const Groups& groups = p.left.groups;
            for (;; group++) {
                if (group >= groups.count) return false;
                first = groups.offsets[group], high = (groups.offsets[group + 1] - first + HIGH - 1) / HIGH;
                if (at - before < wide * high) break;
                before += wide * high;
            }
            index = at - before;
        } else if (GROUPING == GROUPED_K) {
            group = at / (wide * high), index = at % (wide * high);
            if (group >= p.left.groups.count) return false;
            k = p.left.groups.padded[group + 1] - p.left.groups.padded[group];
        } else if (at >= wide * high) return false;
        // Bands of BAND tiles of rows, column after column: concurrent blocks find both operands in
        // the cache.
        u32 band = index / (wide * BAND) * BAND, within = index - band * wide, height = min(BAND, high - band);
        u32 row = (band + within % height) * HIGH, column = (within / height * CLUSTER + cluster_rank()) * WIDE;
        work = {group, first, row, column, (u32)((k + DEPTH - 1) / DEPTH)};
        at += step;
        return true;
    }
};

struct PipelineState {
    u32 stage = 0, parity = 0;
    RULE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Where everything is in shared memory.
struct Shared {
    u32 full, empty, stages, scales, exchange;
    RULE Shared(const u8* shared) {
        full = (shared_address(shared) + 1023) / 1024 * 1024, empty = full + 8 * STAGES;
        stages = full + BARRIERS, scales = stages + STAGES * STAGE_BYTES;
        exchange = scales + STAGES * SCALE_BYTES;
    }
};

// ---- filling ----

// Makes a map that another kernel wrote visible to copies.
RULE void acquire_map(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// One thread copies the codes of all work.
RULE void fill_codes(const Params& p, const Shared& shared) {
    Schedule schedule(p);
    PipelineState state;
    Work work;
    u32 known = ~0u, rank = cluster_rank();
    const TensorMap *a = &p.a_map, *b = &p.b_map;
    while (schedule.next(work)) {
        if (GROUPING == GROUPED_K && work.group != known) {
            known = work.group, a = p.maps + 2 * known, b = a + 1;
            acquire_map(a), acquire_map(b);
        }
        // The parts of B lie one after the other, along K too if they are as long as K.
        u32 right = GROUPING == GROUPED_TOKENS ? work.group * (u32)p.output.cols : 0;
        for (u32 step = 0; step < work.steps; step++) {
            u32 to = shared.stages + state.stage * STAGE_BYTES, bar = shared.full + 8 * state.stage, part = rank * (HIGH / CLUSTER);
            wait(shared.empty + 8 * state.stage, state.parity ^ 1);
            expect_bytes(bar, STAGE_BYTES);
            copy_box_to_all(to + part * DEPTH, a, step * DEPTH, work.first + work.row + part, bar);
            copy_box(to + A_BYTES, b, step * DEPTH, right + work.column, bar);
            state.advance();
        }
    }
}

// Where the scale of a column is among B's: those of columns 8·j + 2·q and the next come in the order
// of j for each quarter q.
RULE u32 column_at(u32 column) { return column % 8 / 2 * QUARTER + 4 * (column / 8 * 2 + column % 2); }

// A warp fetches scales for every step: those of the first or the second half of A's rows, or B's.
template <bool IS_B, bool IS_WIDE>
RULE void fill_scales(const Params& p, const Shared& shared, u32 which) {
    constexpr u32 NONE = ~0u, COUNT = IS_B ? WIDE / 32 : HIGH / 2 / 32;
    Schedule schedule(p);
    PipelineState state;
    Work work;
    u32 lane = threadIdx.x % 32;
    while (schedule.next(work)) {
        Operand x = IS_B ? p.b : p.a;
        if (GROUPING != ALONE) {
            Extent own = take_part(x, IS_B ? p.right : p.left, work.group);
            if (own.rows) x.rows = own.rows;
        }
        const float* scales = (const float*)x.scales;
        u32 at[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 row = (IS_B ? work.column : work.row + which * (HIGH / 2)) + 32 * i + lane;
            at[i] = row < x.rows ? (row >> x.height) * (u32)x.across : NONE;
        }
        // Four steps at a time: their scales are neighbours in memory.
        float v[COUNT][4];
        for (u32 step = 0; step < work.steps; step++) {
            if (IS_WIDE && step % 4 == 0) {
#pragma unroll
                for (u32 i = 0; i < COUNT; i++) {
#pragma unroll
                    for (u32 s = 0; s < 4; s++) v[i][s] = at[i] != NONE && step + s < work.steps ? __ldg(scales + at[i] + step + s) : 0.0f;
                }
            }
            wait(shared.empty + 8 * state.stage, state.parity ^ 1);
            u32 to = shared.scales + state.stage * SCALE_BYTES + (IS_B ? A_SCALES + column_at(lane) : 4 * (which * (HIGH / 2) + lane));
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (IS_B ? 32 : 128) * i), "f"(IS_WIDE ? v[i][0] : 1.0f) : "memory");
                v[i][0] = v[i][1], v[i][1] = v[i][2], v[i][2] = v[i][3];
            }
            __syncwarp();
            if (lane == 0) arrive(shared.full + 8 * state.stage);
            state.advance();
        }
    }
}

// ---- multiplying ----

RULE float load_float(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}

RULE float4 load_four(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

// Keeps uses of the sums on their side of it.
RULE void pin(float (&sums)[SUMS]) {
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// The first of a thread's rows in the tile: it has this one and the eighth after it.
RULE u32 own_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

// The scales of a thread's two rows.
RULE float2 scales_of_rows(u32 scales) {
    if (!A_WIDE) return make_float2(1.0f, 1.0f);
    return make_float2(load_float(scales + 4 * own_row()), load_float(scales + 4 * (own_row() + 8)));
}

// Whether a product of scales has all its bits.
RULE bool whole(float scale) { return fabsf(scale) >= 0x1p-126f && fabsf(scale) < __int_as_float(0x7F800000); }

// Adds the sums of 128 products, times their scales.
RULE void promote(u32 scales, float2 rows, float square, const float (&sums)[SUMS], float (&totals)[SUMS]) {
    float2 both = make_float2(rows.x * square, rows.y * square);
    if (A_WIDE && B_SQUARE && __all_sync(0xFFFFFFFF, whole(both.x) && whole(both.y))) {
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) totals[i] = fmaf(sums[i], i % 4 / 2 ? both.y : both.x, totals[i]);
        return;
    }
#pragma unroll
    for (u32 j = 0; j < WIDE / 8; j += 2) {
        float4 columns = make_float4(square, square, square, square);
        if (B_WIDE && !B_SQUARE) columns = load_four(scales + A_SCALES + threadIdx.x % 4 * QUARTER + 8 * j);
        float own[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float scaled = A_WIDE ? sums[4 * j + i] * (i % 4 / 2 ? rows.y : rows.x) : sums[4 * j + i];
            float& total = totals[4 * j + i];
            total = B_WIDE ? fmaf(scaled, own[i / 4 * 2 + i % 2], total) : total + scaled;
        }
    }
}

// Where chunk c of 16 bytes of a row is among the sums that a warp exchanges.
RULE u32 chunk_at(u32 from, u32 row, u32 c) { return from + row * 128 + 16 * (c ^ (row & 7)); }

// Four numbers of a row, from an address on.
RULE void store_four(u8* to, const float (&x)[4]) {
    if (OUTPUT == F32) *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
    else *(uint2*)to = make_uint2(pack_output(x[0], x[1]), pack_output(x[2], x[3]));
}

// Writes the outputs of a tile. A warp exchanges the sums of 16 rows and 32 columns, so that
// neighbouring lanes write neighbouring outputs.
RULE void write(const Output& o, const Work& work, u32 exchange, const float (&totals)[SUMS]) {
    u32 lane = threadIdx.x % 32, own = exchange + threadIdx.x / 32 * EXCHANGE_BYTES;
    Factors f = factors(o, numerator(o.a, 0), numerator(o.b, 0));
    bool fours = o.cols % 4 == 0 && (u64)o.out % (4 * SIZE) == 0;
    // Rows that exist, from the lane's first on.
    u64 first = work.row + own_row() - lane / 4 + lane / 8, rows = o.rows > first ? o.rows - first : 0;
#pragma unroll
    for (u32 part = 0; part < WIDE / 32; part++) {
        u64 column = work.column + 32 * part + lane % 8 * 4, at = first * o.cols + column;
        float bias[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) bias[i] = column + i < o.cols ? bias_of(o, column + i) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 j = i / 2, half = i % 2;
            const float* pair = totals + 4 * (4 * part + j) + 2 * half;
            u32 to = chunk_at(own, lane / 4 + 8 * half, 2 * j + lane % 4 / 2) + lane % 2 * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(pair[0]), "f"(pair[1]) : "memory");
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float4 sums = load_four(chunk_at(own, 4 * i + lane / 8, lane % 8));
            float x[4] = {sums.x, sums.y, sums.z, sums.w};
            if (4 * i >= rows || column >= o.cols) continue;
            u64 to = at + 4 * i * o.cols;
            if (fours) {
#pragma unroll
                for (u32 h = 0; h < 4; h++) x[h] = finish(o, f, x[h], bias[h], to + h);
                store_four(o.out + SIZE * to, x);
                continue;
            }
#pragma unroll
            for (u32 h = 0; h < 4; h++) {
                if (column + h < o.cols) store_output(o, to + h, finish(o, f, x[h], bias[h], to + h));
            }
        }
        __syncwarp();
    }
}

// The outputs of a group.
RULE Output output_of(const Params& p, const Work& work) {
    if (GROUPING == ALONE) return p.output;
    if (GROUPING == GROUPED_K) return matrix_of_group(p.output, work.group);
    return rows_of_group(p.output, work.group, work.first, p.left.groups.offsets[work.group + 1] - work.first);
}

RULE void multiply(const Params& p, const Shared& shared) {
    // Read from one lane, so that the compiler knows that it is uniform in a warp.
    u32 own = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    Schedule schedule(p);
    PipelineState state;
    Work work;
    while (schedule.next(work)) {
        float totals[SUMS] = {};
        for (u32 step = 0; step < work.steps; step++) {
            u32 at = shared.stages + state.stage * STAGE_BYTES, scales = shared.scales + state.stage * SCALE_BYTES;
            wait(shared.full + 8 * state.stage, state.parity);
            float square = B_SQUARE ? load_float(scales + A_SCALES) : 1.0f, sums[SUMS];
            float2 rows = scales_of_rows(scales);
            u64 a = descriptor(at + own * ROWS * DEPTH), b = descriptor(at + A_BYTES);
            pin(sums);
            wgmma_fence();
#pragma unroll
            for (u32 s = 0; s < 4; s++) wgmma(sums, a + 2 * s, b + 2 * s, s > 0);
            wgmma_commit();
            wgmma_wait<0>();
            pin(sums);
            promote(scales, rows, square, sums, totals);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive_at_all(shared.empty + 8 * state.stage);
            state.advance();
        }
                write(output_of(p, work), work, shared.exchange, totals);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CONSUMERS + 128, 1)
    gemm_promoted(const __grid_constant__ Params p) {
    extern __shared__ u8 bytes[];
    Shared shared(bytes);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(shared.full + 8 * i, 1 + SCALE_WARPS);
            barrier_init(shared.empty + 8 * i, CLUSTER * CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    sync_cluster();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        u32 warp = (threadIdx.x - CONSUMERS) / 32;
        if (warp == 0 && threadIdx.x % 32 == 0) fill_codes(p, shared);
        if (PROMOTES && (warp == 1 || warp == 2)) fill_scales<false, A_WIDE>(p, shared, warp - 1);
        if (PROMOTES && warp == 3) fill_scales<true, B_WIDE>(p, shared, 2);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
        multiply(p, shared);
        __syncwarp();
    }
    // No block exits while another copies to it or arrives at its barriers.
    sync_cluster();
}
