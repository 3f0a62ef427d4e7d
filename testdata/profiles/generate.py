"""NVFP4 cases computed by the producers' own libraries on a CPU.

    python -m venv venv
    venv/bin/pip install torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 transformers==5.17.0 requests \
        nvidia-modelopt==0.47.0 compressed-tensors==0.20.0 torchao==0.18.0
    venv/bin/python generate.py [folder]

Writes <profile>__<dtype>__<name>.safetensors, by default beside this script. A file holds

    input   [R, C]        what was quantized, F32, BF16 or F16
    codes   U8 [R, C/2]   two E2M1 codes in a byte, the even element in the low nibble
    scales  U8 [R, C/16]  E4M3 bytes; every NaN is stored as 0x7F
    global  F32 [1]       the number that the producer stores for the tensor; NaN is stored as 0x7FC00000

and the metadata `profile`, `dtype`, `name` and `library`. The profile `llm_compressor` is the arithmetic of
compressed-tensors with minimum and maximum taken in the weight's type, as llm-compressor's `memoryless_minmax` observer
does. A tensor of zeros is recorded for llm_compressor only: the other two write NaN for it.

The codes of elements that become NaN when they are scaled (every element of a block whose scale is NaN; in torchao also
0 · ∞ where 1/global overflows) hold what the library wrote, which for llm_compressor and torchao depends on the sign and
payload of the NaN and so on the vector instructions that torch chose. Everything else is the same with and without
vector instructions (ATEN_CPU_CAPABILITY=default, avx2, avx512).

On a CUDA device torch divides by a Python number with a product by its reciprocal, so ModelOpt and torchao may store
another last bit there.

`modelopt_mse` and `modelopt_4over6` are ModelOpt's searches of scales (NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG and
NVFP4_FOUR_OVER_SIX_CFG), through its own calibrators, kernels and export. Its kernels are Triton's, run by Triton's
interpreter, with the checks for a GPU left out. They refuse what is not finite, so those cases are not recorded.
"""

import contextlib
import json
import os
import sys
import types
import zlib
from importlib.metadata import version
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.kernels.quantization.common import nvfp4_quant
from modelopt.torch.kernels.quantization.gemm import fp4_kernel, nvfp4_fp8_sweep
from modelopt.torch.quantization.calib.mse import MseCalibrator
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from modelopt.torch.quantization.utils.numeric_utils import fp8_max_for_normalization
from safetensors.torch import save
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
BLOCK = 16


def modelopt(x):
    q, scales, scale_2 = NVFP4QTensor.quantize(x, BLOCK)
    return q._quantized_data, scales, scale_2


