// Prepared weights: an NVFP4 matrix cut into tiles of 64 rows × 64 columns, each in the layout of
// the tensor cores' registers: 2048 bytes of codes and 256 of scales. Settings before this text:
// MATH, the type of the multiplication.
//
// Codes: thread t of a warpgroup has 16 bytes at 16·t, a word for every 16 columns. The word's four
// registers have the order of the instruction's fragment, a low and a high element each, whose
// codes stand in the word's lower and upper half: the magnitude of register j's from bit
// MAGNITUDES[j] on, its sign at bit SIGNS[j]. This layout takes the fewest instructions to unpack
// in bf16. With w = t / 32 % 4 and g = t / 4 % 8 the fragment's rows g and g + 8 are rows 16·w +
// 2·g and the next one, so that a thread has neighbouring outputs.
//
// Scales: 8 bytes at 2048 + 8·(8·w + g), two for every 16 columns: the first row's and the
// second's. A byte is an unsigned number of 5 bits of exponent and 3 of mantissa that has every
// E4M3 value as a normal number times 2⁷; 0 is zero, 0xFF is NaN; its two nibbles are exchanged. A
// negative scale's sign is in its codes, and the codes under a zero scale are zero.
//
// What comes out is the value times 2⁻⁷, which is exact in both types: at most six significant
// bits, and in f16 between 2⁻¹⁷ and 21.

constexpr u32 TILE = 64, TILE_CODES = 2048, TILE_BYTES = 2304;

TABLE u32 MAGNITUDES[4] = {6, 3, 0, 9}, SIGNS[4] = {15, 12, 14, 13};

// Bits moved to the left, or to the right if the number is negative.
RULE constexpr u32 moved(u32 w, int by) { return by < 0 ? w >> -by : w << by; }

// The bit from which on a number of 16 bits has the mantissa and the exponent of E2M1; and, in a
// word of two, where the signs and where those bits are.
constexpr int FIRST_BIT = MATH == BF16 ? 6 : 9;
constexpr u32 SIGN = 0x80008000, REST = 0x00070007u << FIRST_BIT;

// Eight prepared codes, two to a register, as numbers without their scale, times 2⁻¹²⁶ in bf16 and
// times 2⁻¹⁴ in f16: sign, exponent and mantissa in their places, an exponent of 0 being subnormal
// in both formats.
RULE void unpack(u32 w, u32 (&x)[4]) {
    if (MATH == BF16) {
        // The first two have both parts where they belong after one shift.
        x[0] = w & (SIGN | REST);
        x[1] = w << 3 & (SIGN | REST);
    }
#pragma unroll
    for (int j = MATH == BF16 ? 2 : 0; j < 4; j++) {
        x[j] = (w << (15 - SIGNS[j]) & SIGN) | (moved(w, FIRST_BIT - (int)MAGNITUDES[j]) & REST);
    }
}

// The same of eight codes one after the other: word j has codes j and j + 4.
RULE void unpack_in_order(u32 w, u32 (&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = (w << (12 - 4 * j) & SIGN) | (moved(w, FIRST_BIT - 4 * j) & REST);
}

// Products of pairs, each rounded once. (A sum with −0 changes nothing; bf16 has no plain product
// before sm_90.)
RULE u32 multiply(u32 a, u32 b) {
    u32 y;
    if (MATH == BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000));
    else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Four scale bytes as two words, each with what the codes of both rows are multiplied by: 2¹¹⁹
// times the scale in bf16, 2⁷ times in f16.
RULE void scale_words(u32 bytes, u32 (&s)[2]) {
    u32 low, high;
    if (MATH == BF16) {
        // 111 and the number, from bit 11 on. The constant is kept in a register: then one
        // instruction does both.
        u32 ones;
        asm volatile("mov.b32 %0, 0x70707070;" : "=r"(ones));
        low = bytes & 0xF0F0F0F0;
        asm("lop3.b32 %0, %1, 0x0F0F0F0F, %2, 0xEA;" : "=r"(high) : "r"(bytes), "r"(ones));
    } else {
        // The number from bit 14 on: one bit of it is in the lower byte.
        low = bytes << 3 & 0x80808080, high = (bytes << 3 & 0x78787878) | (bytes >> 5 & 0x07070707);
    }
    s[0] = __byte_perm(low, high, 0x5140), s[1] = __byte_perm(low, high, 0x7362);
}

// A half of a word, twice. (Not by a permutation of bytes: the product that follows chooses a half
// by itself.)
template <int H>
RULE u32 half_twice(u32 w) {
    u32 y;
    if (H == 0) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(y) : "r"(w));
    else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(y) : "r"(w));
    return y;
}

// The registers of 16 columns, given both rows' factors.
RULE void fragment(u32 codes, u32 factors, u32 (&a)[4]) {
    u32 x[4], first = half_twice<0>(factors), second = half_twice<1>(factors);
    unpack(codes, x);
    a[0] = multiply(x[0], first), a[1] = multiply(x[1], second);
    a[2] = multiply(x[2], first), a[3] = multiply(x[3], second);
}
