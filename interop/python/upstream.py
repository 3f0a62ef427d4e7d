"""Runs TransformerEngine's own tests, unchanged, on ``nvfp4.te``, which stands in for the package:

    python interop/python/upstream.py --te CHECKOUT [--per-function N] [--seed S] [--file NAME ...]
                                      [--cpu] [--jobs N] [--limit SECONDS] [--json FILE]

CHECKOUT is a checkout of TransformerEngine. Nothing is built of it: its test files are run, and its
Python references (``tests/pytorch/references``, ``custom_recipes/reference_*.py``) are loaded. N
cases of each test function are drawn by the seed, which is printed. With ``--cpu`` everything that a
test puts on a GPU is put on the CPU instead. For each file one line says how many cases passed and
failed, how many TransformerEngine's own conditions skipped, and how many are left out here, with
reasons; what failed is listed below.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile

FILES = (
    "test_custom_recipe.py", "test_recipe.py", "test_identity_quantizer.py",
    "test_backward_override.py", "test_deferred_init.py", "test_checkpoint.py",
    "test_float8_current_scaling_exact.py", "test_float8_blockwise_scaling_exact.py",
    "test_mxfp8_2d_quantize.py", "nvfp4/test_nvfp4_gemm_exact.py",
    "nvfp4/test_nvfp4_module_exact.py", "nvfp4/test_nvfp4_quantize_exact.py",
    "nvfp4/test_nvfp4_rht_quantize_exact.py", "nvfp4/test_nvfp4_sr_quantize.py",
    "test_hybrid_quantization.py", "test_grouped_linear.py", "test_cuda_graphs.py",
    "test_torch_compile.py", "test_quantized_tensor.py",
    "nvfp4/test_nvfp4_2d_quantize_swizzle_fusion.py", "nvfp4/test_nvfp4_fsdp2_hooks.py",
    "nvfp4/test_nvfp4_group_quantize.py", "nvfp4/test_nvfp4_group_quantize_graph_safe.py",
    "nvfp4/test_nvfp4_rht_quantize_swizzle_fusion.py", "nvfp4/test_nvfp4_weight_swizzle_cache.py",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--te", type=pathlib.Path, required=True, help="a checkout of TransformerEngine"
    )
    parser.add_argument(
        "--per-function", type=int, default=4, help="cases of each test function; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=0, help="which cases")
    parser.add_argument(
        "--file", action="append", help="a file below tests/pytorch; may be given again"
    )
    parser.add_argument("--cpu", action="store_true", help="put on the CPU what tests put on a GPU")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a case")
    parser.add_argument(
        "--file-limit",
        type=int,
        help="seconds for a file; cases that did not begin are not counted",
    )
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--json", type=pathlib.Path, help="where to write every case")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    if not (asked.te / "tests/pytorch").is_dir():
        sys.exit(f"{asked.te}: there is no tests/pytorch; name a checkout of TransformerEngine")
    if asked.one:
        from upstream_file import run

        return run(asked)
    print(
        f"seed {asked.seed}, {asked.per_function or 'all'} cases of each function, on the {'CPU' if asked.cpu else 'GPU'}"
    )
    files = asked.file or FILES
    width = max(map(len, files))
    print(f"{'file':{width}}  passed  failed  skipped  left out")
    every, sums = {}, collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        for file, cases in zip(files, pool.map(lambda file: _cases(asked, file), files)):
            every[file] = cases
            count = collections.Counter(case["outcome"] for case in cases)
            sums.update(count)
            reasons = collections.Counter(
                case["why"] for case in cases if case["outcome"] == "left out"
            )
            _line(width, file, count, "; ".join(f"{why}: {n}" for why, n in reasons.most_common()))
    _line(width, "all", sums, "")
    for file, cases in every.items():
        for case in cases:
            if case["outcome"] == "failed":
                print(f"FAILED {file}::{case['name']}: {case['why']}")
    if asked.json:
        asked.json.write_text(json.dumps(every, indent=1))
    sys.exit(sums["failed"] > 0)


def _line(width: int, file: str, count: collections.Counter, reasons: str) -> None:
    counts = (
        f"{count['passed']:6}  {count['failed']:6}  {count['skipped']:7}  {count['left out']:8}"
    )
    print(f"{file:{width}}  {counts}  {reasons}", flush=True)


def _cases(asked: argparse.Namespace, file: str) -> list:
    """The cases of a file, which has a process of its own: what fails there stays there."""
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder, "cases.json")
        command = [
            sys.executable, __file__, "--te", str(asked.te), "--one", file, "--json", str(found),
            "--per-function", str(asked.per_function), "--seed", str(asked.seed),
            "--limit", str(asked.limit), "--only", asked.only, *(["--cpu"] if asked.cpu else []),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=asked.file_limit,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = None
        cases = json.loads(found.read_text()) if found.exists() else []
        if done is None:
            return [*cases, {"name": "(file)", "outcome": "left out", "why": "the time limit"}]
        if cases and done.returncode >= 0:
            return cases
        why = f"it ended with {done.returncode}: {(done.stderr or done.stdout)[-400:]}"
        return [*cases, {"name": "(file)", "outcome": "failed", "why": why}]


if __name__ == "__main__":
    main()
