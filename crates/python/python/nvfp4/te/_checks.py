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
            f"{path}: DelayedScaling recipe is not supported with save_original_input; leave out one"
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


def validate_grouped_quantizer_list(quantizers: Sequence[Any], operand_name: str) -> None:
    """Refuses experts of which some are in high precision."""
    if len({_plain(quantizer) for quantizer in quantizers}) > 1:
        raise ValueError(
            f"GroupedLinear {operand_name} quantizers mix Identity-backed and quantized ones: the "
            "experts of one layer are computed together, so give all of them one kind"
        )


def validate_experts(answers: Answers) -> None:
    """:func:`validate_grouped_quantizer_list` for each tensor that a factory was asked about."""
    slots: Dict[str, List[Any]] = {}
    for (_, expert), of in answers.items():
        for slot, answer in of.items() if expert is not None else ():
            slots.setdefault(slot, []).append(answer)
    for slot, quantizers in slots.items():
        validate_grouped_quantizer_list(quantizers, slot)
