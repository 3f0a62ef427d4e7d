"""``transformer_engine.pytorch.constants``: numbers and words that programs look up."""

from types import SimpleNamespace

import torch

from .._format import DType
from ._extension import FP8BwdTensors, FP8FwdTensors

TE_DType = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
TE_DType_To_Torch = {ours: theirs for theirs, ours in TE_DType.items()}

FP8FwdTensorIdx = SimpleNamespace(**{one.name: int(one) for one in FP8FwdTensors})
FP8BwdTensorIdx = SimpleNamespace(**{one.name: int(one) for one in FP8BwdTensors})

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

AttnMaskTypes = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

dist_group_type = torch.distributed.ProcessGroup
