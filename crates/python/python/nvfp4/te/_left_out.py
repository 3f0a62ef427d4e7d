"""What this package leaves out for good of TransformerEngine's: names, modules and methods, each with
what to use instead, or why it is not there.
"""

from __future__ import annotations

from typing import Any, Callable

_OFFLOADING = "use torch's torch.autograd.graph.save_on_cpu"
_ONNX = "use torch.export, which takes these modules as they are"
_SOLVER = "there is no cuSOLVERMp here"
_BUFFERS = (
    "there are no user buffers; layers with tp_size have their collective operations of torch"
)

# Names of transformer_engine.pytorch.
WHY = {
    "CusolverMpCtx": _SOLVER,
    "FusedMLAQUpProjRopeQuant": (
        "it is a kernel for Blackwell; use Linear, apply_rotary_pos_emb and a quantizer"
    ),
    "ManualOffloadSynchronizer": _OFFLOADING,
    "UserBufferQuantizationMode": _BUFFERS,
    "destroy_ub": _BUFFERS,
    "get_cpu_offload_context": _OFFLOADING,
    "initialize_ub": _BUFFERS,
    "mark_not_offload": _OFFLOADING,
    "newton_schulz": _SOLVER,
    "onnx_export": _ONNX,
}

# Modules of transformer_engine, with those below them.
MODULES = {
    "debug": "its debug tools are not here; torch's hooks of modules and tensors see what they see",
    "pytorch.cpu_offload": _OFFLOADING,
    "pytorch.export": _ONNX,
    "pytorch.newton_schulz": _SOLVER,
}

_METHODS = {
    "convert_paged_to_nonpaged": "the cache is never paged",
    "make_grouped_weights": "each expert has a weight of its own, and there are no grouped tensors",
    "onnx_dequantize": _ONNX,
    "onnx_forward": _ONNX,
    "onnx_quantize": _ONNX,
}


def left_out(name: str) -> Callable[..., Any]:
    """A method that is refused by its name. ``why`` says the reason."""
    why = _METHODS[name]

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"te.{type(self).__name__}.{name} is not supported here: {why}")

    refused.__name__, refused.__doc__ = name, f"Left out: {why}."
    refused.__dict__["why"] = why
    return refused
