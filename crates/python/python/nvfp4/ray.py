"""Conversions in parts on a Ray cluster that runs already: ``nvfp4.ray.convert("IN", "OUT")``, or
``python -m nvfp4.ray convert IN OUT --parts 8`` with any options of ``nvfp4 convert`` after that.

A part is a task that runs ``nvfp4 convert --part``, and one more runs ``--finish``. All nodes must
see the same files under the same paths, and have this package. A part that fails, or whose node is
lost, is started again on another node, and continues.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ImportError("nvfp4.ray needs Ray: pip install 'nvfp4[ray]'") from error


class _Result(NamedTuple):
    code: int
    node: str
    text: str
    seconds: float


def _run(words: list[str], folder: str) -> tuple[int, str, str, float]:
    """Runs the command line on a node. An error is returned, and raised where it is understood."""
    start, node = time.monotonic(), ray.get_runtime_context().get_node_id()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        program, there = [sys.executable, "-m", "nvfp4", *words], os.path.isdir(folder)
        process = subprocess.Popen(program, stdout=said, stderr=said, cwd=folder if there else None)
        try:
            # A task that is cancelled hears of it between two statements, not while it waits.
            while process.poll() is None:
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        said.seek(0)
        return process.returncode, node, said.read()[-4000:], time.monotonic() - start


def _nodes() -> dict[str, float]:
    """The nodes that compute, and how many CPUs each has."""
    alive = (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    return {node["NodeID"]: node["Resources"]["CPU"] for node in alive}


def _all(
    jobs: dict[str, list[str]], cpus: int, retries: int, say: Callable[[str], None]
) -> _Result:
    """Runs commands, by their names, as tasks. Returns the result of the last one."""
    task, running, result = ray.remote(_run), {}, _Result(0, "", "", 0.0)
    tries, avoided = dict.fromkeys(jobs, 0), {name: set[str]() for name in jobs}

    def start(name: str) -> None:
        others = [node for node in _nodes() if node not in avoided[name]]
        strategy: Any = "SPREAD"
        if avoided[name] and others:
            strategy = NodeAffinitySchedulingStrategy(others[tries[name] % len(others)], soft=True)
        options = {"num_cpus": cpus, "scheduling_strategy": strategy, "max_retries": 0}
        running[task.options(**options).remote(jobs[name], os.getcwd())] = name

    try:
        for name in jobs:
            start(name)
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(ready)
            try:
                result = _Result(*ray.get(ready))
            except ray.exceptions.RayError as lost:
                result = _Result(3, "", f"its node or process was lost: {lost}", 0.0)
            tries[name] += 1
            if result.code in (0, 1):  # 1: the checks of the result found a problem
                done = f"{len(jobs) - len(running)}/{len(jobs)}"
                say(f"{done} {name} done in {result.seconds:.1f} s on node {result.node[:8]}")
                continue
            text = result.text.strip() or f"ended with {result.code}"
            if tries[name] > retries or result.code == 2:  # 2: the options are not understood
                raise RuntimeError(f"{name} failed {tries[name]} times: {text}")
            say(f"{name} starts again after try {tries[name]}: {text.splitlines()[-1]}")
            avoided[name].update({result.node} - {""})
            start(name)
    finally:
        for reference in running:
            ray.cancel(reference)
    return result


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *options: str,
    parts: int | None = None,
    cpus: int | None = None,
    retries: int = 3,
    report: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Converts a checkpoint in ``parts`` parts (default: one for each node) of ``cpus`` CPUs each
    (default: the smallest node's). ``options`` are those of ``nvfp4 convert``, ``report`` is its
    ``--report``. A part is tried ``retries`` more times. ``say`` gets lines about the progress. An
    exception, as Ctrl-C, cancels all tasks; the same call continues. Gives whether all is right."""
    if not ray.is_initialized():
        ray.init(address="auto")
    nodes = _nodes()
    cpus, most = cpus or max(1, int(min(nodes.values(), default=1))), max(nodes.values(), default=0)
    if most < 1:
        raise ValueError("the cluster has no node with a whole CPU, which a part needs")
    if cpus > most:  # Ray would wait for such a node, without end
        raise ValueError(f"cpus: expected at most {most:g}, as the largest node has, got {cpus}")
    parts = parts or len(nodes)
    words = ["convert", os.path.abspath(source), os.path.abspath(target), "-q", *options]
    if not any(option.split("=")[0] == "--threads" for option in options):
        words += ["--threads", str(cpus)]
    jobs = {f"part {i}/{parts}": [*words, "--part", f"{i}/{parts}"] for i in range(parts)}
    _all(jobs, cpus, retries, say)
    words += ["--finish"] if report is None else ["--finish", "--report", os.path.abspath(report)]
    end = _all({"finish": words}, cpus, retries, say)
    say(end.text)
    return end.code == 0


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m nvfp4.ray", description=__doc__)
    parser.add_argument("command", choices=["convert"])
    parser.add_argument("source", help="model folder or safetensors file, on every node")
    parser.add_argument("target", help="folder to write, on every node")
    parser.add_argument("--parts", type=int, help="number of parts [default: one for each node]")
    parser.add_argument("--cpus", type=int, help="CPUs of a part [default: the smallest node's]")
    parser.add_argument("--retries", type=int, default=3, help="further tries of a part")
    parser.add_argument("--report", help="FILE.html of nvfp4 convert --report")
    parser.add_argument("--address", default="auto", help="the cluster's [default: this machine's]")
    known, options = parser.parse_known_args(words)
    ray.init(address=known.address, log_to_driver=False)
    sizes = {"parts": known.parts, "cpus": known.cpus, "retries": known.retries}
    sys.exit(not convert(known.source, known.target, *options, report=known.report, **sizes))


if __name__ == "__main__":
    main()
