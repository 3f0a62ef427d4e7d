"""torchao's ``NVFP4Tensor`` and our quantized tensors, each over the bytes of the other.

Both keep the even element in the low nibble, E4M3 scales in rows or in tiles of 128 × 4, and one
32-bit scale. torchao's is what decoded values are multiplied by, as with ``profile="torchao"``.
torchao is imported only where one of these functions is called.
"""

from __future__ import annotations

import json
import math
from typing import Any, Dict, NoReturn, Optional, Tuple

import torch
from torch import Tensor

import nvfp4

from ._inputs import FLOATS

_BLOCK = 16
# The largest code times the largest scale: torchao divides an amax by it.
_LARGEST = 6 * 448
_ROUNDINGS: Dict[str, Any] = {"rn": "nearest", "rs": "stochastic"}


def to_torchao(
    q: nvfp4.QuantTensor, *, dtype: torch.dtype = torch.bfloat16, like: Optional[Tensor] = None
) -> Tensor:
    """torchao's ``NVFP4Tensor`` over the bytes of a quantized tensor's row direction, without a
    copy. Do not write to either while the other is in use.

    ``dtype`` is the type that the tensor has for torch. With ``like``, an ``NVFP4Tensor``, the type
    and the settings for activations are those of that tensor instead. Scales are swizzled if those
    of ``q`` are: ``q.with_layout("swizzled")``.

    A tensor of ``profile="torchao"`` or ``"modelopt"`` decodes to the same bits here and there.
    Other profiles store an amax or a divisor. For these, the multiplier of torchao is rounded to
    float32 once more, so that a decoded value may differ in the last bits of float32; codes and
    block scales are the same.
    """
    kind = _torchao().NVFP4Tensor
    if not isinstance(q, nvfp4.QuantTensor):
        raise TypeError(f"q: expected an nvfp4.QuantTensor, got {_kind(q)}")
    if like is None:
        return _over(q, dtype)
    if not isinstance(like, kind):
        raise TypeError(f"like: expected a torchao NVFP4Tensor, got {_kind(like)}")
    names = ("act_per_tensor_scale", "use_triton_kernel", "act_quant_kwargs")
    return _over(q, like.dtype, **{name: getattr(like, name) for name in names})


