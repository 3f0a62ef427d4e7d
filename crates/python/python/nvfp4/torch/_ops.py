"""The operations that everything else is made of, registered with torch.

``torch.ops.nvfp4.linear`` and ``torch.ops.nvfp4.linear_backward`` are the passes of a linear layer,
each in one call; ``torch.ops.nvfp4.linear_codes`` is the forward pass of a weight that is there as
codes. Such weights are blocks of bytes, which ``quantize_blocks``, ``dequantize_block`` and
``prepare_block`` make and read. The parts of a layer are
``torch.ops.nvfp4.quantize``, ``torch.ops.nvfp4.quantize_delayed``
for tensors with delayed scaling, and ``torch.ops.nvfp4.matmul``.

Between the parts, a quantized tensor travels as the list of its arrays: those of the row direction,
then those of the column direction (``nvfp4.layout`` says which). So autograd can keep it, compilers
can see it, and other devices can hold it.

Operations take any number of tokens, and pad it themselves to a multiple of ``alignment``. So a
graph with them is that of every number of tokens.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

import nvfp4
from nvfp4 import _nvfp4

from . import _sizes

_SHORT = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
           "int64": torch.int64}  # fmt: skip


_library = torch.library.Library("nvfp4", "FRAGMENT")


def _define(schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Makes an operation known.

    torch calls what computes it as it is, without the Python that ``torch.library.custom_op`` puts
    around it. It has no gradient: that is the layers'.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, compute, device)
    torch.library.register_fake(f"nvfp4::{name}", fake, lib=_library)


def _quantize(
    x: Tensor,
    spec: str,
    directions: str,
    seed: int,
    offset: Optional[Tensor],
    amax: Optional[Tensor],
    column_amax: Optional[Tensor],
    finite: str = "",
    alignment: int = 1,
) -> List[Tensor]:
    """Quantizes ``x`` as ``spec`` says.

    Random numbers are drawn at ``offset``, an int64 tensor, if there is one.

    ``finite`` is the name of a tensor that must be finite. If it is not, the CPU raises; a GPU
    notes it in a flag after the arrays, which is -1 otherwise.
    """
    x = _padded(x, alignment)
    given, flag = _given(x, seed, offset, finite)
    if x.is_cuda and "high-precision" in spec:
        parts = _partly(x, spec, directions, {"amax": amax, **given}, {"column_amax": column_amax, **given})[0]
    else:
        parts = _parts(_observed(x, spec, directions, finite, amax=amax, column_amax=column_amax, **given)[0])
    return parts + flag


def _padded(x: Tensor, alignment: int) -> Tensor:
    """The tensor with zeros for tokens that are missing in the last block; the same if none are."""
    missing = -x.shape[:-1].numel() % alignment
    return functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, missing)) if missing else x


def _first(y: Tensor, shape: torch.Size) -> Tensor:
    """The first rows of a result, in this shape: no view, so that operations in place may follow."""
    return torch.ops.aten._unsafe_view(y[: shape[:-1].numel()], shape)


def _parts(q: nvfp4.QuantTensor) -> List[Tensor]:
    return [part for side in (q.row, q.column) if side is not None for part in side._parts()]


def _given(x: Tensor, seed: int, offset: Optional[Tensor], finite: str) -> Tuple[Dict[str, Any], List[Tensor]]:
    """What a call gives to every quantizer, and the flag beside its results, if there is one."""
    given: Dict[str, Any] = {} if offset is None else {"seed": seed, "offset": offset}
    flag = [x.new_full((1,), -1, dtype=torch.int64)] if finite else []
    if flag and x.is_cuda:
        given["watch"] = flag[0]
    return given, flag


def _observed(x: Tensor, spec: str, directions: str, finite: str, **given):
    """What a quantizer makes, and the amaxes that it saw.

    On the CPU it refuses what must be finite and is not, by name.
    """
    if x.is_cuda or not finite:
        return nvfp4.Quantizer(spec=spec, directions=directions).observe(x, **given)
    try:
        return nvfp4.Quantizer(spec=spec, directions=directions, finite="refuse").observe(x, **given)
    except ValueError as error:
        raise ValueError(f"{finite}: {error}") from None


def _partly(
    x: Tensor, spec: str, directions: str, row_given: Dict[str, Any], column_given: Dict[str, Any]
) -> Tuple[List[Tensor], Optional[Tensor], Optional[Tensor]]:
    """The arrays of a tensor on a GPU that is not quantized in one direction or in both: those are
    the numbers themselves. Beside them the amaxes that delayed scaling saw.
    """
    row, _, column = spec.partition(" / ")
    amax = column_amax = None
    if not column:
        return [_kept(x, row)], None, None
    column, from_row = column.removesuffix(" from row"), column.endswith(" from row")
    parts, seen = [], x
    if directions != "column" or from_row:
        if row.startswith("high-precision"):
            made = [_kept(x, row)]
        else:
            q, amax, _ = nvfp4.Quantizer(spec=row, directions="row").observe(x, **row_given)
            made, seen = _side(q, "row")._parts(), q.dequantize(x.dtype) if from_row else x
        parts += made if directions != "column" else []
    if directions != "row":
        if column.startswith("high-precision"):
            parts.append(_kept(seen, column))
        else:
            q, _, column_amax = nvfp4.Quantizer(spec=column, directions="column").observe(seen, **column_given)
            parts += _side(q, "column")._parts()
    return parts, amax, column_amax


def _kept(x: Tensor, format: str) -> Tensor:
    """A copy of what is not quantized, in the type that its format names, if it names one."""
    _, _, name = format.rstrip(")").partition("(")
    return x.to(_SHORT[name] if name else x.dtype, copy=True)


def _quantize_fake(x, spec, directions, seed, offset, amax, column_amax, finite="", alignment=1):
    flag = [("int64", [1])] if finite else []
    return _arrays_fake(x, spec, directions, alignment, flag)


def _arrays_fake(x, spec, directions, alignment, more):
    tokens = _sizes.padded(math.prod(x.shape[:-1]), alignment)
    arrays = _sizes.arrays(spec, directions, (tokens, x.shape[-1]), str(x.dtype))
    return [x.new_empty(shape, dtype=_DTYPES[dtype]) for dtype, shape in arrays + more]


def _quantize_delayed(
    x: Tensor,
    spec: str,
    directions: str,
    seed: int,
    offset: Optional[Tensor],
    scale: Optional[Tensor],
    column_scale: Optional[Tensor],
    finite: str = "",
    alignment: int = 1,
) -> List[Tensor]:
    """Quantizes ``x`` by scales of earlier steps.

    After the arrays come the amax that was seen for each scale, 0 if it was not used, and the flag
    of ``quantize``.
    """
    x = _padded(x, alignment)
    given, flag = _given(x, seed, offset, finite)
    if x.is_cuda and "high-precision" in spec:
        # A spec of the column direction alone has one scale.
        sides = {"scale": scale, **given}, {"scale": column_scale, **given}
        parts, amax, column_amax = _partly(x, spec, directions, *sides)
    else:
        scales = {"scale": scale, "column_scale": column_scale}
        q, amax, column_amax = _observed(x, spec, directions, finite, **scales, **given)
        parts = _parts(q)
    if column_scale is None and amax is None:
        amax = column_amax  # one scale serves both directions, and only this one is there
    asked = [a for a, kept in ((amax, scale), (column_amax, column_scale)) if kept is not None]
    seen = [x.new_zeros(1, dtype=torch.float32) if a is None else a for a in asked]
    return parts + seen + flag


def _quantize_delayed_fake(x, spec, directions, seed, offset, scale, column_scale, finite="", alignment=1):
    amaxes = [("float32", [1]) for given in (scale, column_scale) if given is not None]
    flag = [("int64", [1])] if finite else []
    return _arrays_fake(x, spec, directions, alignment, amaxes + flag)


def _matmul(
    a: List[Tensor],
    a_spec: str,
    a_side: str,
    a_shape: List[int],
    b: List[Tensor],
    b_spec: str,
    b_side: str,
    b_shape: List[int],
    bias: Optional[Tensor],
    dtype: torch.dtype,
    accumulator: str = "precise",
    rows: Optional[int] = None,
) -> Tensor:
    """The product of a direction of one quantized tensor and a direction of another, transposed,
    plus a bias.

    The arrays are those of one direction; the shapes are those of the tensors. Of the result the
    first ``rows`` are wanted, all if there is no such number.
    """
    y = _product(a, a_spec, a_side, a_shape, b, b_spec, b_side, b_shape, bias, dtype, accumulator)
    return y if rows is None or rows == y.shape[0] else _first(y, torch.Size((rows, y.shape[1])))


def _product(a, a_spec, a_side, a_shape, b, b_spec, b_side, b_shape, bias, dtype, accumulator) -> Tensor:
    if len(a) == 1 and len(b) == 1:  # neither is quantized
        left = a[0] if a_side == "row" else a[0].t()
        right = b[0] if b_side == "row" else b[0].t()
        y = torch.mm(left.to(dtype), right.to(dtype).t())
        return y if bias is None else y + bias.to(dtype)
    if bias is not None:
        bias = bias.detach() if bias.is_cuda else bias.detach().float()
    if a[0].is_cuda and len(a) == 1:
        left = a[0] if a_side == "row" else a[0].t()
        return nvfp4.matmul(left, _direction(b, b_spec, b_side, b_shape), bias=bias, dtype=dtype)
    if a[0].is_cuda and len(b) == 1:  # the plain operand goes to the left
        right = b[0] if b_side == "row" else b[0].t()
        y = nvfp4.matmul(right, _direction(a, a_spec, a_side, a_shape), dtype=dtype).t().contiguous()
        return y if bias is None else y + bias.to(dtype)
    quantized = _direction(a, a_spec, a_side, a_shape), _direction(b, b_spec, b_side, b_shape)
    return nvfp4.matmul(*quantized, bias=bias, dtype=dtype, accumulator=accumulator)


def _matmul_fake(a, a_spec, a_side, a_shape, b, b_spec, b_side, b_shape, bias, dtype, accumulator="precise", rows=None):
    if rows is None:
        rows = a_shape[0] if a_side == "row" else a_shape[1]
    cols = b_shape[0] if b_side == "row" else b_shape[1]
    return a[0].new_empty((rows, cols), dtype=dtype)


def _direction(parts: List[Tensor], spec: str, side: str, shape: List[int]) -> nvfp4.Direction:
    return _side(nvfp4.QuantTensor.from_parts(spec, shape, **{side: parts}), side)


def _side(q: nvfp4.QuantTensor, side: str) -> nvfp4.Direction:
    direction = q.row if side == "row" else q.column
    assert direction is not None, "it was made with this direction"
    return direction


def _linear(x, weight, bias, formats, scales, watched, alignment=1) -> List[Tensor]:
    whole = _padded(x, alignment)
    made = _nvfp4._linear(whole, weight, bias, formats, scales, watched)
    if whole is not x:
        made[0] = _first(made[0], torch.Size((*x.shape[:-1], weight.shape[0])))
    return made


def _linear_fake(x, weight, bias, formats, scales, watched, alignment=1):
    (*tokens, _), (outputs, inputs) = x.shape, weight.shape
    y = x.new_empty((*tokens, outputs))
    blocks = _sizes.linear_blocks(formats, _sizes.padded(math.prod(tokens), alignment), inputs, outputs)
    return [y, *(x.new_empty(size, dtype=torch.uint8) for size in blocks), *_noted(x, scales, watched, 2)]


def _linear_codes(
    x, weight, prepared, bias, formats, out_features, amax, scales, watched, alignment=1
) -> List[Tensor]:
    whole = _padded(x, alignment)
    made = _nvfp4._linear_codes(whole, weight, prepared, bias, formats, out_features, amax, scales, watched)
    if whole is not x:
        made[0] = _first(made[0], torch.Size((*x.shape[:-1], out_features)))
    return made


def _linear_codes_fake(x, weight, prepared, bias, formats, out_features, amax, scales, watched, alignment=1):
    *tokens, inputs = x.shape
    y = x.new_empty((*tokens, out_features))
    blocks = _sizes.input_blocks(formats, _sizes.padded(math.prod(tokens), alignment), inputs)
    return [y, *(x.new_empty(size, dtype=torch.uint8) for size in blocks), *_noted(x, scales, watched, 2)]


def _quantize_blocks_fake(x, spec, directions):
    return [x.new_empty(size, dtype=torch.uint8) for size in _sizes.blocks(spec, directions, *x.shape)]


def _dequantize_block_fake(block, spec, rows, cols, dtype):
    return block.new_empty((rows, cols), dtype=dtype)


def _prepare_block(block: Tensor, spec: str, rows: int, cols: int) -> List[Tensor]:
    made = _nvfp4._prepare_block(block, spec, rows, cols)
    return [] if made is None else [made]


def _prepare_block_fake(block, spec, rows, cols):
    if not block.is_cuda:
        return []  # products read the block itself
    raise NotImplementedError("a weight is prepared before a model is compiled: call it once")


def _linear_backward(
    dy, x, weight, formats, in_features, dx, dw, seed, offset, scales, watched, alignment=1
) -> List[Tensor]:
    whole = _padded(dy, alignment)
    made = _nvfp4._linear_backward(whole, x, weight, formats, in_features, dx, dw, seed, offset, scales, watched)
    if whole is not dy and dx is not None:
        made[0] = _first(made[0], torch.Size((*dy.shape[:-1], in_features)))
    return made


def _linear_backward_fake(dy, x, weight, formats, in_features, dx, dw, seed, offset, scales, watched, alignment=1):
    made = [] if dx is None else [dy.new_empty((*dy.shape[:-1], in_features), dtype=dx)]
    made += [] if dw is None else [dy.new_empty((dy.shape[-1], in_features), dtype=dw)]
    return [*made, *_noted(dy, scales, watched, 1)]


def _noted(x: Tensor, scales: List[Optional[Tensor]], watched: str, tensors: int) -> List[Tensor]:
    """What operations note: an amax for each scale, and flags of the tensors that must be finite."""
    flags = [x.new_empty(tensors, dtype=torch.int64)] if watched else []
    return [x.new_empty(1, dtype=torch.float32) for scale in scales if scale is not None] + flags


_define(
    "quantize(Tensor x, str spec, str directions, int seed, Tensor? offset, Tensor? amax, Tensor? column_amax,"
    ' str finite="", int alignment=1) -> Tensor[]',
    _quantize,
    _quantize_fake,
)
_define(
    "quantize_delayed(Tensor x, str spec, str directions, int seed, Tensor? offset, Tensor? scale,"
    ' Tensor? column_scale, str finite="", int alignment=1) -> Tensor[]',
    _quantize_delayed,
    _quantize_delayed_fake,
)
_define(
    "matmul(Tensor[] a, str a_spec, str a_side, SymInt[] a_shape, Tensor[] b, str b_spec, str b_side, SymInt[] b_shape,"
    ' Tensor? bias, ScalarType dtype, str accumulator="precise", SymInt? rows=None) -> Tensor',
    _matmul,
    _matmul_fake,
)
_define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str formats, Tensor?[] scales, str watched, int alignment=1)"
    " -> Tensor[]",
    _linear,
    _linear_fake,
)
_define(
    "linear_codes(Tensor x, Tensor weight, Tensor? prepared, Tensor? bias, str formats, SymInt out_features, Tensor? amax,"
    " Tensor?[] scales, str watched, int alignment=1) -> Tensor[]",
    _linear_codes,
    _linear_codes_fake,
)
_define("quantize_blocks(Tensor x, str spec, str directions) -> Tensor[]", _nvfp4._quantize_blocks, _quantize_blocks_fake)
_define(
    "dequantize_block(Tensor block, str spec, SymInt rows, SymInt cols, ScalarType dtype) -> Tensor",
    _nvfp4._dequantize_block,
    _dequantize_block_fake,
)
_define(
    "prepare_block(Tensor block, str spec, SymInt rows, SymInt cols) -> Tensor[]", _prepare_block, _prepare_block_fake
)
_define(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, str formats, SymInt in_features, ScalarType? dx, ScalarType? dw,"
    " int seed, Tensor? offset, Tensor?[] scales, str watched, int alignment=1) -> Tensor[]",
    _linear_backward,
    _linear_backward_fake,
)

PLAIN = (Tensor, torch.nn.Parameter)
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling


def unwatched(x: Tensor, other: Tensor) -> bool:
    """Whether nothing but the operation itself would see a call: no compiler, no tracer, no mode and
    no transform, and tensors with memory. Then torch's dispatcher has nothing to add.
    """
    return (
        not _compiling()
        and type(x) in PLAIN
        and type(other) in PLAIN
        and (x.is_cuda or x.is_cpu)
        and not _modes()
        and not _function_modes()
        and _transforms() is None
        and _tracing() is None
    )


def linear(x: Tensor, weight: Tensor, *rest: Any) -> List[Tensor]:
    """``torch.ops.nvfp4.linear``, by the shortest way."""
    call = _linear if unwatched(x, weight) else torch.ops.nvfp4.linear.default
    return call(x, weight, *rest)


def linear_codes(x: Tensor, weight: Tensor, *rest: Any) -> List[Tensor]:
    """``torch.ops.nvfp4.linear_codes``, by the shortest way."""
    call = _linear_codes if unwatched(x, weight) else torch.ops.nvfp4.linear_codes.default
    return call(x, weight, *rest)


def linear_backward(dy: Tensor, x: Tensor, *rest: Any) -> List[Tensor]:
    """``torch.ops.nvfp4.linear_backward``, by the shortest way."""
    call = _linear_backward if unwatched(dy, x) else torch.ops.nvfp4.linear_backward.default
    return call(dy, x, *rest)
