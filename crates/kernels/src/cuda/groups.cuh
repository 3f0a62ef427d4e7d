// The rows of a matrix in groups, one after the other, such as the tokens of experts. Where rows
// become columns, every group is a matrix by itself, one after the other: its rows are padded with
// zeros to a multiple of GROUP_ROWS. A "padded row" counts these too.

constexpr u32 GROUP_ROWS = 128;

struct Groups {
    const u32* offsets;  // the first row of each group, and the end of the last
    const u32* padded;   // the same in padded rows
    u32 count, padding;
};

struct Group {
    u32 index, first, padded;  // its number, its first row, its first padded row
    u64 rows;

    // How many padded rows it has.
    METHOD u64 height() const { return (rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS; }
};

// The group of a padded row; beyond the last one a group without rows. All lanes of a warp call it
// with the same row.
RULE Group group_at(const Groups& g, u32 row) {
    u32 before = 0;
    for (u32 i = threadIdx.x % 32; i < g.count; i += 32) before += g.padded[i + 1] <= row;
    before = __reduce_add_sync(0xFFFFFFFF, before);
    if (before == g.count) return {before, 0, row, 0};
    u32 first = g.offsets[before];
    return {before, first, g.padded[before], g.offsets[before + 1] - first};
}
