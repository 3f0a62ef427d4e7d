"""CUDA graphs on the CPU, for tests: a capture notes torch's operations, and a replay repeats each
into the memory that it had filled. What waits for a GPU is an error in a capture, as it is there.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nvfp4
from nvfp4.torch import _kept

_aten = torch.ops.aten
_WAITS = (
    _aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.unique_consecutive,
    _aten._unique2, _aten.is_nonzero, _aten.item, _aten.equal,
)  # fmt: skip


class Graph:
    """What ``torch.cuda.CUDAGraph`` is on a GPU."""

    def __init__(self, *_, **__):
        self.calls = []

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, made in self.calls:
            for memory, value in zip(made, tree_leaves(function(*args, **kwargs))):
                if isinstance(value, torch.Tensor) and not _same(memory, value):
                    memory.copy_(value)

    def reset(self):
        self.calls = []

    def register_generator_state(self, state):
        pass


def _same(one, other) -> bool:
    """Whether two tensors lie in one memory: then a replay has filled it."""
    return one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata


class _Noting(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in _WAITS:
            raise RuntimeError(f"{function}: a capture cannot wait for the GPU")
        made = function(*args, **(kwargs or {}))
        self.graph.calls.append((function, args, kwargs or {}, tree_leaves(made)))
        return made


class _Capture:
    under_way = False


def _decoding(graph):
    """``nvfp4.QuantTensor`` while a graph is captured: decoding is no operation of torch."""
    real = nvfp4.QuantTensor

    class Parts:
        def __init__(self, *args, **kwargs):
            self.args, self.kwargs = args, kwargs

        def __getattr__(self, name):
            return getattr(real.from_parts(*self.args, **self.kwargs), name)

        from_parts = classmethod(lambda cls, *args, **kwargs: cls(*args, **kwargs))

        def dequantize(self, *args, **kwargs):
            def decode():
                return real.from_parts(*self.args, **self.kwargs).dequantize(*args, **kwargs)

            made = decode()
            graph.calls.append((decode, (), {}, [made]))
            return made

    return Parts


@contextlib.contextmanager
def graph(graph, pool=None, stream=None, capture_error_mode="global"):
    """What ``torch.cuda.graph`` is on a GPU."""
    if _Capture.under_way:
        raise RuntimeError("a capture is under way")
    graph.calls = []
    _Capture.under_way, real = True, nvfp4.QuantTensor
    nvfp4.QuantTensor = _decoding(graph)
    try:
        with _Noting(graph):
            yield
    finally:
        _Capture.under_way, nvfp4.QuantTensor = False, real


class Quiet:
    """Streams and events, which do nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def install(put=setattr) -> None:
    """Puts graphs of the CPU in the place of ``torch.cuda``'s; ``put`` is as ``setattr``."""
    names = {
        "CUDAGraph": Graph, "graph": graph, "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: _Capture.under_way,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Stream": Quiet, "Event": Quiet, "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Quiet(),
        "default_stream": lambda device=None: Quiet(),
    }  # fmt: skip
    for name, value in names.items():
        put(torch.cuda, name, value)
    put(_kept, "captured", lambda tensor: _Capture.under_way)
