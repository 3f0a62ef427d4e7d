// The pipeline that the kernels with prepared weights share: out = A·Bᵀ, where B are the weights.
// The tensor cores compute the transpose, outᵀ = B·Aᵀ: weights are decoded in registers, and the
// other operand's rows ("tokens") are in shared memory.
//
// A block has ROWS × SLICES warpgroups that multiply (consumers), and one more that fills STAGES
// stages (the producer). A stage is a buffer with 64·TILES columns of 64·ROWS rows of weights and
// of TOKENS tokens. One warp fills a stage, and the ROWS warpgroups of one of the SLICES read it.
// SPLIT blocks with the same outputs form a cluster, each with its part of K. With more than one
// slice or part, the partial sums are combined in shared memory at the end, in a fixed order.
//
// Tokens have 16 bits; those of NVFP4 are decoded by a kernel before this one (tokens.cu).
//
// The products of several groups (groups.cuh) are one launch. Either tokens are in groups, each with
// weights of its own, which lie one after the other along their rows or along K; or K is, and every
// group has outputs of its own.
//
// Settings before this text: TOKENS, ROWS, SLICES, STAGES, TILES, SPLIT, MATH, OUTPUT, ORDER,
// PER_TOKEN, ADD, SWAPPED, GROUPING, and LOWER_REGISTERS and RAISE_REGISTERS, which set the register
// counts of producer and consumers.

struct Params {
    TensorMap map;       // of plain tokens, for copies in bulk
    const u8* tokens;    // for other copies
    const u8* weights;
    Output output;
    u64 k;
    u64 pitch;           // bytes of a token
    u32 tiles;           // of the weights along K, a multiple of 2
    u32 row_tiles;       // of the weights along N; of a group, those of its own
    u32 token_tiles;     // where tokens are not in groups
    float undo;          // the power of two that sums lack
    Groups groups;
    // Tiles of the weights from one group to the next, along rows and along K; and those along K
    // that a product reads.
    u32 next_rows, next_columns, k_tiles;
    u32 settled;  // whether weights may be read before earlier work has finished
};

static_assert(sizeof(Params) == 320, "as in pipeline.rs");

constexpr u32 CONSUMERS = 128 * ROWS * SLICES;
// Warps that fill. With several slices each has its own, so that a stage has the same users in
// every round: a warp must not wait for a round before the previous one has ended. A single warp
// takes the stages in order, which is equivalent.
constexpr u32 FILLERS = SLICES == 1 && !BULK ? 4 : SLICES;
constexpr u32 ROW = 128;  // bytes of 64 columns of a token
constexpr u32 TOKEN_TILE = TOKENS * ROW, TOKEN_BYTES = TILES * TOKEN_TILE, GROUP_BYTES = TILES * TILE_BYTES;
constexpr u32 STAGE_BYTES = (TOKEN_BYTES + ROWS * GROUP_BYTES + 1023) / 1024 * 1024;
// Whether starting early matters. The filling warp of a large tile has no registers to spare.
constexpr bool FEW = TOKENS <= 64;
constexpr u32 BAND = 4;         // tiles of tokens that are worked on together
constexpr u32 BARRIERS = 1024;  // bytes before the stages
// Arrivals that complete a stage: one for bulk copies, else one per lane.
constexpr u32 FULL = BULK ? 1 : 32;
// Partial sums are combined in units: two neighbouring outputs of a token.
constexpr u32 UNITS = TOKENS / 4;
constexpr bool REDUCE = SLICES * SPLIT > 1;
static_assert(!REDUCE || UNITS * CONSUMERS * 8 <= STAGES * STAGE_BYTES, "the sums fit where the stages were");

