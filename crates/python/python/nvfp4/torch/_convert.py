"""Whole models."""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Literal, NamedTuple, Optional, Set, Tuple, Union

import torch
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

import nvfp4

from ._delayed import keep_from_broadcasts
from ._formats import plan_of
from ._inputs import FLOATS
from ._layer import Layer
from ._linear import Linear, Transposed, become
from ._report import Conversion, Converted, Left

_logger = logging.getLogger("nvfp4")

# What compilers and wrappers put between a model and its parts. Recipes do not see it.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Parts of a name that only output heads have, as those that conversion of checkpoints leaves.
_HEADS = {"lm_head", "output_layer", "embed_out", "v_head", "shared_head"}


def convert_module(
    model: torch.nn.Module,
    recipe: Union[str, nvfp4.Recipe],
    *,
    filter_fn: Optional[Callable[[torch.nn.Module, str], bool]] = None,
    head: Literal["leave", "convert"] = "leave",
    seed: int = 0,
) -> Conversion:
    """Converts the linear layers of a model, in place, to the formats that a recipe gives their
    names. Returns a report.

    A layer stays the same object with the same parameters, hooks and attributes, so optimizers,
    state dicts and other references to it stay valid. Layers are ``torch.nn.Linear``, subclasses
    that keep its ``forward``, and ``Conv1D`` of transformers; a layer that is quantized already
    switches to the recipe. ``filter_fn(module, name)``, as torchao's, says which modules may be
    converted; it is asked about every module with matrices. The output head, also one that shares
    its weight with an embedding, is left in high precision unless ``head`` is "convert". The recipe
    is checked for the whole model before anything is changed.

    The report's summary goes to the logger "nvfp4"; the plan's warnings, and one about large
    parameters that could not be converted, to ``warnings``.

    >>> import torch, nvfp4.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    >>> print(nvfp4.torch.convert_module(model, "nvfp4").line)
    nvfp4: converted 2 layers (100 % of 16,576 parameters); left no matrix
    """
    if filter_fn is not None and not callable(filter_fn):
        kind = type(filter_fn).__name__
        raise TypeError(f"filter_fn: expected a function of (module, name), got {kind}")
    if head not in ("leave", "convert"):
        raise ValueError(f"unknown head '{head}'; there are 'leave', 'convert'")
    parts = list(_walk(model))
    for part in parts:
        if filter_fn is None or _chosen(filter_fn, part):
            part.because = _hindrance(part.module, part.parent)
        else:
            part.because = Because("filter_fn leaves it", wanted=True)
    layers = [part for part in parts if part.because is None]
    # The head is in the plan too: a rule that names it is not misspelt.
    plan = plan_of(recipe, [site for part in layers for site in part.sites])
    specs: Dict[str, List[str]] = {path: [] for part in layers for path, *_ in part.sites}
    for entry, spec, _ in plan.entries:
        specs[entry.rpartition(":")[0]].append(spec)
        for rule in nvfp4.Delayed.parts(spec).values():
            nvfp4.Delayed(rule)  # one that nobody knows fails here
    heads = _heads(model, parts) if head == "leave" else set()
    for part in layers:
        if id(part.module) in heads and not isinstance(part.module, Layer):
            part.because = Because('an output head; head="convert" takes it too', wanted=True)
        elif all(spec == "high-precision" for path, *_ in part.sites for spec in specs[path]):
            part.because = Because("the recipe leaves it in high precision", wanted=True)
    sizes = {id(part): (part.kind, _size(part.module)) for part in parts}
    for part in layers:
        if part.because is None or isinstance(part.module, Layer):
            _convert(part, plan, seed)
    _leave_fast_paths(model)
    keep_from_broadcasts(model)
    converted = [
        Converted(part.name, str(part.module.products()[0][2]), sizes[id(part)][1])
        for part in parts
        if part.because is None and isinstance(part.module, Layer)
    ]
    left = [
        Left(part.name, sizes[id(part)][0], part.because.reason, sizes[id(part)][1], part.because.wanted)
        for part in parts
        if part.because is not None
    ]
    report = Conversion(model, plan, converted, left, _size(model))
    _logger.info(report.line)
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    return report


