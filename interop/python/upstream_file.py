"""One file of TransformerEngine's tests, in this process; ``upstream.py`` calls it."""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings

import pytest

import nvfp4.te
from nvfp4.te.standin import _hook

# These stay TransformerEngine's, and are loaded from the checkout.
REFERENCES = ("reference_utils", "reference_nvfp4", "reference_current_scaling")

# Where test_checkpoint.py looks for checkpoints.
CHECKPOINTS = "NVTE_TEST_CHECKPOINT_ARTIFACT_PATH"

# Why something is left out, by its name or by the message that it gave; the first that fits.
REASONS = (
    (r"\.debug\b|TEDebugState|nvdlfw", "debug tools"),
    (r"[Uu]serbuffers|\bub_|initialize_ub", "user buffers"),
    (r"pytorch\.ops\b", "fusible operations (te.ops)"),
    (r"fused_attn|FusedAttn|cudnn|_attention_backends|get_attention_backend|dot_product_attention\.(utils|backends)", "cuDNN's and flash attention's internals"),
    (r"cpu_offload|get_cpu_offload|Offload", "offloading to the CPU"),
    (r"onnx|export", "ONNX"),
    (r"swizzle", "scales in the layout of Blackwell's instructions"),
    (r"(^|\.)_\w|private", "a private name of TransformerEngine's"),
    (r"needs a GPU|captures CUDA graphs", "needs a GPU"),
    (r"is not supported here|stands in", "an argument that is refused, with its name"),
    (r"ran past", "the time limit"),
    (r"has no|pytorch\.|transformer_engine", "a name that is not there"),
)  # fmt: skip


# The same for errors of tests that look into TransformerEngine's own objects.
INSIDE = (
    (r"tensor_objects|not expose required", "what TransformerEngine's autograd functions save"),
    (r"Found no NVIDIA driver|CUDA_HOME|torch sees no GPU|'cpu' == 'cuda'|is_cuda", "needs a GPU"),
    (r"DID NOT RAISE (<class ')?NotImplementedError", "what TransformerEngine refuses and this package computes"),
    (r"a product reads one format", "two formats in one product, which are refused"),
    (r"StopAfterFlagCapture", "a private name of TransformerEngine's"),
    (r"opaque type", "quantizers as constants of compiled graphs"),
    (r"has no attribute '_(?!_)", "a private name of TransformerEngine's"),
)


def reason(text: str) -> str:
    return next((why for pattern, why in REASONS if re.search(pattern, text)), text[:80])


class LeftOut(Exception):
    """What a test needs is not there."""


# The names that are not there and that the running test used.
touched: list = []


class _Nothing(type):
    """The class of what is not there. A file may import and name it; a test that uses it is left
    out.
    """

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        touched.append(cls.__name__)
        return nothing(cls.__name__, name)

    def __call__(cls, *args, **kwargs):
        touched.append(cls.__name__)
        if len(args) == 1 and callable(args[0]) and not kwargs:  # it decorates
            return args[0]
        raise LeftOut(cls.__name__)

    def __instancecheck__(cls, value):
        touched.append(cls.__name__)
        return False

    def __getitem__(cls, key):
        return nothing(cls.__name__, str(key))

    def __setitem__(cls, key, value):
        touched.append(cls.__name__)
        raise LeftOut(cls.__name__)

    def _compared(cls, other):
        touched.append(cls.__name__)
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __iter__(cls):
        touched.append(cls.__name__)
        return iter(())

    def __or__(cls, other):  # in a type
        return cls

    __ror__ = __or__


def nothing(module: str, name: str):
    if module.endswith(".custom_recipes") and name in REFERENCES:
        return importlib.import_module(f"{module}.{name}")
    return _Nothing(f"{module}.{name}", (), {})