// With programmatic dependent launch: waits until earlier kernels have finished. Only what was
// complete before this kernel could start may be read sooner. Settled weights were: after the kernel
// that wrote them came work that waited for it to end, before any other kernel (prepared.rs).
// Kernels between may allow the next one to start as soon as they like, since none of them started
// before that work.
RULE void wait_for_previous() {
#if BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// With programmatic dependent launch: allows the next kernel to start.
RULE void let_next_begin() {
#if BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

RULE u32 cluster_rank() {
    u32 rank = 0;
#if BULK
    if (SPLIT > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// Synchronizes all threads of the cluster, or of the block if there is only one.
RULE void sync_all() {
#if BULK
    if (SPLIT > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

// A number in a register: the compiler would compute it again in every step.
RULE u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

RULE uint4 load_shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

RULE uint2 load_shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

// The state of the pipeline: a stage, and the parity of the rounds through it.
struct PipelineState {
    u32 stage = 0, parity = 0;
    RULE void advance(u32 by) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};
// A slice keeps a stage until it has the next.
static_assert(STAGES % SLICES == 0 && STAGES >= 2 * SLICES && STAGES >= FILLERS && FILLERS <= 4, "rounds are whole");

// The work of a block: steps `first` … `last` of K for one tile of outputs.
struct Work {
    u32 row_tile, token, first, last;
    u32 group, before;  // and the tokens before it
    u64 weights;        // the first tile of weights
    u32 column;         // where K begins for tokens
};

struct Schedule {
    const Params& p;
    u32 at, step, wide, count;
    u32 group = 0, before = 0;  // the group, and the tiles of outputs before it

    RULE Schedule(const Params& p) : p(p) {
        at = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
        wide = (p.row_tiles + ROWS - 1) / ROWS, count = wide * p.token_tiles;
    }
    RULE bool next(Work& work) {
        u32 index = at, first_token = 0, high = p.token_tiles, k_tiles = GROUPING == ALONE ? p.tiles : p.k_tiles, column = 0;
        if (GROUPING == GROUPED_TOKENS) {
            for (;; group++) {
                if (group >= p.groups.count) return false;
                first_token = p.groups.offsets[group];
                high = (p.groups.offsets[group + 1] - first_token + TOKENS - 1) / TOKENS;
                if (at - before < wide * high) break;
                before += wide * high;
            }
            index = at - before;
        } else if (GROUPING == GROUPED_K) {
            group = at / count, index = at - group * count;
            if (group >= p.groups.count) return false;
            column = p.groups.padded[group], k_tiles = (p.groups.padded[group + 1] - column) / TILE;
        } else if (at >= count) return false;
        u32 steps = k_tiles / TILES, part = (steps + SPLIT - 1) / SPLIT, first = min(cluster_rank() * part, steps);
        // BAND consecutive tiles of tokens share their weights, then come the next weights:
        // concurrent blocks find both in the cache.
        u32 band = index / (wide * BAND) * BAND, within = index - band * wide, height = min(BAND, high - band);
        u32 row_tile = within / height * ROWS, token = (band + within % height) * TOKENS;
        u64 weights = (u64)row_tile * p.tiles;
        if (GROUPING == GROUPED_TOKENS) weights += (u64)group * p.next_rows * p.tiles + (u64)group * p.next_columns;
        if (GROUPING == GROUPED_K) weights += column / TILE;
        work = {row_tile, token, first, min(first + part, steps), group, first_token, weights, column};
        at += step;
        return true;
    }
};

// ---- filling ----

// Copies the weights of a step, and announces the bytes of weights and tokens.
RULE void copy_weights(const Params& p, const Work& work, u32 step, u32 to, u32 bar, u32 lane) {
    u32 rows = min(ROWS, p.row_tiles - work.row_tile);
    const u8* weights = p.weights + (work.weights + step * TILES) * TILE_BYTES;
    to += TOKEN_BYTES;
#if BULK
    if (lane != 0) return;
    expect_bytes(bar, rows * GROUP_BYTES + TOKEN_BYTES);
    for (u32 r = 0; r < rows; r++) {
        const u8* from = weights + (u64)r * p.tiles * TILE_BYTES;
        if (p.token_tiles == 1) copy_bytes_once(to + r * GROUP_BYTES, from, GROUP_BYTES, bar);
        else copy_bytes(to + r * GROUP_BYTES, from, GROUP_BYTES, bar);
    }
#else
    for (u32 r = 0; r < rows; r++) {
        const u8* from = weights + (u64)r * p.tiles * TILE_BYTES;
        for (u32 i = 16 * lane; i < GROUP_BYTES; i += 512) copy_16(to + r * GROUP_BYTES + i, from + i, true);
    }
#endif
}

// Copies the tokens of a step. A token's 16-byte chunks are swizzled: chunk c goes to c ^ token %
// 8.
RULE void copy_tokens(const Params& p, const Work& work, u32 step, u32 to, u32 bar, u32 lane) {
#if BULK
    if (lane != 0) return;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) copy_box(to + t * TOKEN_TILE, &p.map, work.column + (step * TILES + t) * TILE, work.before + work.token, bar);
#else
    for (u32 i = lane; i < TOKENS * 8 * TILES; i += 32) {
        u32 c = i % 8, tile = i / 8 % TILES, token = i / (8 * TILES);
        u64 row = work.before + work.token + token, column = work.column + (u64)(step * TILES + tile) * TILE + 8 * c;
        bool there = row < token_count(p.output) && column < p.k;
        const u8* from = there ? p.tokens + row * p.pitch + 2 * column : p.tokens;
        copy_16(to + tile * TOKEN_TILE + token * ROW + 16 * (c ^ (token & 7)), from, there);
    }
    arrive_after_copies(bar);
#endif
}

// Whether there was any work.
RULE bool fill(const Params& p, u32 full, u32 empty, u32 stages) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Schedule schedule(p);
    Work work;
    if (warp < FILLERS) let_next_begin();
    if (warp >= FILLERS) {
        // The bounds of groups come from earlier work.
        if (GROUPING != ALONE) wait_for_previous();
        return GROUPING == ALONE || schedule.next(work);
    }
    PipelineState state;
    u32 before = 0;  // steps of earlier work
    bool any = GROUPING == ALONE;
    state.advance(warp);
    // Settled weights of a warp's first step come while earlier work ends. Tokens, which must wait,
    // would come after those of more steps.
    bool ahead = false;
    if (FEW && GROUPING == ALONE && p.settled) {
        Schedule start(p);
        ahead = start.next(work) && work.first + warp < work.last;
        if (ahead) copy_weights(p, work, work.first + warp, stages + state.stage * STAGE_BYTES, full + 8 * state.stage, lane);
    }
    wait_for_previous();
    while (schedule.next(work)) {
        // Warp n % FILLERS fills step n, counted over all work.
        for (u32 step = work.first + (warp + FILLERS - before % FILLERS) % FILLERS; step < work.last; step += FILLERS) {
            u32 at = stages + state.stage * STAGE_BYTES, bar = full + 8 * state.stage;
            if (!ahead) {
                wait(empty + 8 * state.stage, state.parity ^ 1);
                copy_weights(p, work, step, at, bar, lane);
            }
            ahead = false;
            copy_tokens(p, work, step, at, bar, lane);
            __syncwarp();
            state.advance(FILLERS);
        }
        before += work.last - work.first;
        any = true;
    }
#if !BULK
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    return any;
}

// ---- multiplying ----

// A thread of a warpgroup that multiplies.
struct Consumer {
    u32 t, row, slice;

    // Read from one lane, so that the compiler knows that it is uniform in a warp.
    RULE Consumer() {
        u32 group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
        t = threadIdx.x % 128, row = group % ROWS, slice = SLICES == 1 ? 0 : group / ROWS;
    }

    // The first of its two outputs' columns.
    RULE u64 column(const Work& work) const { return (u64)(work.row_tile + row) * TILE + t / 32 * 16 + t % 32 / 4 * 2; }
    // The token of a unit.
    RULE u64 token(const Work& work, u32 unit) const { return work.token + unit / 2 * 8 + t % 4 * 2 + unit % 2; }
    // Where its codes and scales are in a stage.
    RULE u32 codes() const { return TOKEN_BYTES + row * GROUP_BYTES + 16 * t; }
    RULE u32 scales() const { return TOKEN_BYTES + row * GROUP_BYTES + TILE_CODES + t / 4 * 8; }
    // Releases a stage to the producer. Called right after an instruction of the whole warp: a
    // synchronization here would make the compiler wait for every `wgmma`.
    RULE void release(u32 bar) const {
        if (t % 32 == 0) arrive(bar);
    }
};

// The two sums of a unit among a thread's sums, in the order of the instructions.
RULE constexpr u32 first_of(u32 unit) { return unit / 2 * 4 + unit % 2; }

// Writes complete sums.
RULE void write(const Work& work, PairWriter& writer, float undo, const float (&sums)[TOKENS / 2]) {
    Consumer me;
    if (writer.straight(work.token + TOKENS)) {
        // All tokens exist: no checks, and addresses a row apart.
        u8* at = writer.address(me.token(work, 0));
#pragma unroll
        for (u32 u = 0; SWAPPED && u < UNITS; u += 2) {
            // Two tokens for each of two weights.
            const float* four = sums + first_of(u);
            writer.write_swapped(at + u / 2 * 8 * SIZE, 0, four[0] * undo, four[1] * undo);
            writer.write_swapped(at + u / 2 * 8 * SIZE + writer.pitch(), 1, four[2] * undo, four[3] * undo);
        }
#pragma unroll
        for (u32 u = 0; !SWAPPED && u < UNITS; u++) {
            u64 row = u / 2 * 8 + u % 2;
            writer.write_straight(at + row * writer.pitch(), sums[first_of(u)] * undo, sums[first_of(u) + 2] * undo);
        }
        return;
    }
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        writer.write(me.token(work, u), sums[first_of(u)] * undo, sums[first_of(u) + 2] * undo);
    }
}

// Stores partial sums over the stages, once no warpgroup of this block reads those any more.
RULE void stash(u32 stages, const float (&sums)[TOKENS / 2]) {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(stages + 8 * (u * CONSUMERS + threadIdx.x)), "f"(sums[first_of(u)]),
                     "f"(sums[first_of(u) + 2])
                     : "memory");
    }
}

RULE float2 load_part(u32 at, u32 rank) {
    float2 v;
#if BULK
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %2, %3;\nld.shared::cluster.v2.f32 {%0, %1}, [remote];\n}"
                 : "=f"(v.x), "=f"(v.y) : "r"(at), "r"(rank) : "memory");
