// The scales of many tensors from their histories, a thread each. Twin of spec's Delayed::update.
// Read cuda/fp8_rules.cuh first.

struct Params {
    float* history;        // `length` rows of `tensors` amaxes
    float* scales;         // one per tensor
    const float* reduced;  // the same, or null
    u32 length, tensors;
    float largest;  // what an amax is mapped to
    u32 most_recent, bulk;
    u32 padding;
};
static_assert(sizeof(Params) == 48, "as the host has them");

extern "C" __global__ void __launch_bounds__(128) update_scales(const __grid_constant__ Params p) {
    u32 t = blockIdx.x * 128 + threadIdx.x;
    if (t >= p.tensors) return;
    p.scales[t] = fp8::update(p.history + t, p.length, p.tensors, p.scales[t], p.largest,
                              p.most_recent ? MOST_RECENT : MAX_OF_HISTORY, p.bulk, p.reduced ? p.reduced[t] : 0.0f);
}
