// The operands and outputs of one group of a grouped product (groups.cuh), for kernels that read FP8
// codes as they lie. Read output.cuh first. Settings before this text: GROUPING.

// How the parts of an operand lie.
struct Part {
    Groups groups;
    u64 rows;            // of a part whose group lies along K
    u32 along_k;
    u32 transposed;      // the transposed operand lies there: MXFP8's columns
    u32 high, wide;      // a tile that has a scale, as powers of two
    u32 scale_bytes;     // 0 where a scale is for the whole part
    u32 padding;
};

struct Extent {
    u64 rows, k;  // 0 where the group does not change them
};

// Turns an operand of all groups into that of one.
template <class Operand>
RULE Extent take_part(Operand& x, const Part& part, u32 group) {
    u64 first = part.groups.offsets[group], size = part.groups.offsets[group + 1] - first;
    u64 padded = part.groups.padded[group], height = part.groups.padded[group + 1] - padded;
    u64 before;
    if (part.along_k && !part.transposed) {
        x.values += part.rows * padded;
        x.stride = height;
        before = (part.rows + (1ull << part.high) - 1 >> part.high) * (padded >> part.wide);
        x.across = height >> part.wide;
    } else {
        x.values += first * x.stride;
        before = (part.high ? padded >> part.high : first) * x.across;
    }
    x.scales += before * part.scale_bytes;
    if (!part.along_k) return {size, 0};
    return {0, part.transposed ? size : height};
}

// The group of a tile of SIDE rows of outputs, `wide` of them side by side, and its index there;
// false beyond the last one.
RULE bool find_group(const Groups& groups, u64 rows, u32 side, u32 wide, u32& tile, u32& group) {
    for (group = 0; group < groups.count; group++) {
        u64 high = GROUPING == GROUPED_TOKENS ? groups.offsets[group + 1] - groups.offsets[group] : rows;
        u32 mine = (u32)((high + side - 1) / side) * wide;
        if (tile < mine) return true;
        tile -= mine;
    }
    return false;
}
