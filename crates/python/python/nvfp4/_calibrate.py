"""What goes through a model of torch: the statistics of ``nvfp4 calibrate``, by hooks.

The rules are those of ``crates/model/src/calibrate.rs``, and so are names and the form of the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch
from torch import Tensor

_BLOCK = 16
# Bins per doubling of a histogram of blocks, the exponent of the first, and their number.
_BINS, _FIRST, _COUNT = 32.0, -40.0, 80 * 32
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.([^.]+)")


class Seen:
    """The input of a module."""

    def __init__(self) -> None:
        self.amax, self.rows = 0.0, 0
        self.squares: Optional[Tensor] = None
        self.blocks = torch.zeros(_COUNT, dtype=torch.int64)

    def take(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if not x.shape[0]:
            return
        squares = x.double().square().sum(0).cpu()
        self.squares = squares if self.squares is None else self.squares + squares
        self.rows += x.shape[0]
        whole = torch.nn.functional.pad(x, (0, -x.shape[1] % _BLOCK))
        most = whole.view(x.shape[0], -1, _BLOCK).abs().amax(-1).flatten().cpu()
        self.amax = max(self.amax, most.max().item())
        some = most[most > 0]
        bins = ((some.log2() - _FIRST) * _BINS).clamp(0, _COUNT - 1).long()
        self.blocks += torch.bincount(bins, minlength=_COUNT)

    def percentile(self, share: float) -> float:
        """A magnitude that this share of blocks, in percent, stays below; no more than the largest."""
        wanted = math.ceil(self.blocks.sum().item() * share / 100.0)
        bin = int(torch.searchsorted(self.blocks.cumsum(0), wanted).item())
        if bin >= _COUNT:
            return self.amax
        return min(2.0 ** (_FIRST + (bin + 1) / _BINS), self.amax)


class Collected:
    """What a run collects, by the names of modules in the model."""

    def __init__(self) -> None:
        self.inputs: Dict[str, Seen] = {}
        self.experts: Dict[str, List[int]] = {}
        self.caches: Dict[str, Tuple[float, float]] = {}
        self.tokens = 0

    def input(self, name: str, x: Tensor) -> None:
        self.inputs.setdefault(name, Seen()).take(x)

    def routed(self, name: str, counts: List[int]) -> None:
        before = self.experts.get(name, [0] * len(counts))
        self.experts[name] = [a + b for a, b in zip(before, counts)]

    def cached(self, name: str, keys: Tensor, values: Tensor) -> None:
        before = self.caches.get(name, (0.0, 0.0))
        self.caches[name] = max(before[0], keys.abs().max().item()), max(before[1], values.abs().max().item())

    def amaxes(self) -> Dict[str, float]:
        """The largest input of every module. Experts of a layer that do the same share one, also with
        those that saw no token.
        """
        found = {name: seen.amax for name, seen in self.inputs.items()}
        most: Dict[Tuple[str, str], float] = {}
        for name, amax in found.items():
            matched = _OF_EXPERT.fullmatch(name)
            if matched is not None and matched[1] in self.experts:
                of = matched[1], matched[3]
                most[of] = max(most.get(of, 0.0), amax)
        for (experts, last), amax in most.items():
            found.update({f"{experts}.{number}.{last}": amax for number in range(len(self.experts[experts]))})
        return found

    def tensors(self, percentile: float, named: Callable[[str], str]) -> Dict[str, Tensor]:
        """All of it as vectors of float32, by the names of a checkpoint."""
        made = {f"{named(name)}.input_amax": torch.tensor([amax]) for name, amax in self.amaxes().items()}
        for name, seen in self.inputs.items():
            if seen.squares is not None:
                made[f"{named(name)}.input_percentile"] = torch.tensor([seen.percentile(percentile)])
                made[f"{named(name)}.input_mean_square"] = (seen.squares / seen.rows).float()
        for name, counts in self.experts.items():
            made[f"{named(name)}.expert_tokens"] = torch.tensor(counts, dtype=torch.float32)
        for name, (keys, values) in self.caches.items():
            made[f"{named(name)}.k_scale"] = torch.tensor([keys]) / 448.0
            made[f"{named(name)}.v_scale"] = torch.tensor([values]) / 448.0
        return dict(sorted(made.items()))


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    path: Union[str, Path, None] = None,
    *,
    percentile: float = 99.9,
) -> Dict[str, Tensor]:
    """Runs batches through a model; see :func:`nvfp4.calibrate`."""
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile: expected a number from 0 to 100, got {percentile}")
    if path is not None and Path(path).suffix != ".safetensors":
        raise ValueError(f"{path}: expected a name that ends in .safetensors")
    found, watch = Collected(), _watch_of(model)
    hooks: List[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            take = lambda _, args, name=name: found.input(name, args[0])  # noqa: E731
            hooks.append(module.register_forward_pre_hook(take))
        elif watch is not None:
            hooks += watch.hooks(name, module, found)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                _run(model, batch, {} if watch is None else watch.given(found), found)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not found.tokens:
        raise ValueError("batches: expected at least one batch of tokens, got none")
    made = found.tensors(percentile, (lambda name: name) if watch is None else watch.named)
    if path is not None:
        _save(Path(path), made, {"version": 1, "tokens": found.tokens, "percentile": percentile})
    return made


def _watch_of(model: torch.nn.Module) -> Any:
    """What is known of the models of transformers."""
    if not hasattr(model, "base_model_prefix"):
        return None
    from .transformers._watch import Watch

    return Watch(model)


def _run(model: torch.nn.Module, batch: Any, more: Dict[str, Any], found: Collected) -> None:
    if isinstance(batch, Tensor):
        found.tokens += _tokens(batch)
        model(batch, **more)
    elif hasattr(batch, "keys"):
        first = batch["input_ids"] if "input_ids" in batch else next(iter(batch.values()))
        found.tokens += _tokens(first)
        model(**batch, **more)
    elif isinstance(batch, (tuple, list)) and batch:
        found.tokens += _tokens(batch[0])
        model(*batch, **more)
    else:
        raise TypeError(f"batches: expected tensors, dicts or tuples of arguments, got {type(batch).__name__}")


def _tokens(first: Tensor) -> int:
    """Tokens of an argument: numbers of tokens, or vectors."""
    return first.shape[:-1].numel() if first.is_floating_point() else first.numel()


def _save(path: Path, tensors: Dict[str, Tensor], about: Dict[str, Any]) -> None:
    """Writes a file of statistics, whole or not at all."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError("nvfp4.calibrate writes its file with safetensors: pip install safetensors") from None
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"nvfp4-calibration": json.dumps(about)})
    os.replace(part, path)