#else
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
#endif
    return v;
}

// Adds the partial sums: every slice of every block takes some of the units.
RULE void reduce(const Work& work, PairWriter& writer, float undo, u32 stages) {
    Consumer me;
    for (u32 u = cluster_rank() * SLICES + me.slice; u < UNITS; u += SPLIT * SLICES) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (u32 part = 0; part < SPLIT * SLICES; part++) {
            u32 thread = part % SLICES * ROWS * 128 + threadIdx.x % (ROWS * 128);
            float2 v = load_part(stages + 8 * (u * CONSUMERS + thread), part / SLICES);
            first += v.x, second += v.y;
        }
        writer.write(me.token(work, u), first * undo, second * undo);
    }
}

// The outputs of a group.
RULE Output output_of(const Params& p, const Work& work) {
    if (GROUPING == GROUPED_K) return matrix_of_group(p.output, work.group);
    return rows_of_group(p.output, work.group, work.before, p.groups.offsets[work.group + 1] - work.before);
}

// The kernel, given what multiplies.
template <typename Consume>
RULE void run(const Params& p, Consume consume) {
    extern __shared__ u8 shared[];
    u32 start = (shared_address(shared) + 1023) / 1024 * 1024, full = start, empty = start + 8 * STAGES, stages = start + BARRIERS;
#if BULK
    if (threadIdx.x == CONSUMERS) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.map) : "memory");
