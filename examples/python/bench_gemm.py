"""How long products of FP8 take in nvfp4 and in torch, beside bf16.

Both multiply the same codes with the same scales: E4M3 with a scale per tensor, and in blocks,
1×128 by 128×128. Results are compared before anything is timed. Each contender is a CUDA graph of
several products, so the time of the host does not count. Contenders take turns, after the chip was
kept busy for a while: a cool chip gives other ratios.

torch is given the scales of blocks in the order that cuBLAS reads. nvfp4 takes them as they are
stored and brings them into that order in each product.

    python bench_gemm.py
    python bench_gemm.py --shapes 4096x4096x4096 --rounds 50
"""

import argparse
import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.nn import functional
from turns import Work, captured, in_turns, keep_busy, machine

import nvfp4

Shape = Tuple[int, int, int]
Multiply = Callable[[], torch.Tensor]

SHAPES = ["8192x8192x8192", "4096x8192x8192", "1024x8192x8192"]
BF16 = "bf16, torch"


class Contender(NamedTuple):
    multiply: Multiply
    # The product of torch that computes the same.
    beside: Optional[str] = None


def shape(text: str) -> Shape:
    m, n, k = (int(size) for size in text.split("x"))
    if min(m, n, k) <= 0 or n % 128 or k % 512:
        # cuBLAS takes rows of 128×128 scales in multiples of four.
        raise ValueError
    return m, n, k


def codes(q: nvfp4.QuantTensor) -> torch.Tensor:
    return q.codes.view(torch.float8_e4m3fn)


def per_tensor(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Dict[str, Contender]:
    """A scale per tensor; both ways of adding."""
    quantizer = nvfp4.Quantizer(spec="fp8")
    left, right = quantizer.quantize(a), quantizer.quantize(b)
    one, other = codes(left), codes(right).t()
    scales = left.scales.reshape(()), right.scales.reshape(())
    contenders = {}
    for accumulator, fast in (("split", False), ("fast", True)):
        theirs = functools.partial(
            torch._scaled_mm, one, other, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out
        )
        ours = functools.partial(nvfp4.matmul, left, right, dtype=torch.bfloat16, accumulator=accumulator)
        name = f"fp8, torch, use_fast_accum={fast}"
        contenders[name] = Contender(theirs)
        contenders[f"fp8, nvfp4, {accumulator}"] = Contender(ours, name)
    return contenders


def in_blocks(a: torch.Tensor, b: torch.Tensor) -> Dict[str, Contender]:
    """1×128 by 128×128; torch's only where this torch has it."""
    left = nvfp4.Quantizer(spec="fp8-block").quantize(a)
    right = nvfp4.Quantizer(spec="fp8-block(128x128)").quantize(b)
    ours = functools.partial(nvfp4.matmul, left, right, dtype=torch.bfloat16, accumulator="split")
    if not hasattr(functional, "scaled_mm"):
        return {"fp8-block, nvfp4, split": Contender(ours)}
    theirs = functools.partial(
        functional.scaled_mm,
        codes(left),
        codes(right).t(),
        # In memory the scales of all rows for the first 128 columns come first.
        scale_a=left.scales.t().contiguous().t(),
        scale_recipe_a=functional.ScalingType.BlockWise1x128,
        scale_b=right.scales.t(),
        scale_recipe_b=functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    name = "fp8-block, torch"
    return {name: Contender(theirs), "fp8-block, nvfp4, split": Contender(ours, name)}


def usable(contenders: Dict[str, Contender]) -> Dict[str, Contender]:
    """Those that this GPU and this torch compute; says which are left out."""
    here = {}
    for name, contender in contenders.items():
        try:
            contender.multiply()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            print(f"without {name}: {str(error).splitlines()[0]}")
        else:
            here[name] = contender
    return here


def check(contenders: Dict[str, Contender]) -> None:
    """Ours is torch's product but for the rounding of sums."""
    for name, (multiply, beside) in contenders.items():
        if beside in contenders:
            expected = contenders[beside].multiply().float()
            error = float((multiply().float() - expected).norm() / expected.norm())
            if not error < 0.01:
                raise SystemExit(f"{name} is not {beside}: they differ by {error:.3g} of the result")


def repeated(multiply: Multiply, times: int) -> Work:
    def work() -> None:
        for _ in range(times):
            multiply()

    return captured(work)


def measure(m: int, n: int, k: int, args: argparse.Namespace) -> List[str]:
    """The rows of a table."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    contenders = {BF16: Contender(functools.partial(torch.matmul, a, b.t(), out=out))}
    contenders.update(usable({**per_tensor(a, b, out), **in_blocks(a, b)}))
    check(contenders)
    works = {name: repeated(contender.multiply, args.calls) for name, contender in contenders.items()}
    keep_busy(works[BF16], args.warmup)
    times = {name: 1e3 * ms / args.calls for name, (ms, _) in in_turns(works, args.rounds).items()}
    rows = []
    for name, (_, beside) in contenders.items():
        of_torch = f"{times[name] / times[beside]:7.3f}" if beside in times else f"{'–':>7}"
        rows.append(f"| {name:<32} | {times[name]:8.1f} | {times[name] / times[BF16]:6.3f} | {of_torch} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", type=shape, default=[shape(text) for text in SHAPES], metavar="MxNxK")
    parser.add_argument("--calls", type=int, default=10, help="products of a graph")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds of load before a shape is timed")
    args = parser.parse_args()

    torch.manual_seed(0)
    for m, n, k in args.shapes:
        rows = measure(m, n, k, args)
        print(f"M = {m}, N = {n}, K = {k}: µs of a product; {machine()}")
        print(f"| {'product':<32} | {'µs':>8} | × bf16 | × torch |\n|{'-' * 34}|{'-' * 10}|--------|---------|")
        print("\n".join(rows) + "\n", flush=True)


if __name__ == "__main__":
    main()
