// Hopper's warpgroup instruction `wgmma`: operands in shared memory, and what orders instructions.

// The descriptor of consecutive rows of 128 bytes, 8 to a group, with 128-byte swizzling.
RULE u64 descriptor(u32 address) { return (u64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

RULE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RULE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
RULE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
