"""How long the host takes to give a layer's work to the device, beside ``torch.nn.Linear``.

Forward and backward of one linear layer, each timed until the call returns; the device is waited for in between. On a GPU
that is what Python, torch and this package need to queue the kernels: where it is longer than the kernels run, the GPU waits
for the host. On the CPU it has the arithmetic in it.

    python bench_host.py
    python bench_host.py --recipes nvfp4 mxfp8 --tokens 128 --width 4096
"""

import argparse
import statistics
import time

import torch

import nvfp4.torch

RECIPES = ["nvfp4", "mxfp8", "current_scaling", "delayed_scaling", "float8_block_scaling", "high_precision"]


def measure(layers, x, dy, rounds, wait):
    """Microseconds of each forward, each backward and each evaluation; the layers take turns."""
    times = {name: ([], [], []) for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            wait()
            begin = time.perf_counter()
            y = layer(x)
            middle = time.perf_counter()
            wait()
            again = time.perf_counter()
            y.backward(dy)
            end = time.perf_counter()
            wait()
            with torch.no_grad():
                start = time.perf_counter()
                layer(x)
                stop = time.perf_counter()
            for kept, seconds in zip(times[name], (middle - begin, end - again, stop - start)):
                kept.append(1e6 * seconds)
    return {name: [statistics.median(kept) for kept in of] for name, of in times.items()}


def main():
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE", help="presets, or rule files")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--tokens", type=int, default=4096 if gpu else 32)
    parser.add_argument("--width", type=int, default=1024 if gpu else 64)
    parser.add_argument("--no-bias", action="store_true")
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()

    settings = {"bias": not args.no_bias, "device": args.device, "dtype": torch.bfloat16 if gpu else torch.float32}
    layers = {"nn.Linear": torch.nn.Linear(args.width, args.width, **settings)}
    for name in args.recipes:
        recipe = nvfp4.Recipe.from_file(name) if name.endswith(".toml") else name
        layers[name] = nvfp4.torch.Linear(args.width, args.width, recipe=recipe, **settings)
    x = torch.randn(args.tokens, args.width, device=args.device, dtype=settings["dtype"]).requires_grad_()
    dy = torch.randn_like(x)
    wait = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    measure(layers, x, dy, 20, wait)
    medians = measure(layers, x, dy, args.rounds, wait)
    plain = sum(medians["nn.Linear"][:2])
    print(f"torch {torch.__version__}, {args.tokens} tokens, {args.width} × {args.width}, {args.device}: host µs, median of {args.rounds}")
    print(f"| {'layer':<22} | forward | backward | both | × nn.Linear | no_grad |\n|{'-' * 24}|---------|----------|------|-------------|---------|")
    for name, (forward, backward, evaluated) in medians.items():
        both = forward + backward
        print(f"| {name:<22} | {forward:7.0f} | {backward:8.0f} | {both:4.0f} | {both / plain:11.2f} | {evaluated:7.0f} |")


if __name__ == "__main__":
    main()
