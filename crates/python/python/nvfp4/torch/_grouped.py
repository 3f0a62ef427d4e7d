"""Several linear layers, one per expert."""

from __future__ import annotations

from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

import nvfp4

from ._coded import autocast
from ._experts import Call, routed_linear
from ._formats import Formats, formats_of
from ._function import shaped
from ._inputs import check_input, fits
from ._layer import Layer
from ._norm import _parameter, _reset
from ._parameters import as_asked
from ._quantized import coded as coded_of
from ._routes import Passage
from ._together import Call as Together
from ._together import can_be_together, linear_together


class GroupedLinear(Layer):
    """One linear layer per expert, each on its own tokens.

    Parameters are ``weight0``, ``bias0``, ``weight1``, …
    """

    weight0: Tensor

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        recipe: Union[str, nvfp4.Recipe] = "nvfp4",
        path: str = "experts",
    ):
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for expert in range(num_gemms):
            setattr(self, f"weight{expert}", _parameter(out_features, in_features, device=device, dtype=dtype))
            of_expert = _parameter(out_features, device=device, dtype=dtype) if bias else None
            self.register_parameter(f"bias{expert}", of_expert)
        self.path = path
        self.reset_parameters()
        self.use_recipe(recipe)
        as_asked(self)

    def reset_parameters(self) -> None:
        """Initializes the parameters again."""
        for expert in range(self.num_gemms):
            _reset(getattr(self, f"weight{expert}"), getattr(self, f"bias{expert}"))

    @classmethod
    def sites_of(cls, layer: torch.nn.Module, path: str) -> List[Tuple]:
        return [(path, "grouped", layer.num_gemms)]

    def products(self) -> List[Tuple[str, str, Formats]]:
        return [(f"expert{expert}_", f"{self.path}:{{}}[{expert}]", of) for expert, of in enumerate(self.formats)]

    def follow_plan(self, plan: nvfp4.Plan) -> None:
        self.formats = [formats_of(plan, self.path, expert) for expert in range(self.num_gemms)]

    def weights(self) -> List[str]:
        return [f"weight{expert}" for expert in range(self.num_gemms)]

    def forward(self, input: Tensor, m_splits: Union[List[int], Tensor, Passage]) -> Tensor:
        """``m_splits`` has the number of tokens of each expert; tokens are sorted by expert. A tensor
        of them on a GPU is waited for. Where workers have some experts each, it is the way of tokens
        to them or back: ``dispatch`` or ``combine`` of :class:`Routes`.
        """
        if not fits(input, self.weight0):
            quantizes = any(formats.quantizes for formats in self.formats)
            check_input(input, self.weight0, self.path + ":{}", quantizes)
        spread = hasattr(self.weight0, "device_mesh")  # a DTensor, which not every torch has
        if isinstance(m_splits, Passage) and spread:
            raise ValueError(
                f"{self.path}: workers have some experts each, or a part of every expert, not both: "
                "give numbers of tokens, or leave it out of parallelize_module"
            )
        x = input.reshape(-1, self.in_features)
        if isinstance(m_splits, Passage):
            m_splits.checked(x, self.num_gemms, self.path)
            return self._routed(x, m_splits)
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(splits) != self.num_gemms or sum(splits) != x.shape[0] or min(splits) < 0:
            raise ValueError(
                f"{self.path}:m_splits: expected {self.num_gemms} numbers of tokens "
                f"that add up to {x.shape[0]}, got {splits}"
            )
        if spread:
            from ._spread import spread_experts

            return spread_experts(self, input, splits)
        return shaped(self._experts(x, splits), (*input.shape[:-1], self.out_features))

    def _experts(self, x: Tensor, splits: List[int]) -> Tensor:
        if x.is_cuda:
            x = autocast(x)
            weights = [getattr(self, name) for name in self.weights()]
            formats = None if self._workers or self._parallel else self.formats_by_codes(weights)
            if formats is not None and can_be_together(x, weights, formats):
                mains = [self.main_of(weight) for weight in weights]
                biases = [self._bias(expert) for expert in range(self.num_gemms)]
                call = Together(formats[0], splits, self.seed, self._kept, mains)
                return linear_together(x, weights, biases, call)
        parts = torch.split(x, splits)
        return torch.cat([self._expert(expert, tokens) for expert, tokens in enumerate(parts)])

    def _routed(self, x: Tensor, passage: Passage) -> Tensor:
        """The products of experts that workers have some of each."""
        x = autocast(x)
        each = range(self.num_gemms)
        weights = [getattr(self, f"weight{expert}") for expert in each]
        formats = self.formats_by_codes(weights)
        if formats is None:
            here = passage.routes.here
            if passage.way == "dispatch":
                return self._experts(passage(x), here)
            return passage(self._experts(x, here))
        workers = self._workers if self.training else None
        mains = [self.main_of(weight) for weight in weights]
        watches = [self.watch_of(expert, x.device) for expert in each]
        data = () if workers is None else (workers.group,)
        call = Call(passage, formats, self.seed, watches, data, mains)
        return routed_linear(x, weights, [self._bias(expert) for expert in each], call)

    def formats_by_codes(self, weights: List[Tensor]) -> Optional[List[Formats]]:
        """The formats in which tokens travel as codes; None if they travel as they are."""
        found = []
        for formats, weight in zip(self.formats, weights):
            coded = coded_of(weight)
            if coded is not None:
                formats = formats.for_codes(coded.spec)
            whole = coded is None or "column" in coded.multiplied
            if not formats.trained or not whole or any(format.delayed for format in formats.tensors):
                return None
            found.append(formats)
        return found

    def _bias(self, expert: int) -> Optional[Tensor]:
        return getattr(self, f"bias{expert}")

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        return self.product(tokens, getattr(self, f"weight{expert}"), self._bias(expert), expert)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias0 is not None}, {self.formats[0]}"
        )
