"""What ``from_pretrained`` calls for an NVFP4 checkpoint."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from ..torch._stored import Stored
from ._config import METHOD, Config, register_configs
from ._experts import Experts, in_place
from ._files import Files, read
from ._layers import Coming, ComingTogether
from ._names import Names, converts, is_experts

_logger = logging.getLogger("nvfp4")
_EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


class Quantizer(HfQuantizer):
    """Loads a checkpoint with NVFP4 codes into a model of transformers.

    Before the weights are loaded, layers that the files have codes for expect those tensors, and
    experts become modules of linear layers (:class:`Experts`); after it, the tensors become codes.
    """

    requires_calibration = False
    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs: Any):
        # Weights are codes already, also where config.json does not say so.
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})
        self._layers: List[Coming] = []
        self._joined: List[ComingTogether] = []
        # The weights of experts that transformers must not put into one parameter.
        self._apart: Set[str] = set()

    def update_dtype(self, dtype: Any) -> Any:
        # That of the first tensor in a file may be the type of scales.
        return torch.bfloat16 if dtype in _EIGHT else dtype

    def get_new_dtype(self, converter, param, dtype):
        kind = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return None if kind.startswith(("F8", "torch.float8")) else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        files, names = read(checkpoint_files), Names(model)
        if not files.matrices and not files.joined:
            raise ValueError(f"{model.name_or_path}: no codes of NVFP4 in the checkpoint")
        activations = self.quantization_config.activations
        self._separate(model, files, names)
        for name, stored in files.joined.items():
            self._join(model, name, stored, names, activations)
        for experts in self._joined:
            alike = [one.last for one in self._joined if one.module is experts.module]
            if set(alike) != set(experts.module.lasts):
                raise ValueError(f"{experts.path}: codes of {', '.join(alike)} alone; of experts in one tensor all have codes or none")
        skipped = []
        for name, stored in files.matrices.items():
            found = self._layer(model, name, names)
            if found is None:
                names.check_absent(name)
                skipped.append(name)  # transformers says that it does not use it
                continue
            self._layers.append(Coming(*found, stored, activations))
        if not self._layers and not self._joined:
            raise ValueError(f"{type(model).__name__} has no layer for codes of {', '.join(skipped[:4])}: is this its checkpoint?")
        eight = [layer.path for layer in self._layers if layer.stored.form is None]
        if eight:
            _logger.warning(
                "nvfp4: %d layers of FP8 (%s …) are decoded to %s: FP8 has no layer here that is loaded",
                len(eight), eight[0], self._layers[0].dtype,
            )  # fmt: skip

    def update_parallel_plan(self, model, plan):
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError("transformers' parallelism would split weights, which codes do not follow: load it without")

    def _separate(self, model: torch.nn.Module, files: Files, names: Names) -> None:
        """Makes experts that have matrices of their own in the checkpoint separate modules."""
        numbered: Dict[str, Set[str]] = {}
        for name in files.names:
            expert = names.expert(name.rpartition(".")[0])
            if expert is not None:
                numbered.setdefault(expert.experts, set()).add(expert.last)
        coded = {expert.experts for name in files.matrices if (expert := names.expert(name)) is not None}
        for path, found in numbered.items() if coded else ():
            of = names.modules[path]
            lasts = next((lasts for lasts in names.lasts(path) if set(lasts) == found), None)
            if lasts is None or of.has_bias:
                what = "biases" if lasts else f"matrices {', '.join(sorted(found))}"
                raise ValueError(f"{path}: experts of {type(of).__name__} with {what} of their own are not known here")
            experts = Experts(of, path, lasts)
            for number in range(experts.num_experts):
                experts.add(number, bias=False)
                self._apart.update(f"{path}.{number}.{last}" for last in lasts)
            in_place(model, path, experts)

    def _join(self, model: Any, name: str, stored: Stored, names: Names, activations: str) -> None:
        """Makes experts in one tensor of codes."""
        module, _, last = name.rpartition(".")
        path = names.module(module)
        if path is None:
            return
        experts = model.get_submodule(path)
        if is_experts(experts):
            experts = Experts(experts, path, ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"])
            in_place(model, path, experts)
        if not isinstance(experts, Experts) or not experts.of.is_transposed or last not in experts.lasts:
            raise ValueError(f"{path}.{last}: experts of {type(experts).__name__} in one tensor of codes are not known here")
        self._joined.append(ComingTogether(experts, path, last, stored, activations))

    def _layer(self, model: Any, name: str, names: Names) -> Optional[Tuple[Any, str]]:
        """The layer that codes are for."""
        expert = names.expert(name)
        path = names.module(name) if expert is None else f"{expert.experts}.{expert.number}.{expert.last}"
        if path is None:
            return None
        if expert is not None and expert.number >= model.get_submodule(expert.experts).num_experts:
            raise ValueError(f"{path}: config.json says that there are fewer experts")
        module = model.get_submodule(path)
        if not isinstance(module, torch.nn.Linear) or type(module).forward is not torch.nn.Linear.forward:
            raise ValueError(f"{path}: codes for a {type(module).__name__}, which is no torch.nn.Linear")
        if path in model.all_tied_weights_keys or f"{path}.weight" in model.all_tied_weights_keys:
            raise ValueError(f"{path}: codes of a weight that config.json ties to another: set tie_word_embeddings to false there")
        converter = names.converter(path)
        if expert is None and converter is not None:
            raise ValueError(f"{path}: transformers makes {', '.join(converter.target_patterns)} of it, which codes cannot follow")
        return module, path

    def update_weight_conversions(self, weight_conversions, model):
        """Without those that put separate experts into one parameter."""
        def joins(entry: Any) -> bool:
            return isinstance(entry, WeightConverter) and any(converts(entry, path) for path in self._apart)

        return [entry for entry in weight_conversions if not joins(entry)]

    def _process_model_after_weight_loading(self, model, **kwargs):
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(f"device_map: codes do not go with offloading, here to {', '.join(sorted(places & {'cpu', 'disk'}))}")
        for coming in (*self._layers, *self._joined):
            coming.arrive()
        return model

    def _dequantize(self, model, dtype=None):
        raise NotImplementedError("a model of codes stays one; `nvfp4 dequant CHECKPOINT TARGET` writes its values")

    def is_serializable(self) -> bool:
        why = "experts in one tensor" if self._joined else ""
        why = why or ("a config.json that says nothing of it" if self.quantization_config.described is None else "")
        why = why or next(("FP8 that was decoded" for layer in self._layers if layer.stored.form is None), "")
        if why:
            _logger.warning("nvfp4: a model with %s is not saved; copy its checkpoint", why)
        return not why

    def get_state_dict_and_metadata(self, model) -> Tuple[Dict[str, Any], Dict[str, str]]:
        """The model in the form of its checkpoint."""
        state, names = model.state_dict(), {id(module): name for name, module in model.named_modules()}
        for layer in self._layers:
            path = names[id(layer.module)]
            state.pop(f"{path}.weight")
            state.pop(f"{path}.input_amax", None)
            state.update({f"{path}.{name}": tensor for name, tensor in layer.tensors().items()})
        return state, {}

    @property
    def is_trainable(self) -> bool:
        return True  # adapters are; codes stay

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` compiles the step of a token, where keys and values have a place of fixed
        size. How many tokens an expert has is known to the running program alone.
        """
        return not self._apart and not self._joined


def register() -> None:
    """Makes transformers know the quantizer and the configurations that lead to it."""
    register_configs()
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(METHOD)(Quantizer)
