// NVFP4 codes as numbers of 16 bits, in their order: without their global scale and times 2⁻⁷, which
// is exact. Settings before this text: MATH, the type of the numbers.

// What the codes are multiplied by, twice.
RULE u32 token_scale(u32 byte) {
    float s = e4m3::decode(byte);
    u32 bits = MATH == BF16 ? to_bits(s * 0x1p119f) >> 16 : pack_f16(s * 0x1p7f, 0.0f);
    return bits | bits << 16;
}

// Eight codes, given what they are multiplied by.
RULE uint4 decode_in_order(u32 codes, u32 scale) {
    u32 x[4];
    unpack_in_order(codes, x);
#pragma unroll
    for (u32 j = 0; j < 4; j++) x[j] = multiply(x[j], scale);
    return make_uint4(__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                      __byte_perm(x[2], x[3], 0x7632));
}
