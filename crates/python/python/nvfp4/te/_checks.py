"""What modules say about quantizers that do not go with their arguments, or with each other, in
TransformerEngine's words.
"""

from __future__ import annotations

import warnings
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ._float8 import Float8Quantizer
from ._hybrid import HybridQuantizer
from ._identity import IdentityQuantizer
from ._roles import DelayedScalingRequest
from ._values import ValueQuantizer
from .recipe import DelayedScaling

# What a factory answered, by path and expert, and then by slot.
Answers = Mapping[Tuple[str, Any], Dict[str, Any]]


def can_reconstruct_wgrad_input_from_original(quantizer: Any) -> bool:
    """Whether what the weight's gradient reads can be made again from the input."""
    if isinstance(quantizer, HybridQuantizer):
        if quantizer.columnwise_source == "original":
            return True
        quantizer = quantizer.rowwise_quantizer
    safe = getattr(quantizer, "is_requantization_safe", None)
    return safe is None or safe()


def refuse_original_input(path: str, asked: Any) -> None:
    """Refuses ``save_original_input`` with delayed scaling, whose scale is another one later."""
    if isinstance(asked, DelayedScaling):
        raise ValueError(
            f"{path}: DelayedScaling recipe is not supported with save_original_input; "
            "leave out one of them"
        )


def warn_of_original_input(path: str, asked: Any) -> None:
    """Warns if ``save_original_input`` does not go with the input's quantizer of a factory."""
    answers: Answers = getattr(asked, "_answers", None) or {}
    of = [slots["input"] for (at, _), slots in answers.items() if at == path and "input" in slots]
    if asked.backward_override is not None or not of:
        return
    if isinstance(of[0], (DelayedScalingRequest, Float8Quantizer)):
        warnings.warn(
            "save_original_input is incompatible with delayed-scaling quantizers "
            f"(Float8Quantizer). Disabling save_original_input for '{path}'.",
            stacklevel=6,
        )
    elif not can_reconstruct_wgrad_input_from_original(of[0]):
        warnings.warn(
            "Ignoring save_original_input=True because the input quantizer cannot safely "
            f"reconstruct the backward operand from the original input ({of[0]}) of '{path}'.",
            stacklevel=6,
        )


def _plain(quantizer: Any) -> Tuple[bool, bool]:
    """Whether each direction stays in high precision."""
    if isinstance(quantizer, HybridQuantizer):
        rows, columns = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
        return _plain(rows)[0], _plain(columns)[1]
    identity = isinstance(quantizer, IdentityQuantizer)
    return identity, identity


# What a quantizer is told from call to call.
_PER_CALL = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")


def _settings(quantizer: Any) -> Tuple[Any, ...]:
    """What quantizers of one product have in common in TransformerEngine."""
    if isinstance(quantizer, ValueQuantizer):
        return tuple(item for item in quantizer._settings() if item[0] not in _PER_CALL)
    known = isinstance(quantizer, (IdentityQuantizer, Float8Quantizer))
    return (("dtype", quantizer.dtype),) if known else ()


def _refuse_mixed(quantizers: Sequence[Any], operand_name: str) -> None:
    """Refuses experts of which some are in high precision."""
    if len({_plain(quantizer) for quantizer in quantizers}) > 1:
        raise ValueError(
            f"GroupedLinear {operand_name} quantizers mix Identity-backed and quantized ones: the "
            "experts of one layer are computed together, so give all of them one kind"
        )


def validate_grouped_quantizer_list(
    quantizers: Sequence[Any], *, operand_name: str = "operand"
) -> None:
    """Refuses experts' quantizers that TransformerEngine's grouped products do not take together.
    Modules here compute what each expert asks for, and refuse no more than ``_refuse_mixed``.
    """
    where = f"GroupedLinear {operand_name} quantizers"
    if len({quantizer is None for quantizer in quantizers}) > 1:
        raise ValueError(f"{where} mix None and concrete quantizers")
    if not quantizers or quantizers[0] is None:
        return
    if len({isinstance(quantizer, HybridQuantizer) for quantizer in quantizers}) > 1:
        raise ValueError(f"{where} mix HybridQuantizer and non-hybrid quantizers")
    _refuse_mixed(quantizers, operand_name)
    sides: Dict[str, Sequence[Any]] = {"plain": quantizers}
    if isinstance(quantizers[0], HybridQuantizer):
        if len({quantizer.columnwise_source for quantizer in quantizers}) > 1:
            raise ValueError(f"{where} have mixed columnwise source policies")
        sides = {
            side: [getattr(quantizer, f"{side}_quantizer") for quantizer in quantizers]
            for side in ("rowwise", "columnwise")
        }
    for side, each in sides.items():
        for what, of in (("families", type), ("configurations", _settings)):
            kinds = dict.fromkeys(map(of, each))
            if len(kinds) > 1:
                raise ValueError(f"{where} have incompatible {side} backend {what}: {list(kinds)}")


def validate_experts(answers: Answers) -> None:
    """Refuses tensors that a factory gave the experts in high precision and quantized."""
    slots: Dict[str, List[Any]] = {}
    for (_, expert), of in answers.items():
        for slot, answer in of.items() if expert is not None else ():
            slots.setdefault(slot, []).append(answer)
    for slot, quantizers in slots.items():
        _refuse_mixed(quantizers, slot)