#endif
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(full + 8 * i, FULL), barrier_init(empty + 8 * i, 4 * ROWS);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        LOWER_REGISTERS;
        bool any = fill(p, full, empty, stages);
        __syncwarp();
        if (REDUCE && any) sync_all();
    } else {
        RAISE_REGISTERS;
        wait_for_previous();
        Consumer me;
        Schedule schedule(p);
        PipelineState state;
        Work work;
        state.advance(me.slice);
        while (schedule.next(work)) {
            // Its loads are in flight while the sums are computed.
            Output mine;
            if (GROUPING != ALONE) mine = output_of(p, work);
            PairWriter writer(GROUPING == ALONE ? p.output : (const Output&)mine, me.column(work));
            float sums[TOKENS / 2] = {};
            consume(me, work, state, full, empty, stages, sums);
            if (!REDUCE) {
                write(work, writer, p.undo, sums);
                continue;
            }
            stash(stages, sums);
            sync_all();
            reduce(work, writer, p.undo, stages);
        }
        __syncwarp();
    }
    // No block exits while others use its shared memory.
    if (SPLIT > 1) sync_all();
}

#if BULK
#define KERNEL __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(CONSUMERS + 128, 1)
#else
#define KERNEL __global__ void __launch_bounds__(CONSUMERS + 128, 1)
#endif
