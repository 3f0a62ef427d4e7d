// Prepared weights: an NVFP4 matrix cut into tiles of 64 rows × 64 columns, each in the layout of
// the tensor cores' registers: 2048 bytes of codes and 256 of scales. Settings before this text:
// MATH, the type of the multiplication.
//
// Codes: thread t of a warpgroup has 16 bytes at 16·t, two words for every 32 columns. Their eight
// registers, four for each 16 columns, have the order of the instruction's fragment, a low and a
// high element each. A register is a word turned to the left by TURNS bits, of which the signs, at
// bits 15 and 31, and the magnitudes, from bits 6 and 22 on, are kept: in bf16 they then are where
// they belong. Three registers come from the first word, three from the second, and the fourth ones
// from the bits that are left in both, put together by one instruction: 16 instructions for 16
// codes. (No set of turns fits eight codes into one word.) With w = t / 32 % 4 and g = t / 4 % 8 the
// fragment's rows g and g + 8 are rows 16·w + 2·g and the next one, so that a thread has neighbouring
// outputs.
//
// Scales: 8 bytes at 2048 + 8·(8·w + g), a word for every 32 columns: the first row's and the
// second's for the first 16, 4 and 20 bits up, and for the second 16, 12 and 28 bits up, where the
// last one goes on at bit 0. Each is an unsigned number of 5 bits of exponent and 3 of mantissa that
// has every E4M3 value as a normal number times 2⁷; 0 is zero, 0xFF is NaN. A negative scale's sign
// is in its codes, and the codes under a zero scale are zero.
//
// What comes out is the value times 2⁻⁷, which is exact in both types: at most six significant
// bits, and in f16 between 2⁻¹⁷ and 21.

constexpr u32 TILE = 64, TILE_CODES = 2048, TILE_BYTES = 2304;

TABLE u32 TURNS[2][4] = {{0, 4, 10, 8}, {2, 6, 12, 14}};
// The bits of the fourth registers that are in the first word; the others are in the second.
constexpr u32 IN_FIRST = 0x06030603;

// Bits moved to the left, or to the right if the number is negative.
RULE constexpr u32 moved(u32 w, int by) { return by < 0 ? w >> -by : w << by; }

// The bit from which on a number of 16 bits has the mantissa and the exponent of E2M1; and, in a
// word of two, where the signs and where those bits are.
constexpr int FIRST_BIT = MATH == BF16 ? 6 : 9;
constexpr u32 SIGN = 0x80008000, REST = 0x00070007u << FIRST_BIT;

// Bits turned to the right.
RULE constexpr u32 turned_back(u32 w, u32 by) { return by == 0 ? w : w >> by | w << (32 - by); }

// Whether the codes take every bit of two words once.
RULE constexpr bool fills_words() {
    u32 taken[2] = {};
    for (u32 i = 0; i < 8; i++) {
        u32 bits = turned_back(SIGN | 0x01C001C0, TURNS[i / 4][i % 4]), in_first = i % 4 == 3 ? IN_FIRST : i < 4 ? ~0u : 0;
        if ((taken[0] & bits & in_first) | (taken[1] & bits & ~in_first)) return false;
        taken[0] |= bits & in_first, taken[1] |= bits & ~in_first;
    }
    return taken[0] == ~0u && taken[1] == ~0u;
}
static_assert(fills_words(), "sixteen codes of four bits");

// Bits turned to the left. By six or fewer none of those that are kept goes round, and a shift is
// enough, for which there are more units.
RULE constexpr u32 turned(u32 w, u32 by) { return by <= 6 ? w << by : w << (by % 32) | w >> (32 - by % 32); }

// Sixteen prepared codes, two to a register, as numbers without their scale, times 2⁻¹²⁶ in bf16 and
// times 2⁻¹⁴ in f16: sign, exponent and mantissa in their places, an exponent of 0 being subnormal
// in both formats.
RULE void unpack(u32 first, u32 second, u32 (&x)[2][4]) {
    u32 both = (first & IN_FIRST) | (second & ~IN_FIRST);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 w = j == 3 ? both : i == 0 ? first : second;
            if (MATH == BF16) x[i][j] = turned(w, TURNS[i][j]) & (SIGN | REST);
            else x[i][j] = (turned(w, TURNS[i][j]) & SIGN) | (turned(w, TURNS[i][j] + FIRST_BIT - 6) & REST);
        }
    }
}

// Eight codes one after the other, as such numbers: word j has codes j and j + 4.
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

// A word of scales as two words, each with what the codes of both rows are multiplied by: 2¹¹⁹
// times the scale in bf16, 2⁷ times in f16.
RULE void scale_words(u32 scales, u32 (&s)[2]) {
    if (MATH == BF16) {
        // 111 and the number, from bit 4 on. The constant is kept in a register: then one
        // instruction does both.
        u32 ones;
        asm volatile("mov.b32 %0, 0x70007000;" : "=r"(ones));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            asm("lop3.b32 %0, %1, 0x0FF00FF0, %2, 0xEA;" : "=r"(s[i]) : "r"(i == 0 ? scales : turned(scales, 24)), "r"(ones));
        }
    } else {
        // The number from bit 7 on.
        s[0] = scales << 3 & 0x7F807F80, s[1] = turned(scales, 27) & 0x7F807F80;
    }
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

// The registers of 16 columns, given their numbers and both rows' factors.
RULE void fragment(const u32 (&x)[4], u32 factors, u32 (&a)[4]) {
    u32 first = half_twice<0>(factors), second = half_twice<1>(factors);
    a[0] = multiply(x[0], first), a[1] = multiply(x[1], second);
    a[2] = multiply(x[2], first), a[3] = multiply(x[3], second);
}
