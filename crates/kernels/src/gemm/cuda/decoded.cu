// Any product: both operands are decoded to binary32, 64 rows of each and 16 columns at a time, and
// multiplied by fused multiply-adds. Settings before this text: Kind; A and B, the operands' kinds;
// A_CODES and B_CODES, the formats of FP8 codes; OUTPUT, ORDER, ADD; GROUPING, for operands of FP8.

struct Operand {
    const u8* values;   // codes, or elements
    const u8* scales;
    u64 stride;         // bytes of a row of values as they lie
    u64 across;         // FP8: tiles side by side
    u32 height, width;  // FP8: of a tile, as powers of two
    u32 transposed;         // FP8: the operand is the transposed matrix
    u32 swizzled;       // NVFP4
};

struct Params {
    Operand a, b;
    Output output;
    u64 k;
    const u32* only_if;  // if there is one, nothing is done unless it is the mark
    u64 mark;
    Part left, right;    // of operands in groups
};

static_assert(sizeof(Params) == 336, "as in decoded.rs");

// Element k of a row without the global scale.
template <Kind KIND, Format CODES>
RULE float element(const Operand& x, u64 row, u64 k, u64 cols) {
    if (KIND == FP8_CODES || KIND == FP8_WIDE || KIND == FP8_BYTES) {
        u64 r = x.transposed ? k : row, c = x.transposed ? row : k;
        float value = fp8::decode(x.values[r * x.stride + c], CODES);
        if (KIND == FP8_CODES) return value;
        u64 tile = (r >> x.height) * x.across + (c >> x.width);
        return value * (KIND == FP8_WIDE ? ((const float*)x.scales)[tile] : e8m0::decode(x.scales[tile]));
    }
    const u8* values = x.values + row * x.stride;
    if (KIND == WIDE) return ((const float*)values)[k];
    if (KIND == BRAIN) return precision::from_bf16(((const u16*)values)[k]);
    if (KIND == HALF) return precision::from_f16(((const u16*)values)[k]);
    u64 blocks = (cols + BLOCK - 1) / BLOCK, block = k / BLOCK;
    u32 byte = x.scales[x.swizzled ? swizzle::offset(row, block, blocks) : row * blocks + block];
    return e2m1::decode(values[k / 2] >> k % 2 * 4 & 15) * e4m3::decode(byte);
}

constexpr u32 SIDE = 64, DEPTH = 16;

// 64 × 16 elements, transposed: a thread decodes four of a row.
template <Kind KIND, Format CODES>
RULE void load(const Operand& x, u64 first, u64 rows, u64 from, u64 k, float (&tile)[DEPTH][SIDE + 4]) {
    u32 row = threadIdx.x / 4, column = threadIdx.x % 4 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        bool there = first + row < rows && from + column + i < k;
        tile[column + i][row] = there ? element<KIND, CODES>(x, first + row, from + column + i, k) : 0.0f;
    }
}

// The outputs of one tile.
RULE void multiply_tile(const Params& p, u64 first_row, u64 first_column, float (&a)[DEPTH][SIDE + 4],
                        float (&b)[DEPTH][SIDE + 4]) {
    u32 x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sums[4][4] = {};
    for (u64 k = 0; k < p.k; k += DEPTH) {
        load<A, A_CODES>(p.a, first_row, p.output.rows, k, p.k, a);
        load<B, B_CODES>(p.b, first_column, p.output.cols, k, p.k, b);
        __syncthreads();
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            float4 u = *(float4*)&a[d][4 * y], v = *(float4*)&b[d][4 * x];
            float left[4] = {u.x, u.y, u.z, u.w}, right[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) sums[i][j] = fma_once(left[i], right[j], sums[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u64 row = first_row + 4 * y + i;
        if (row >= p.output.rows) continue;
        float na = numerator(p.output.a, row);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u64 column = first_column + 4 * x + j, at = row * p.output.cols + column;
            if (column >= p.output.cols) continue;
            Factors f = factors(p.output, na, numerator(p.output.b, column));
            store_output(p.output, at, finish(p.output, f, sums[i][j], bias_of(p.output, column), at));
        }
    }
}

// The product of one group.
RULE Params product_of(Params p, u32 group) {
    Extent left = take_part(p.a, p.left, group);
    take_part(p.b, p.right, group);
    if (GROUPING == GROUPED_K) {
        p.k = left.k;
        p.output = matrix_of_group(p.output, group);
    } else p.output = rows_of_group(p.output, group, p.left.groups.offsets[group], left.rows);
    return p;
}

// The second number of a block is that of its group.
extern "C" __global__ void __launch_bounds__(256) gemm_decoded(const __grid_constant__ Params given) {
    __shared__ float a[DEPTH][SIDE + 4], b[DEPTH][SIDE + 4];
    __shared__ Params own;
    if (given.only_if && *given.only_if != (u32)given.mark) return;
    if (GROUPING != ALONE) {
        if (threadIdx.x == 0) own = product_of(given, blockIdx.y);
        __syncthreads();
    }
    const Params& p = GROUPING == ALONE ? given : (const Params&)own;
    u64 wide = (p.output.cols + SIDE - 1) / SIDE, tiles = wide * ((p.output.rows + SIDE - 1) / SIDE);
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        multiply_tile(p, tile / wide * SIDE, tile % wide * SIDE, a, b);
    }
}