# What asks for a GPU, and what only its compiler knows.
torch.cuda.device = lambda _device: contextlib.nullcontext()
nvfp4_quant.libdevice = types.SimpleNamespace(isnan=lambda x: x != x)
nvfp4_fp8_sweep._prepare_block_sweep = lambda x, size: (x.numel() // size, x.view(-1), torch.empty(x.numel() // size))
SWEEP = nvfp4_fp8_sweep._fp8_scale_sweep_kernel.fn  # without its search for the fastest tile


class Sweep:
    def __getitem__(self, _grid):
        def run(*args, **sizes):
            return SWEEP[(-(-args[4] // 32),)](*args, **sizes, BLOCKS_PER_PROGRAM=32)

        return run


nvfp4_fp8_sweep._fp8_scale_sweep_kernel = Sweep()


def modelopt_searched(x, four_over_six, search):
    """`search` finds the amax of every block, as the calibration of a static quantizer does."""
    blocks = x.reshape(-1, BLOCK)
    quantizer = types.SimpleNamespace(block_sizes={-1: BLOCK, "four_over_six": four_over_six})
    quantizer._amax = blocks.abs().amax(dim=1, keepdim=True).float()
    quantizer.global_amax = quantizer._amax.max()
    quantizer._amax = search(blocks, quantizer)
    scale_2 = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(quantizer)
    scales, _ = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, x, scale_2)
    q, _, _ = NVFP4QTensor.quantize(x, BLOCK, scales, scale_2)
    return q._quantized_data, scales, scale_2


def modelopt_mse(x):
    def search(blocks, quantizer):
        return nvfp4_fp8_sweep.nvfp4_fp8_scale_sweep(blocks, quantizer.global_amax)

    return modelopt_searched(x, False, search)


def modelopt_4over6(x):
    def search(blocks, quantizer):
        def fake(x, amax):
            normal = fp8_max_for_normalization(quantizer)
            return fp4_kernel.static_blockwise_fp4_fake_quant(x, amax, quantizer.global_amax, True, normal, x.dtype)

        calibrator = MseCalibrator(quantizer._amax, 0, 0.5, 1.0, 1.5, fake)
        calibrator.collect(blocks)
        return calibrator.compute_amax()

    return modelopt_searched(x, True, search)


def llm_compressor(x):
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    blocks = x.unflatten(-1, (-1, BLOCK))
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    amax = torch.max(high.max(), -low.min()).reshape(1)
    divisor = generate_gparam(-amax, amax)
    scales, _ = calculate_qparams(low, high, scheme.weights, global_scale=divisor)
    # A module keeps its scales in the weight's type, which holds every E4M3 value.
    state = {"weight": x, "weight_scale": scales.to(x.dtype), "weight_global_scale": divisor}
    state = NVFP4PackedCompressor.compress(state, scheme)
    return state["weight_packed"], state["weight_scale"], state["weight_global_scale"]


def torchao(x):
    multiplier = per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_quantize(x, BLOCK, multiplier)
    return codes, scales, multiplier


PROFILES = {
    "modelopt": (modelopt, "nvidia-modelopt", "f32 bf16 f16"),
    "modelopt_mse": (modelopt_mse, "nvidia-modelopt", "f32 bf16 f16"),
    "modelopt_4over6": (modelopt_4over6, "nvidia-modelopt", "f32 bf16 f16"),
    "llm_compressor": (llm_compressor, "compressed-tensors", "f32 bf16 f16"),
    "torchao": (torchao, "torchao", "f32 bf16"),
}

# The midpoints of the E2M1 grid, the largest value first so that a block's maximum is 6.
MIDPOINTS = np.array([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6])


def tied_scales():
    """Block scales half way between two E4M3 values, each with the nearest even value."""
    normal = [(m + 0.5, m + m % 2, 2.0**e) for e in (-9, -4, -3, 0, 4) for m in range(8, 16)]
    subnormal = [(m + 0.5, m + m % 2, 2.0**-9) for m in range(8)]
    return [(tie * unit, even * unit) for tie, even, unit in subnormal + normal]


def ties(_rng):
    """amax 2688, hence a global scale of 1: midpoints of the element grid, then midpoints of the scale grid."""
    blocks = [MIDPOINTS, np.roll(MIDPOINTS, 5), MIDPOINTS * 448, MIDPOINTS / 512, MIDPOINTS / 64, MIDPOINTS * 1.875]
    for tie, even in tied_scales():
        block = MIDPOINTS * max(even, 2.0**-9)
        block[np.abs(block) >= 6 * tie] = 0
        block[0] = 6 * tie
        blocks.append(block)
    blocks += [np.zeros(BLOCK)] * (-len(blocks) % 4)
    return np.concatenate(blocks).reshape(-1, 4 * BLOCK)


def randn(rng):
    return rng.standard_normal((32, 64))


def student_t(rng):
    return rng.standard_t(2, (32, 64)) * 0.02


def signs(rng, shape):
    return rng.choice([-1.0, 1.0], shape)


def wide_range(rng, low=-30.0, high=30.0):
    """Upper half: every element has its own exponent. Lower half: every block has."""
    each = signs(rng, (8, 64)) * 10 ** rng.uniform(low, high, (8, 64))
    blockwise = rng.uniform(-1, 1, (8, 4, BLOCK)) * 10 ** rng.uniform(low, high, (8, 4, 1))
    return np.concatenate([each, blockwise.reshape(8, 64)])


def tiny_blocks(rng):
    """Blocks up to 2^-40 below the rest, blocks and rows of zeros."""
    x = rng.standard_normal((16, 4, BLOCK)) * 2.0 ** -rng.integers(0, 41, (16, 4, 1))
    x[0] = rng.standard_normal((4, BLOCK))
    x[1, :, :] = 0
    x[2, 1:3] = 0
    x[3, ::2] = 0
    x[-1] = 0
    return x.reshape(16, 64) * 100


def neg_zero(rng):
    """-0, negative values that round to zero, and blocks of nothing else."""
    x = rng.standard_normal((8, 64))
    x[rng.random(x.shape) < 0.3] = -0.0
    x[:, ::7] = -np.abs(x[:, ::7]) * 1e-3
    x[2, :16] = -0.0
    x[3, 16:32] = np.where(np.arange(16) % 2, 0.0, -0.0)
    x[4, 32:48] = -1e-6
    x[5] = -0.0
    return x


def scaled_to(amax):
    def values(rng):
        x = rng.standard_normal((8, 64)) * 2.0 ** -rng.integers(0, 6, (8, 64))
        return x / np.abs(x).max() * amax

    return values


def max_finite(rng, largest):
    x = rng.uniform(-1, 1, (8, 4, BLOCK)) * 2.0 ** -rng.integers(0, 12, (8, 4, 1)) * largest
    x[0, 0, 3], x[1, 1, 5], x[2, 2] = largest, -largest, largest
    return x.reshape(8, 64)


def special(*values):
    """Normal numbers, and each of these values in a block of its own."""

    def case(rng):
        x = rng.standard_normal((4, 64))
        x[2, 32:48] = 0
        x[3, :16] = -0.0
        for i, value in enumerate(values):
            x[0, BLOCK * i + 3 + i] = value
        return x

    return case


def constant(_rng):
    return np.full((4, 48), 0.1)


def zeros(_rng):
    return np.zeros((2, 32))


def cases(dtype):
    """The named matrices for a type, in binary64."""
    largest = torch.finfo(DTYPES[dtype]).max
    yield "randn", randn
    yield "student_t", student_t
    yield "wide_range", (lambda rng: wide_range(rng, -7, np.log10(6e4))) if dtype == "f16" else wide_range
    yield "tiny_blocks", tiny_blocks
    yield "ties", ties
    yield "neg_zero", neg_zero
    yield "small_amax", scaled_to(1e-6)
    if dtype != "f16":
        yield "small_amax_e37", scaled_to(5e-37)
        yield "small_amax_e38", scaled_to(1e-38)
    yield "max_finite", lambda rng: max_finite(rng, largest)
    yield "has_inf", special(np.inf, -np.inf)
    yield "has_nan", special(np.nan)
    yield "has_inf_nan", special(np.inf, np.nan)
    yield "constant", constant
    yield "zeros", zeros


def file_bytes(tensors, metadata):
    """A safetensors file whose metadata is sorted, so that every run writes the same bytes."""
    data = save(tensors, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    return data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + data[end:]


def main(folder):
    torch.set_num_threads(1)
    for dtype, torch_dtype in DTYPES.items():
        for name, values in cases(dtype):
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            x = torch.from_numpy(values(rng).astype(np.float32)).to(torch_dtype).contiguous()
            x[x.isnan()] = float("nan")  # the same bits from every conversion
            for profile, (quantize, package, dtypes) in PROFILES.items():
                if dtype not in dtypes.split() or (name == "zeros" and profile != "llm_compressor"):
                    continue
                if profile in ("modelopt_mse", "modelopt_4over6") and not x.isfinite().all():
                    continue
                codes, scales, stored = quantize(x.clone())
                assert scales.dtype == torch.float8_e4m3fn and stored.dtype == F32
                scales = scales.reshape(len(x), -1).contiguous().view(torch.uint8)
                scales[scales & 0x7F == 0x7F] = 0x7F
                stored = stored.reshape(1)
                stored[stored.isnan()] = float("nan")
                tensors = {"input": x, "codes": codes.contiguous(), "scales": scales, "global": stored}
                library = f"{package} {version(package)}"
                metadata = {"profile": profile, "dtype": dtype, "name": name, "library": library}
                path = folder / f"{profile}__{dtype}__{name}.safetensors"
                path.write_bytes(file_bytes(tensors, metadata))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
