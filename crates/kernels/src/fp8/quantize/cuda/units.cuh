// Sixteen neighbours of a row in the registers of one thread: loaded, measured, encoded, stored.
// Read cuda/fp8_rules.cuh, cuda/elements.cuh and cuda/groups.cuh first.
//
// Settings before this text: INPUT, the type of the elements; FORMAT of the codes; SCALING and, for
// TENSORS, SOURCE; VALUES, the numbers that may be scales; ROW, COLUMN and AMAX, the outputs. WHOLE
// means that units are whole: rows of elements and of the row direction's codes begin at multiples
// of 16 bytes and have multiples of 16 elements. GROUPED means that the rows of the matrix are in
// groups, with a scale each where a matrix has one.

struct Params {
    const u8* x;
    u64 rows, cols, stride;  // stride in elements
    u8* row_codes;
    u8* row_scales;  // binary32 numbers, or E8M0 bytes
    u8* col_codes;
    u8* col_scales;
    const float* tensor;  // the scale or the amax of the matrix, where it lies in memory
    u32* amax;            // the largest magnitude seen so far, as bits
    float number;         // the scale of the matrix, or the epsilon of the rule
    u32 divisor_magic, divisor_shift;
    u32 wide;  // whether every row of the column direction's codes is aligned to 16 bytes
    Groups groups;
};
static_assert(sizeof(Params) == 120, "as the host has them");

// Whether scales are E8M0 bytes, and columns stay as they lie.
constexpr bool MX = SCALING == BLOCKS_32 || SCALING == SQUARES_32;
constexpr int SIZE = INPUT == F32 ? 4 : 2;
constexpr int WORDS = INPUT == F32 ? 16 : 8;  // of a unit

// The multiplier of a tile's elements, and what is stored for the tile: the bits of a number, or a
// byte.
struct TileScale {
    float multiplier;
    u32 stored;
};

// Twin of Mode::tile_scale.
RULE TileScale tile_scale(const Params& p, float amax) {
    if (MX) {
        u32 byte = fp8::mx_byte(amax, FORMAT);
        return {e8m0::reciprocal(byte), byte};
    }
    float scale = fp8::scale(amax, FORMAT, VALUES, p.number, precision::max(INPUT));
    return {scale, to_bits(1.0f / scale)};
}

// The same for the whole matrix, or for a group of it.
RULE TileScale tensor_scale(const Params& p, u32 group) {
    float scale = p.number;
    if (SOURCE == MEMORY) scale = p.tensor[group];
    if (SOURCE == OF_AMAX) scale = fp8::scale(p.tensor[group], FORMAT, VALUES, p.number, FLOAT_MAX);
    return {scale, to_bits(1.0f / scale)};
}

RULE void store_scale(u8* scales, u64 index, const TileScale& s) {
    if (MX) scales[index] = (u8)s.stored;
    else ((u32*)scales)[index] = s.stored;
}

RULE u32 width_at(u64 column, u64 cols) {
    u64 left = column < cols ? cols - column : 0;
    return left < BLOCK ? (u32)left : BLOCK;
}

// The unit of a row that begins at a column and has `width` elements; the others are zero.
RULE Elements<INPUT> load_unit(const Params& p, u64 row, u64 column, u32 width) {
    const u8* from = p.x + (row * p.stride + column) * SIZE;
    if (WHOLE && width) return load_whole<INPUT>(from);
    return load_some<INPUT>(from, WHOLE ? 0 : width);
}

// The largest magnitudes of a unit, NaN not seen: of the 16-bit types, of even and of odd elements.
RULE u32 seen_in(const Elements<INPUT>& x) {
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) m = larger_seen(m, magnitudes(x.w[i], INPUT), INPUT);
    return m;
}

// The larger magnitude of a word, as the bits of a binary32 number.
RULE u32 word_maximum(u32 word) {
    if (INPUT == F32) return word;
    return to_bits(low_element(larger_seen(word, word >> 16, INPUT), INPUT));
}

// The maximum over lanes at the distances FIRST, 2·FIRST, … LAST and their sums. All lanes of the
// warp call this.
template <int FIRST, int LAST>
RULE u32 maximum_over_lanes(u32 bits) {
#pragma unroll
    for (int distance = FIRST; distance <= LAST; distance *= 2) {
        u32 other = __shfl_xor_sync(0xFFFFFFFF, bits, distance);
        bits = bits > other ? bits : other;
    }
    return bits;
}

// The codes of a unit; element i is multiplied by `multiplier(i)`.
template <class Multiplier>
RULE uint4 encode_unit(const Elements<INPUT>& x, Multiplier multiplier) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; k++) y[k] = element(x, 4 * j + k) * multiplier(4 * j + k);
        w[j] = fp8::encode_four(y[0], y[1], y[2], y[3], FORMAT);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Writes the first `width` codes of sixteen; `whole` says that it is all of them or none, at a
// multiple of 16 bytes.
RULE void store_codes(u8* to, const uint4& codes, u32 width, bool whole) {
    if (whole) {
        if (width) *(uint4*)to = codes;
        return;
    }
    u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (i < width) to[i] = (u8)(w[i / 4] >> 8 * (i % 4));
    }
}