class Because(NamedTuple):
    """Why a module is left. ``wanted``: that was asked for, or nothing could be gained."""

    reason: str
    wanted: bool = False


@dataclass
class Part:
    """A module with matrices, under its first name in the model."""

    path: str
    module: torch.nn.Module
    parent: Optional[torch.nn.Module]
    because: Optional[Because] = None

    @property
    def name(self) -> str:
        return self.path or "model"

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def sites(self) -> List[Tuple]:
        kind = type(self.module) if isinstance(self.module, Layer) else Layer
        return kind.sites_of(self.module, self.name)


def _chosen(filter_fn: Callable[[torch.nn.Module, str], bool], part: Part) -> bool:
    try:
        return bool(filter_fn(part.module, part.path))
    except Exception as error:
        raise ValueError(
            f"filter_fn(module, {part.path!r}) on {part.kind} raised {type(error).__name__}: {error}; "
            "it is called as filter_fn(module, name) for every module with matrices, "
            "also those that are no linear layers"
        ) from error


def _walk(model: torch.nn.Module) -> Iterator[Part]:
    """Every module with matrices, once; a parametrized one, or one that is quantized already, as a
    whole.
    """
    seen: Set[int] = set()

    def walk(path: str, module: torch.nn.Module, parent: Optional[torch.nn.Module]) -> Iterator[Part]:
        if id(module) in seen:
            return
        seen.add(id(module))
        whole = isinstance(module, Layer) or parametrize.is_parametrized(module)
        if whole or any(p is not None and _is_matrix(p) for p in module._parameters.values()):
            yield Part(path, module, parent)
        for name, child in () if whole else module.named_children():
            inner = path if _wraps(module, name) else f"{path}.{name}" if path else name
            yield from walk(inner, child, module)

    return walk("", model, None)


def _wraps(module: torch.nn.Module, name: str) -> bool:
    data_parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    return name in _WRAPPED or (name == "module" and isinstance(module, data_parallel))


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    inner = [child for name, child in model.named_children() if _wraps(model, name)]
    return _unwrapped(inner[0]) if inner else model


def _is_matrix(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, UninitializedParameter) or parameter.dim() >= 2


def _size(module: torch.nn.Module) -> int:
    """How many parameters it has, as far as they are known."""
    return sum(p.numel() for p in module.parameters() if not isinstance(p, UninitializedParameter))


def _hindrance(module: torch.nn.Module, parent: Optional[torch.nn.Module]) -> Optional[Because]:
    """What keeps a module from being converted."""
    if isinstance(module, Layer):
        return Because("it follows nvfp4.te.autocast", wanted=True) if hasattr(module, "following") else None
    if parametrize.is_parametrized(module):
        return Because("it is parametrized; convert it first, then parametrize it")
    if isinstance(module, torch.nn.Linear) or _is_conv1d(module):
        return _hindrance_of_linear(module, parent)
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return Because("a table, not a product", wanted=True)
    if isinstance(module, torch.nn.MultiheadAttention):
        return Because("it multiplies by its weights itself; use projections that are torch.nn.Linear")
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return Because("a convolution")
    if any(p is not None and p.dim() == 3 for p in module._parameters.values()):
        return Because("several matrices in one parameter; use nvfp4.torch.GroupedLinear for experts")
    return Because("not a torch.nn.Linear")


