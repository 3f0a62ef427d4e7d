"""Work on a GPU, timed in turns. The benchmarks beside this file share it.

A cool chip gives other ratios than a warm one, and work that always follows hotter work runs at a
lower clock. So the chip is kept busy for a while, contenders take turns, and each round begins with
another one.
"""

import statistics
import time
from typing import Callable, Dict, List, Tuple

import torch

Work = Callable[[], object]


def captured(work: Work) -> Work:
    """The same work as a CUDA graph: no time of the host is in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def keep_busy(work: Work, seconds: float) -> None:
    """Repeats the work for so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()
        torch.cuda.synchronize()


def in_turns(works: Dict[str, Work], rounds: int) -> Dict[str, Tuple[float, float]]:
    """Median milliseconds of each work on the GPU, and of the host to queue it."""
    names = list(works)
    gpu: Dict[str, List[float]] = {name: [] for name in names}
    host: Dict[str, List[float]] = {name: [] for name in names}
    for round in range(rounds):
        first = round % len(names)
        for name in names[first:] + names[:first]:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            works[name]()  # what follows has the clock and the caches that it leaves
            marks[0].record()
            begin = time.perf_counter()
            works[name]()
            host[name].append(1e3 * (time.perf_counter() - begin))
            marks[1].record()
            marks[1].synchronize()
            gpu[name].append(marks[0].elapsed_time(marks[1]))
    return {name: (statistics.median(gpu[name]), statistics.median(host[name])) for name in names}


def machine() -> str:
    """The GPU, torch's version and the clock of now, where something can read it."""
    try:
        clock = f"{torch.cuda.clock_rate()} MHz at the end"
    except (AttributeError, ImportError, RuntimeError):
        clock = "clock unknown (`pip install nvidia-ml-py` to read it)"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {clock}"
