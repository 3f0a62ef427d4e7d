// Maps of groups along K: matrices one after the other, with as many rows each, whose lengths the
// GPU knows.

struct Params {
    TensorMap a, b;  // of matrices as large as all groups together
    const u8 *a_values, *b_values;
    u64 a_rows, b_rows;
    Groups groups;
    TensorMap* maps;
};
static_assert(sizeof(Params) == 320, "as in group_maps.rs");

// The assembler of CUDA 12.4 and older takes strides in units of 16 bytes.
constexpr u32 STRIDE = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1205 ? 16 : 1;

extern "C" __global__ void gemm_group_maps(const __grid_constant__ Params p) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, group = i / 2;
    if (group >= p.groups.count) return;
    u64 first = p.groups.padded[group], length = p.groups.padded[group + 1] - first;
    // A group without rows is not read.
    if (length == 0) return;
    TensorMap* map = p.maps + i;
    *map = i % 2 ? p.b : p.a;
    u64 address = (u64)(i % 2 ? p.b_values + p.b_rows * first : p.a_values + p.a_rows * first);
    asm volatile(
        "tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;\n"
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 0, %2;\n"
        "tensormap.replace.tile.global_stride.global.b1024.b64 [%0], 0, %3;\n"
        "fence.proxy.tensormap::generic.release.gpu;" ::"l"(map), "l"(address), "r"((u32)length), "l"(length / STRIDE)
        : "memory");
}
