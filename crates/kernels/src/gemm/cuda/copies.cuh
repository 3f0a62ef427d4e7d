// Barriers in shared memory, and copies into it that threads do not wait for.

#if !defined(PORTABLE) && __CUDA_ARCH__ >= 900
#define BULK 1  // copies by an engine, which waits for no thread
#else
#define BULK 0
#endif

struct alignas(64) TensorMap {
    u64 words[16];
};

RULE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

RULE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }

RULE void arrive(u32 bar) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(bar) : "memory");
}

RULE void wait(u32 bar, u32 parity) {
#if BULK
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
        ::"r"(bar), "r"(parity) : "memory");
#else
    u32 done = 0;
    while (!done) {
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    }
#endif
}

#if BULK
RULE void expect_bytes(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

RULE void copy_bytes(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}

// Copies bytes that are not read again.
RULE void copy_bytes_once(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile(
        "{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;\n}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}

// Copies the box of a map from this column and row on; elements beyond the matrix are zero.
RULE void copy_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     to),
                 "l"(map), "r"(column), "r"(row), "r"(bar)
                 : "memory");
}
#else
// Copies 16 bytes, or writes 16 zero bytes.
RULE void copy_16(u32 to, const u8* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Arrives when this thread's copies so far have ended.
RULE void arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
#endif
