"""What a checkpoint says about its quantization."""

from __future__ import annotations

import copy
from typing import Any, Dict, Optional

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

# The name under which transformers finds our quantizer.
METHOD = "nvfp4-checkpoint"
# What compressed-tensors calls the forms that are read here.
_PACKED, _FP8 = "nvfp4-pack-quantized", "float-quantized"


class Config(QuantizationConfigMixin):
    """How an NVFP4 checkpoint is loaded.

    ``activations`` is "file", by which a layer quantizes its input where the checkpoint has a scale
    for it (W4A4), or "none" (W4A16). A checkpoint that says nothing about its quantization in
    ``config.json`` is loaded as NVFP4 if this is given as ``quantization_config``.
    """

    def __init__(self, activations: str = "file", described: Optional[Dict[str, Any]] = None):
        if activations not in ("file", "none"):
            raise ValueError(f"unknown activations '{activations}'; there are 'file', 'none'")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.activations = activations
        self.described = described

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        config = cls(described=copy.deepcopy(dict(config_dict)))
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> Dict[str, Any]:
        """What counts of a config that is given beside the checkpoint's own."""
        return {"activations": self.activations}

    def to_dict(self) -> Dict[str, Any]:
        """What the checkpoint says, so that a saved model says it too."""
        return copy.deepcopy(self.described) or {"quant_method": self.quant_method}


def is_ours(described: Dict[str, Any]) -> bool:
    """Whether what compressed-tensors says is NVFP4, alone or beside FP8."""
    groups = [group for group in (described.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = {group.get("format") or _form_of(group, described.get("format")) for group in groups}
    return _PACKED in formats and formats <= {_PACKED, _FP8}


def _form_of(group: Dict[str, Any], whole: Optional[str]) -> Optional[str]:
    """The form of a group that does not name one."""
    weights = group.get("weights") or {}
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind == ("float", 4) and weights.get("group_size") == 16 and whole in (None, _PACKED, "mixed-precision"):
        return _PACKED
    return _FP8 if kind == ("float", 8) else whole


def beside(theirs: Any) -> Any:
    """The class that takes the place of transformers' own for compressed-tensors: NVFP4 becomes ours,
    and everything else stays theirs.
    """

    class CompressedTensorsConfig(theirs):
        @classmethod
        def from_dict(cls, config_dict, *args, **kwargs):
            kind = Config if is_ours(config_dict) else theirs
            return kind.from_dict(config_dict, *args, **kwargs)

    CompressedTensorsConfig._nvfp4 = True
    return CompressedTensorsConfig


def register_configs() -> None:
    """Tells transformers who reads which ``quantization_config``."""
    for method in ("modelopt", "modelopt_fp4", "modelopt_mixed"):
        if method not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(method)(Config)
    # Registration refuses names that are there, so this entry is replaced.
    theirs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
    if not hasattr(theirs, "_nvfp4"):
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = beside(theirs)
    if Config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (Config,)  # type: ignore[assignment]