class References(importlib.machinery.PathFinder):
    """Finds TransformerEngine's Python references in the checkout."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):  # type: ignore[override]
        module = name.removeprefix("transformer_engine.pytorch.custom_recipes.")
        if module == name or module not in REFERENCES:
            return None
        return importlib.util.spec_from_file_location(name, self.folder / f"{module}.py")


class Cases:
    """A plugin that draws cases and notes what becomes of them."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.found = asked, {}

    def pytest_collection_modifyitems(self, items):
        if not self.asked.per_function:
            return
        functions = collections.defaultdict(list)
        for item in items:
            functions[item.nodeid.split("[")[0]].append(item)
        drawn = set()
        for name, cases in functions.items():
            draw = random.Random(f"{self.asked.seed} {name}")
            drawn.update(draw.sample(cases, min(self.asked.per_function, len(cases))))
        items[:] = [item for item in items if item in drawn]

    def pytest_runtest_setup(self, item):
        # Checkpoints that no release of TransformerEngine is there to make are made here.
        save = getattr(item.cls, "_save_checkpoint", None)
        if save is not None and self.asked.folder is not None:
            save(item.callspec.params["name"], self.asked.folder)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        touched.clear()

        def stop(*_):
            raise LeftOut(f"ran past {self.asked.limit} seconds")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(self.asked.limit)
        yield
        signal.alarm(0)
        self.save()

    def pytest_exception_interact(self, node, call, report):
        if isinstance(node, pytest.Item):
            return
        self.found[node.nodeid] = self._failed(call.excinfo)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        before = self.found.get(item.nodeid, ("passed", "", ""))
        if report.passed or before[0] != "passed":
            self.found.setdefault(item.nodeid, before)
        elif report.skipped:
            why = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else "an expected failure"
            )
            self.found[item.nodeid] = ("skipped", why, "")
        else:
            self.found[item.nodeid] = self._failed(call.excinfo)

    def _failed(self, excinfo):
        text = _last_line(excinfo)
        if isinstance(excinfo.value, LeftOut) or "is not supported here" in text:
            return "left out", reason(text), text
        if isinstance(excinfo.value, NotImplementedError) and "nvfp4" in str(
            excinfo.traceback[-1].path
        ):
            return "left out", "an argument that is refused, with its name", text
        if touched:
            return "left out", reason(touched[-1]), touched[-1]
        for pattern, why in INSIDE:
            # On a GPU such an error is a failure.
            if re.search(pattern, text) and (self.asked.cpu or why != "needs a GPU"):
                return "left out", why, text
        return "failed", text, ""

    def save(self):
        cases = [
            {"name": name.split("::", 1)[-1], "outcome": outcome, "why": why, "detail": detail}
            for name, (outcome, why, detail) in self.found.items()
        ]
        self.asked.json.write_text(json.dumps(cases))


def _last_line(excinfo) -> str:
    where = excinfo.traceback[-1]
    lines = str(excinfo.value).strip().splitlines() or [""]
    return f"{excinfo.typename}: {' '.join(lines[:9])[:500]} ({where.path}:{where.lineno + 1})"


def run(asked: argparse.Namespace) -> None:
    if asked.cpu:
        import upstream_cpu

        upstream_cpu.install(asked.te)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nvfp4.te.install()
    _hook.on_missing = nothing
    folder = asked.te.resolve() / "transformer_engine/pytorch/custom_recipes"
    sys.meta_path.insert(0, References(folder))
    tests = asked.te.resolve() / "tests/pytorch"
    sys.path.insert(1, str(tests))
    asked.folder = None
    if CHECKPOINTS not in os.environ:
        asked.folder = pathlib.Path(tempfile.mkdtemp())
        os.environ[CHECKPOINTS] = str(asked.folder)
    plugin = Cases(asked)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tests), "-k", asked.only]
    code = pytest.main([*options, str(tests / asked.one)], plugins=[plugin])
    plugin.save()
    if asked.folder is not None:
        shutil.rmtree(asked.folder)
    sys.exit(int(code))
