"""vLLM's own configuration parser, model classes and weight loaders, on a machine without a GPU.

vLLM is told that it has one GPU of Hopper's kind whose memory is the CPU's. So it chooses the methods of its CUDA build, which make
the parameters, and its loaders fill them. Nothing is computed: kernels are neither prepared nor called.
"""

import ctypes
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then takes Triton though no driver is there
# A driver that has the names that vLLM's libraries ask for, and does nothing; `interop/servers/run` makes it.
ctypes.CDLL(pathlib.Path(sys.prefix, "libcuda.so.1"), ctypes.RTLD_GLOBAL)

import torch
import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class Pretended(CudaPlatformBase):
    """A Hopper GPU whose memory is the CPU's."""

    device_type = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "none"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 << 30

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 132

    @classmethod
    def is_pin_memory_available(cls):
        return False


vllm.platforms._current_platform = Pretended()

from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

# Not a number in every type of float; no scale and no weight has it.
SENTINEL = 0xFF
# vLLM gives these a value of its own, and a checkpoint need not have them.
OPTIONAL = (".q_scale", ".k_scale", ".v_scale", ".prob_scale", "_zero_point")


class Stream:
    """A queue of a GPU that is not there."""

    def __init__(self, *args, **kwargs):
        pass


def begin():
    """One process is all there is; classes are looked at in it, not in another one that would see no GPU."""
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    torch.cuda.Stream = Stream
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")


def load(folder):
    """The parameters of vLLM's model after its loader read a checkpoint. What it did not fill has the sentinel's bytes."""
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    config = args.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        destroy_model_parallel()  # experts have a group of their own
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(config)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            if not name.endswith(OPTIONAL):
                bytes_of(parameter).fill_(SENTINEL)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    loaded = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, module in model.named_modules():
        if hasattr(module, "logical_widths") and f"{name}.weight" in loaded:
            loaded[f"{name}.weight"].joined = module.logical_widths  # rows of each matrix that was joined into it
    return loaded


def bytes_of(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def unfilled(tensor):
    """Whether something of a parameter still has the sentinel's bytes. Codes may have them by themselves, but not all of them."""
    same = bytes_of(tensor) == SENTINEL
    if tensor.element_size() == 1:
        return bool(same.all())
    return bool(same.view(-1, tensor.element_size()).all(-1).any())
