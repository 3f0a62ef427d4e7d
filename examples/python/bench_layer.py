"""One linear layer beside ``torch.nn.Linear``: forward and backward, as Python calls them and as a CUDA graph; and one
token through a layer whose weight is there as codes, beside the product alone. On a CPU only the latter.

    python bench_layer.py
    python bench_layer.py --recipes nvfp4 mxfp8 --widths 2048 --tokens 8192
    python bench_layer.py --device cpu --frozen 4096
"""

import argparse
import statistics
import time

import torch
from turns import captured, in_turns, keep_busy, machine

import nvfp4.torch

RECIPES = ["nvfp4", "mxfp8", "current_scaling"]


def step(layer, x, dy):
    """Forward and backward."""

    def run():
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x).backward(dy)

    return run


def one_token(args):
    """One token through layers of codes, and through the operation that they call. Weights take turns, so that none is
    found in the cache.
    """
    width, count = args.frozen, 8
    settings = {"device": args.device, "dtype": torch.bfloat16}
    x = torch.randn(1, width, **settings)
    layers = []
    for _ in range(count):
        layer = torch.nn.Linear(width, width, bias=False, **settings)
        codes = nvfp4.torch.QuantizedTensor.quantize(layer.weight, "nvfp4", "row")
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layers.append(layer)
    kernel = torch.ops.nvfp4.linear_codes.default
    formats = "high-precision | nvfp4 | high-precision | precise precise precise | evaluated"

    def through_layers():
        for layer in layers:
            layer(x)

    def kernels():
        for layer in layers:
            kernel(x, layer.weight.row, layer.weight.codes.prepared, None, formats, width, None, [], "")

    with torch.no_grad():
        through_layers()
        if args.device == "cpu":
            times = on_cpu({"product": kernels, "layer": through_layers}, args.rounds)
        else:
            works = {"product, graph": captured(kernels), "layer, graph": captured(through_layers), "layer, eager": through_layers}
            keep_busy(works["product, graph"], 2)
            taken = in_turns(works, args.rounds)
            times = {name: max(gpu, host if "eager" in name else 0) for name, (gpu, host) in taken.items()}
    product = next(iter(times.values()))
    for name, each in times.items():
        print(f"one token through {width}² of codes, {name}: {1e3 * each / count:.1f} µs ({each / product:.2f} ×)")


def on_cpu(works, rounds):
    """Median milliseconds of each work, in turns."""
    times = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(of) for name, of in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="presets")
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--frozen", type=int, default=8192, metavar="WIDTH", help="width of the layer of codes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm", type=float, default=10, metavar="SECONDS")
    args = parser.parse_args()
    if args.device == "cpu":
        return one_token(args)
    settings = {"device": "cuda", "dtype": torch.bfloat16}

    print(f"| {args.tokens} tokens | width | eager µs | × nn.Linear | graph µs | × nn.Linear |\n|---|---|---|---|---|---|")
    for width in args.widths:
        layers = {"nn.Linear": torch.nn.Linear(width, width, **settings)}
        layers.update({name: nvfp4.torch.Linear(width, width, recipe=name, **settings) for name in args.recipes})
        x, dy = (torch.randn(args.tokens, width, **settings) for _ in range(2))
        works = {}
        for name, layer in layers.items():
            works[name] = step(layer, x.clone().requires_grad_(), dy)
            works[f"{name}, graph"] = captured(step(layer, x.clone().requires_grad_(), dy))
        keep_busy(works["nn.Linear"], args.warm)
        times = in_turns(works, args.rounds)
        for name in layers:
            eager, graph = (max(times[of]) for of in (name, f"{name}, graph"))
            plain = [max(times[of]) for of in ("nn.Linear", "nn.Linear, graph")]
            print(f"| {name} | {width} | {1e3 * eager:.0f} | {eager / plain[0]:.2f} | {1e3 * graph:.0f} | {graph / plain[1]:.2f} |")

    one_token(args)
    print(machine())


if __name__ == "__main__":
    main()
