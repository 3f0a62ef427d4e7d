// FP8 operands as they lie. Read parts.cuh first.

struct Operand {
    const u8* values;   // codes, or elements
    const u8* scales;
    u64 rows;
    u64 stride;         // bytes of a row of values as they lie
    u64 across;         // tiles side by side
    u32 height;         // of a tile with a 32-bit scale, as a power of two
    u32 format;         // of FP8 codes
};

// The 32-bit scale of a row's 128 values from column 128·part on; 0 beyond the last row.
RULE float wide_scale(const Operand& x, u64 row, u64 part) {
    return row < x.rows ? ((const float*)x.scales)[(row >> x.height) * x.across + part] : 0.0f;
}

// The product of one group.
template <class Params>
RULE Params product_of(Params p, u32 group) {
    Extent left = take_part(p.a, p.left, group), right = take_part(p.b, p.right, group);
    if (left.rows) p.a.rows = left.rows;
    if (right.rows) p.b.rows = right.rows;
    if (GROUPING == GROUPED_K) {
        p.k = left.k;
        p.output = matrix_of_group(p.output, group);
    } else p.output = rows_of_group(p.output, group, p.left.groups.offsets[group], left.rows);
    return p;
}
