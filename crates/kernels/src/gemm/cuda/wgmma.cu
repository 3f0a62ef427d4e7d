// Products of prepared weights (pipeline.cuh) with Hopper's warpgroup instruction `wgmma`, which
// reads its left operand from registers and the right one from shared memory. The function `wgmma`
// for TOKENS tokens comes before this text.

extern "C" KERNEL gemm_wgmma(const __grid_constant__ Params p) {
    run(p, [](const Consumer& me, const Work& work, PipelineState& state, u32 full, u32 empty, u32 stages, float (&sums)[TOKENS / 2]) {
        u32 a[4][4], before = STAGES, codes_at = kept(me.codes()), scales_at = kept(me.scales());
        for (u32 k = work.first + me.slice; k < work.last; k += SLICES) {
            u32 at = stages + state.stage * STAGE_BYTES;
            wait(full + 8 * state.stage, state.parity);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                uint4 codes = load_shared16(at + codes_at + tile * TILE_BYTES);
                uint2 scales = load_shared8(at + scales_at + tile * TILE_BYTES);
                u64 b = descriptor(at + tile * TOKEN_TILE);
                u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, factors[2][2], x[2][4];
                scale_words(scales.x, factors[0]), scale_words(scales.y, factors[1]);
#pragma unroll
                for (u32 s = 0; s < 4; s++) {
                    // The instruction that read these registers four steps ago has ended.
                    wgmma_wait<3>();
                    if (tile == 0 && s == 3 && before < STAGES) me.release(empty + 8 * before);
                    if (s % 2 == 0) unpack(words[s], words[s + 1], x);
                    fragment(x[s % 2], factors[s / 2][s % 2], a[s]);
                    wgmma_fence();
                    wgmma(sums, a[s], b + 2 * s);
                    wgmma_commit();
                }
            }
            before = state.stage;
            state.advance(SLICES);
        }
        wgmma_wait<0>();
        if (before < STAGES) me.release(empty + 8 * before);
    });
}