def _hindrance_of_linear(module: torch.nn.Module, parent: Optional[torch.nn.Module]) -> Optional[Because]:
    weight = module._parameters.get("weight")
    if isinstance(parent, torch.nn.MultiheadAttention):
        return Because("torch.nn.MultiheadAttention reads this weight itself")
    if weight is None:
        fix = "use torch.nn.utils.parametrizations after the conversion"
        return Because(f"a hook computes its weight (weight_norm, spectral_norm or pruning); {fix}")
    if isinstance(weight, UninitializedParameter):
        return Because("its shape is not known yet; call the model once, then convert it")
    if isinstance(module, torch.nn.Linear) and type(module).forward is not torch.nn.Linear.forward:
        return Because("a subclass of torch.nn.Linear with a forward of its own")
    if "forward" in module.__dict__:
        return Because("its forward was replaced, as accelerate does; convert it before")
    if type(weight).__module__.partition(".")[0] == "torchao":
        kind = type(weight).__name__
        fix = "convert the model before torchao does"
        return Because(f"its weight is quantized already, as torchao's {kind}; {fix}")
    if weight.dtype not in FLOATS:
        return Because(f"its weight is {weight.dtype}; torch.float32, torch.bfloat16 and torch.float16 are quantized")
    return None


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``: a linear layer with a transposed weight.
    transformers need not be there.
    """
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _heads(model: torch.nn.Module, parts: List[Part]) -> Set[int]:
    """The modules that make logits: by their names, by what the model itself says, or by a weight
    that they share with an embedding.
    """
    heads = set()
    ask = getattr(_unwrapped(model), "get_output_embeddings", None)
    if callable(ask):
        with contextlib.suppress(NotImplementedError):  # a part of a model, which has none
            heads.add(id(ask()))
    tables = {id(part.module.weight) for part in parts if isinstance(part.module, torch.nn.Embedding)}
    for part in parts:
        named = not _HEADS.isdisjoint(part.path.split("."))
        if named or id(getattr(part.module, "weight", None)) in tables:
            heads.add(id(part.module))
    return heads


def _convert(part: Part, plan: nvfp4.Plan, seed: int) -> None:
    module = part.module
    if isinstance(module, Layer):
        module.path = part.name
    else:
        become(module, Linear if isinstance(module, torch.nn.Linear) else Transposed, part.name, seed)
    assert isinstance(module, Layer)
    module.take_formats(plan)


def _leave_fast_paths(model: torch.nn.Module) -> None:
    """In evaluation, torch's encoder layers have a kernel that reads the weights of their linear
    layers itself, past what is quantized.
    """
    for module in model.modules():
        if not any(isinstance(inner, Layer) for inner in module.modules()):
            continue
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False


def reduce_amaxes(model: torch.nn.Module, group=None) -> torch.nn.Module:
    """Makes all workers of a process group (of all processes, if none is given) agree on the amaxes
    of activations and gradients.

    Each worker has different tokens of one batch. It then quantizes with the scales that the whole
    batch would have had: amaxes of a tensor are reduced, and so are those of a feature over all
    tokens (the column direction of ``row-scaled``). Scales of a token, and of blocks as long as
    each worker has whole ones, come from one worker's tokens alone; they are not reduced. Those of
    delayed scaling are, in :func:`update_scales`. Works with gloo and NCCL.

    Each layer in training mode then waits for the same layer of all workers, in both passes, so all
    have to call the same layers in the same order: an expert without tokens is called with zero of
    them (``GroupedLinear`` does so), not skipped. In evaluation mode (``model.eval()``) every
    worker is on its own. :func:`stop_reducing_amaxes` ends it. A copy of the model keeps the group;
    a pickle does not.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError("reduce_amaxes: there is no process group yet; call torch.distributed.init_process_group first")
    _set_group(model, torch.distributed.group.WORLD if group is None else group)
    return model


def stop_reducing_amaxes(model: torch.nn.Module) -> torch.nn.Module:
    """Ends :func:`reduce_amaxes`: each worker quantizes by its own amaxes again."""
    _set_group(model, None)
    return model


def _set_group(model: torch.nn.Module, group) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.amax_group = group
    keep_from_broadcasts(model)
