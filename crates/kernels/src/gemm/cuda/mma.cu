// Products of prepared weights (pipeline.cuh) with the warp instruction of mma.cuh.

extern "C" KERNEL gemm_mma(const __grid_constant__ Params p) {
    run(p, [](const Consumer& me, const Work& work, PipelineState& state, u32 full, u32 empty, u32 stages, float (&sums)[TOKENS / 2]) {
        // Where a lane has its codes, its scales and either half of its tokens in a stage.
        u32 token = me.t % 8, chunk = me.t % 32 / 8, codes_at = kept(me.codes()), scales_at = kept(me.scales());
        u32 tokens_at[2] = {kept(token * ROW + 16 * (chunk ^ token)), kept(token * ROW + 16 * ((4 + chunk) ^ token))};
        for (u32 k = work.first + me.slice; k < work.last; k += SLICES) {
            u32 at = stages + state.stage * STAGE_BYTES;
            wait(full + 8 * state.stage, state.parity);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                uint4 codes = load_shared16(at + codes_at + tile * TILE_BYTES);
                uint2 scales = load_shared8(at + scales_at + tile * TILE_BYTES);
                u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
                // 32 columns at a time.
#pragma unroll
                for (u32 h = 0; h < 2; h++) {
                    u32 factors[2], x[2][4], a[2][4];
                    scale_words(h == 0 ? scales.x : scales.y, factors);
                    unpack(words[2 * h], words[2 * h + 1], x);
                    fragment(x[0], factors[0], a[0]), fragment(x[1], factors[1], a[1]);
#pragma unroll
                    for (u32 n = 0; n < TOKENS / 8; n++) {
                        uint4 b = load_matrices(at + tokens_at[h] + tile * TOKEN_TILE + 8 * n * ROW);
                        mma(sums + 4 * n, a[0], b.x, b.y);
                        mma(sums + 4 * n, a[1], b.z, b.w);
                    }
                }
            }
            me.release(empty + 8 * state.stage);
            state.advance(SLICES);
        }
    });
}