def from_torchao(tensor: Tensor) -> nvfp4.QuantTensor:
    """The quantized tensor of torchao's ``NVFP4Tensor``, with its codes and scales as they are. It
    decodes to the same bits.

    Bytes on a GPU are used where they lie: do not write to them while the quantized tensor is in
    use. Bytes in the host's memory are copied. A tensor without a ``per_tensor_scale`` gets the
    scale 1. Settings for activations have no place in a quantized tensor; ``to_torchao(q,
    like=tensor)`` puts them back.
    """
    if not isinstance(tensor, _torchao().NVFP4Tensor):
        raise TypeError(f"tensor: expected a torchao NVFP4Tensor, got {_kind(tensor)}")
    given: Any = tensor
    if given.block_size != _BLOCK:
        raise ValueError(
            f"tensor: NVFP4 has blocks of {_BLOCK}, this tensor's have {given.block_size}"
        )
    if given.qdata.stride(-2) < given.qdata.stride(-1):
        raise ValueError(
            "tensor: it is a transposed view; "
            "give the tensor itself, tensor.t() or tensor.transpose(-2, -1)"
        )
    scale = given.per_tensor_scale
    if scale is not None and scale.numel() != 1:
        raise ValueError(
            f"tensor: it has {scale.numel()} scales, one per expert; "
            "take its experts one by one, from_torchao(tensor[0])"
        )
    rows, cols = given.shape[:-1].numel(), given.shape[-1]
    swizzled = given.is_swizzled_scales
    if given.dim() > 2 and swizzled and given.shape[-2] % 128:
        raise ValueError(
            f"tensor: its swizzled scales are padded for each matrix of {given.shape[-2]} rows; "
            "take its matrices one by one, from_torchao(tensor[0])"
        )
    size = (
        (128 * math.ceil(rows / 128), 4 * math.ceil(cols / 64))
        if swizzled
        else (rows, cols // _BLOCK)
    )
    arrays = [
        given.qdata.contiguous().view(torch.uint8).reshape(rows, cols // 2),
        given.scale.contiguous().view(torch.uint8).reshape(size),
        torch.ones(1, device=given.device) if scale is None else scale.detach().float().reshape(1),
    ]
    spec = "nvfp4(torchao, swizzled)" if swizzled else "nvfp4(torchao)"
    return nvfp4.QuantTensor.from_parts(spec, list(given.shape), row=arrays)


def quantize_torchao(
    data_hp: Tensor,
    block_size: int = _BLOCK,
    per_tensor_scale: Optional[Tensor] = None,
    act_per_tensor_scale: Optional[Tensor] = None,
    is_swizzled_scales: bool = False,
    use_triton_kernel: bool = False,
    act_quant_kwargs: Any = None,
    *,
    rounding_mode: Any = "rn",
    seed: Optional[int] = None,
    offset: Any = None,
) -> Tensor:
    """torchao's ``NVFP4Tensor.to_nvfp4`` with its arguments, by our kernels, and with a rounding
    mode.

    ``per_tensor_scale`` is torchao's ``per_tensor_amax_to_scale(amax)``; a number that is no
    amax / 2688 of float32 becomes its neighbour that is. Without it, blocks have their own scales
    alone. ``use_triton_kernel`` goes into the tensor and changes nothing here.

    "rn" rounds to nearest even, with torchao's bytes. "rs" rounds stochastically: a value that is
    k/256 on its way from one code to the next becomes the next with the probability k/256, in every
    step of the grid, those below 1 included. What is between two such values counts as the lower
    one. The random byte of an element comes from (``seed``, ``offset``, its position) alone, on the
    CPU and on a GPU. A member of an enum with one of these names is a mode too.
    """
    mode = str(getattr(rounding_mode, "name", rounding_mode)).lower()
    if mode not in _ROUNDINGS:
        raise ValueError(f"unknown rounding_mode {rounding_mode!r}; there are 'rn', 'rs'")
    if mode == "rs" and (seed is None or offset is None):
        raise ValueError(
            "rounding_mode 'rs' draws random numbers: "
            "give a seed, and an offset that no other call has"
        )
    if mode == "rn" and (seed is not None or offset is not None):
        raise ValueError(
            "rounding_mode 'rn' draws no random numbers: leave out seed and offset, or use 'rs'"
        )
    if block_size != _BLOCK:
        raise ValueError(f"block_size: NVFP4 has blocks of {_BLOCK}, got {block_size}")
    if not isinstance(data_hp, Tensor) or data_hp.dtype not in FLOATS:
        got = data_hp.dtype if isinstance(data_hp, Tensor) else _kind(data_hp)
        raise TypeError(f"data_hp: expected a tensor of float32, bfloat16 or float16, got {got}")
    _check_shape(tuple(data_hp.shape), "data_hp")
    if per_tensor_scale is not None and per_tensor_scale.numel() != 1:
        raise ValueError(
            f"per_tensor_scale: expected one number, got {per_tensor_scale.numel()}; "
            "quantize experts one by one"
        )
    layout: Any = "swizzled" if is_swizzled_scales else "linear"
    quantizer = nvfp4.Quantizer(profile="torchao", rounding=_ROUNDINGS[mode], layout=layout)
    q = quantizer.quantize(
        data_hp.detach(), amax=_amax_of(data_hp, per_tensor_scale), seed=seed, offset=offset
    )
    made: Any = _over(
        q, data_hp.dtype, act_per_tensor_scale=act_per_tensor_scale, use_triton_kernel=use_triton_kernel,
        act_quant_kwargs=act_quant_kwargs,
    )  # fmt: skip
    if per_tensor_scale is None:
        made.per_tensor_scale = None
    return made


def _over(q: nvfp4.QuantTensor, dtype: torch.dtype, **settings: Any) -> Tensor:
    """torchao's tensor over the row direction's memory."""
    q = q.as_torch()
    row = _row(q)
    codes, scales, stored = row._parts()
    *leading, rows, cols = q.shape
    swizzled = row.layout == "swizzled"
    if swizzled and leading and rows % 128:
        _refuse(
            f"its matrices of {rows} rows share swizzled tiles of 128 rows, which torchao keeps apart; "
            'use q.with_layout("linear")'
        )
    # torchao counts a tile of 128 × 4 scales as 32 × 16.
    size = (
        (32 * math.ceil(rows / 128), 16 * math.ceil(cols / 64))
        if swizzled
        else (rows, cols // _BLOCK)
    )
    return _torchao().NVFP4Tensor(
        codes.reshape(*leading, rows, cols // 2),
        scales.reshape(*leading, *size).view(torch.float8_e4m3fn),
        _BLOCK,
        dtype,
        per_tensor_scale=_multiplier(q, row.unit, stored.reshape(())),
        is_swizzled_scales=swizzled,
        **settings,
    )


def _torchao() -> Any:
    try:
        from torchao.prototype.mx_formats import nvfp4_tensor
    except ImportError as error:
        raise ImportError(
            f"this needs torchao with prototype.mx_formats: pip install torchao ({error})"
        ) from error
    return nvfp4_tensor


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"q: torchao's NVFP4Tensor cannot hold it: {why}")


def _check_shape(shape: Tuple[int, ...], name: str) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name}: torchao's NVFP4Tensor has 2 or 3 dimensions, this has {len(shape)}; "
            "reshape it before"
        )
    if shape[-1] % _BLOCK or not shape[-1]:
        raise ValueError(
            f"{name}: torchao's NVFP4Tensor needs a last dimension that is a multiple of {_BLOCK}, "
            f"this has {shape[-1]}; pad it with zeros before it is quantized"
        )


def _row(q: nvfp4.QuantTensor) -> nvfp4.Direction:
    """The direction that torchao gets, if it can hold it."""
    row = q.row
    if row is None:
        _refuse('it has the column direction alone; quantize with directions="row" or "both"')
    if not row.format.startswith("nvfp4"):
        _refuse(f"it is {row.format}; quantize it as nvfp4")
    _check_shape(q.shape, "q")
    if row.global_scale.numel() != 1:
        _refuse('it has a 32-bit scale for each row; quantize with global_scale="per-tensor"')
    return row


def _multiplier(q: nvfp4.QuantTensor, unit: str, stored: Tensor) -> Tensor:
    """What torchao multiplies block scales by."""
    if unit == "multiplier":
        return stored
    return 1 / stored if unit == "divisor" else stored / (6 * _bound(q))


def _bound(q: nvfp4.QuantTensor) -> int:
    """The largest block scale of a tensor that stores an amax: 448, or 256 of some rules of 4over6.
    The header of its file says it.
    """
    row = q.cpu() if q.column is None else q.cpu().keep("row")
    data = row.slice_rows(0, 0).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    (about,) = json.loads(header["__metadata__"]["tensors"]).values()
    return int(about["row"]["unit"].removeprefix("amax"))


def _amax_of(x: Tensor, scale: Optional[Tensor]) -> Tensor:
    """The amax whose scale this is: that of which torchao's division makes it, if there is one."""
    if scale is None:
        return torch.full((1,), float(_LARGEST), device=x.device)
    scale = scale.detach().float().reshape(1).to(x.device)
    near = scale * _LARGEST
    found = near
    for towards in (0.0, math.inf):
        other = torch.nextafter(near, torch.full_like(near, towards))
        found = torch.where(other / _LARGEST == scale, other, found)
    return torch.where(near / _LARGEST == scale, near, found)
