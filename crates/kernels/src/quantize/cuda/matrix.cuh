// The matrix that is quantized: the positions of its blocks, and how they are loaded and stored.
// Read block.cuh, groups.cuh and tokens.cuh first.
//
// `Row` and `Col` (the settings of the directions) and INPUT (the type of the elements) come before
// this text.

struct Params {
    const u8* x;
    u64 rows, cols, stride;  // stride in elements
    u32 divisor_magic, divisor_shift;
    u32 wide_codes;  // panels: whether all rows of the column direction's codes are 16-byte aligned
    u32 padding;
    Direction row, col;
    Groups groups;
};
static_assert(sizeof(Direction) == 112 && sizeof(Params) == 296, "as the host has them");

constexpr int SIZE = INPUT == F32 ? 4 : 2;

// Elements of one block of a row; missing ones are zero.
RULE Elements<INPUT> load(const Params& p, u32 row, u32 block, u32 width) {
    const u8* from = p.x + (row * p.stride + (u64)block * BLOCK) * SIZE;
    if (WHOLE && width) return load_whole<INPUT>(from);
    return load_some<INPUT>(from, WHOLE ? 0 : width);
}

// Whether the transform negates element i of a group.
template <class S>
RULE u32 negated(u32 signs, int i) { return (S::SIGNS < 0 ? signs : S::SIGNS) >> i & 1; }

// Twin of hadamard::transform. Another factor is for multiples of it.
template <class S>
RULE Elements<BF16> rotated(float v[BLOCK], u32 signs, float factor = HADAMARD_FACTOR) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (S::SIGNS < 0) v[i] = from_bits(to_bits(v[i]) ^ negated<S>(signs, i) << 31);
        else if (negated<S>(signs, i)) v[i] = -v[i];
    }
    return transformed(v, factor);
}

// The elements that a direction quantizes, given those of the matrix along it.
template <class S>
RULE auto prepared(const Elements<INPUT>& x, u32 signs) {
    if constexpr (S::TRANSFORM) {
        float v[BLOCK];
        unpack(x, v);
        return rotated<S>(v, signs);
    } else {
        return x;
    }
}

// How many elements of a block exist.
RULE u32 width_at(u32 block, u64 cols) {
    if (WHOLE) return BLOCK;
    u64 left = cols - (u64)block * BLOCK;
    return left < BLOCK ? (u32)left : BLOCK;
}

// Eight values of a block, as a product reads them: its codes in one word, and the byte of its scale.
RULE uint4 values_of(u32 codes, u32 byte) { return decode_in_order(codes, token_scale(byte)); }

// Stores what a direction asks for. Values are those of whole blocks.
template <class S>
RULE void store_block(const Direction& d, const Position& at, u64 codes, u32 byte) {
    if constexpr (S::VALUES) {
        uint4* to = (uint4*)(d.codes + (u64)at.index * (BLOCK * 2));
        to[0] = values_of((u32)codes, byte), to[1] = values_of((u32)(codes >> 32), byte);
    } else {
        store_codes(d, at, codes);
        store_scale<S>(d, at, byte);
    }
}

template <class S, Precision P>
RULE void quantize_and_store(const Elements<P>& x, float largest, const Scaling& s, const Direction& d, const Position& at) {
    Result r = quantize_block<S>(x, largest, s, d, at);
    store_block<S>(d, at, r.codes, r.byte);
}
