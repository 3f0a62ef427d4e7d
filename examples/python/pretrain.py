"""Trains a model of Llama's shape on text files, in bf16 or by a recipe, on one device or many.

    python pretrain.py --text DIR --out model --recipe nvfp4
    torchrun --nproc-per-node 8 pretrain.py --text DIR --out model --recipe nvfp4 --tensor-parallel 2

Tokens are bytes. Every 64th file, or the end of the last, is held out for evaluation. OUT gets a
Hugging Face folder, a line per step in metrics.jsonl, a plot, and checkpoints, which `--resume`
takes up again, also with another number of workers. A batch depends on the seed and the step alone.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path

import llama
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from corpus import Text
from llama import Llama, Shape, save, split_over
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import nvfp4
import nvfp4.torch

LARGEST_SCALE = 0x7E
# Blocks are counted in one of so many tokens of a step. It has no divisor in common with a context,
# so that tokens at every place of a text are looked at.
STRIDE = 17
# What --compile compiles: without it each is several passes over memory.
BETWEEN = {"rotated": llama.rotated, "gated": llama.gated}


def parsed(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--text",
        nargs="+",
        required=True,
        type=Path,
        metavar="PATH",
        help="files, or folders of them",
    )
    add("--suffix", default="", help="which files of folders are read, as .py or .txt")
    add("--out", required=True, type=Path, metavar="FOLDER")
    add("--recipe", default="bf16", help="bf16, a preset, or a file with a recipe")
    for name, value in [
        ("layers", 8),
        ("width", 512),
        ("heads", 8),
        ("context", 512),
        ("batch", 32),
        ("steps", 1000),
    ]:
        add(f"--{name}", type=int, default=value)
    add("--kv-heads", type=int, help="as many as heads, if not given")
    add("--hidden", type=int, help="8/3 of the width in whole 64s, if not given")
    add("--rate", type=float, default=6e-4, help="the largest learning rate")
    add("--schedule", choices=["cosine", "constant"], default="cosine")
    add("--warmup", type=int, default=50, metavar="STEPS")
    add("--decay", type=float, default=0.1, help="AdamW's weight decay")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--tensor-parallel", type=int, default=1, metavar="WORKERS")
    add(
        "--sequence-parallel",
        action="store_true",
        help="workers of a tensor-parallel group have a part of the tokens each between layers",
    )
    add("--data-parallel", choices=["fsdp", "ddp"], default="fsdp")
    add(
        "--agree",
        action="store_true",
        help="scales are those of the whole batch, not of a worker's part",
    )
    add("--evaluate-every", type=int, default=100, metavar="STEPS")
    add("--evaluate-batches", type=int, default=4, metavar="BATCHES")
    add("--save-every", type=int, default=500, metavar="STEPS", help="0 keeps no checkpoints")
    add(
        "--blocks-every",
        type=int,
        default=1,
        metavar="STEPS",
        help="count saturated and lost blocks in one of so many steps",
    )
    add(
        "--compile",
        action="store_true",
        help="compile rotations and gates, which lie between products",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in OUT, if there is one",
    )
    args = parser.parse_args(argv)
    args.kv_heads = args.kv_heads or args.heads
    args.hidden = args.hidden or (args.width * 8 // 3 + 63) // 64 * 64
    if args.width % args.heads or args.heads % args.kv_heads:
        parser.error("--width must be a multiple of --heads, and --heads of --kv-heads")
    if args.kv_heads % args.tensor_parallel or args.hidden % args.tensor_parallel:
        parser.error("--kv-heads and --hidden must be multiples of --tensor-parallel")
    if args.sequence_parallel and args.tensor_parallel == 1:
        parser.error("--sequence-parallel needs --tensor-parallel")
    for name in ("evaluate_every", "evaluate_batches", "blocks_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if args.sequence_parallel and args.context % args.tensor_parallel:
        parser.error("--context must be a multiple of --tensor-parallel")
    return args, parser


class Workers:
    """The processes of a run: a mesh of data-parallel groups of tensor-parallel ones."""

    def __init__(self, args, parser):
        backend = "nccl" if args.device == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        if self.count % args.tensor_parallel:
            parser.error(
                f"{self.count} workers are no multiple of --tensor-parallel {args.tensor_parallel}"
            )
        self.device = torch.device(args.device)
        if args.device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        sizes = (self.count // args.tensor_parallel, args.tensor_parallel)
        mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("data", "tensor"))
        self.data, self.tensor = mesh["data"], mesh["tensor"]
        self.share = (self.data.get_local_rank(), self.data.size())
        if args.batch % self.share[1]:
            parser.error(
                f"--batch {args.batch} is no multiple of the {self.share[1]} workers that share it"
            )
        if args.data_parallel == "ddp" and args.tensor_parallel > 1:
            parser.error("--data-parallel ddp goes without --tensor-parallel")

    def mean(self, value: torch.Tensor) -> float:
        """The mean over the parts of a batch."""
        dist.all_reduce(value, dist.ReduceOp.SUM, self.data.get_group())
        return value.item() / self.share[1]


class Blocks:
    """Counts blocks of the inputs of NVFP4 layers, while it is open: those at the largest scale,
    and those whose numbers are lost because their scale is zero. It looks at one token of every
    `stride`, with the scale that all of this worker's tokens have.
    """

    def __init__(self, model, stride=1):
        self.layers = [m for m in model.modules() if isinstance(m, nvfp4.torch.Linear)]
        self.layers = [m for m in self.layers if m.formats.input.spec.startswith("nvfp4")]
        self.stride, self.counts = stride, 0

    def __enter__(self):
        self.hooks = [layer.register_forward_pre_hook(self._count) for layer in self.layers]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def _count(self, layer, inputs):
        x = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
        x, spec = x.detach().flatten(0, -2), layer.formats.input.spec
        amax = None if "row-scaled" in spec else x.abs().amax().float().reshape(1)
        x = x[:: self.stride].contiguous()
        scales = nvfp4.Quantizer(spec=spec, directions="row").quantize(x, amax=amax).scales
        largest = x.unflatten(-1, (-1, 16)).abs().amax(-1)
        zeros = (scales.view(largest.shape) == 0) & (largest > 0)
        saturated = (scales == LARGEST_SCALE).sum()
        blocks = torch.full_like(saturated, scales.numel())
        self.counts += torch.stack([blocks, saturated, zeros.sum()])

    def shares(self):
        """Saturated and lost blocks, as shares of all that workers have, or nothing without NVFP4."""
        if not self.layers:
            return {}
        dist.all_reduce(self.counts)
        blocks, saturated, lost = self.counts.tolist()
        return {"saturated": saturated / blocks, "lost": lost / blocks}


def by_mesh(parameters):
    """Parameters in groups that lie on the same workers: operations on lists take such a group."""
    groups = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def clip(groups, largest):
    """Scales gradients to a norm of at most `largest`. Returns the norm before."""
    norms = [
        nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups
    ]
    total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, largest, total)
    return total


def rate_at(step, args):
    rate = args.rate * min(1, (step + 1) / max(1, args.warmup))
    if args.schedule == "cosine":
        done = max(0, step - args.warmup) / max(1, args.steps - args.warmup)
        rate *= 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, done)))
    return rate


def checkpoints(folder):
    """Whole checkpoints, the oldest first. The file .metadata is written last."""
    found = (folder / "checkpoints").glob("step-*/.metadata")
    return sorted((path.parent for path in found), key=lambda path: int(path.name.split("-")[1]))


def plot(folder):
    """Draws losses, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, style in [("loss", {"linewidth": 0.8}), ("held_out", {"marker": "o"})]:
        points = [(line["tokens"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points), label=name.replace("_", " "), **style)
    axes.set(xlabel="tokens", ylabel="loss, nats per byte", title=lines[-1]["recipe"])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.svg")


def main(argv=None):
    args, parser = parsed(argv)
    workers = Workers(args, parser)
    text = Text(args, parser)
    device, first = workers.device, workers.rank == 0
    torch.manual_seed(args.seed)
    for name, function in BETWEEN.items():
        setattr(llama, name, torch.compile(function) if args.compile else function)
    shape = Shape(args.layers, args.width, args.hidden, args.heads, args.kv_heads, args.context)
    with device:
        model = Llama(shape)
    parameters = sum(p.numel() for p in model.parameters())
    if args.recipe != "bf16":
        recipe = nvfp4.Recipe.from_file(args.recipe) if Path(args.recipe).is_file() else args.recipe
        report = nvfp4.torch.convert_module(model, recipe, seed=args.seed)
        if first:
            print(report.line)
    if args.agree:
        nvfp4.torch.reduce_amaxes(model, workers.data.get_group())
    if args.tensor_parallel > 1:
        split_over(model, workers.tensor, args.sequence_parallel)
    run = model
    if workers.share[1] > 1 and args.data_parallel == "ddp":
        run = nn.parallel.DistributedDataParallel(model)
    elif workers.share[1] > 1:
        nvfp4.torch.gather_codes(model, workers.share[1])
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=workers.data)
    groups = by_mesh(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups],
        args.rate,
        (0.9, 0.95),
        weight_decay=args.decay,
        fused=args.device == "cuda",
    )

    args.out.mkdir(parents=True, exist_ok=True)
    begin, metrics = 0, args.out / "metrics.jsonl"
    if args.resume and checkpoints(args.out):
        folder = checkpoints(args.out)[-1]
        begin = load(folder, model, optimizer)
        if first:
            print(f"goes on after step {begin}, from {folder}")
    if first:
        lines = metrics.read_text().splitlines() if begin else []
        metrics.write_text(
            "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= begin)
        )
        size = f"{parameters / 1e6:.1f} M parameters, {len(text.training) / 1e6:.1f} MB of text"
        ranks = f"{workers.share[1]} × {args.tensor_parallel} workers on {args.device}"
        print(f"{size}, {ranks}, {args.recipe}")

    def loss_of(batch):
        with torch.autocast(args.device, torch.bfloat16):
            logits = run(batch[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    since, taken = time.perf_counter(), 0
    for step in range(begin + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step - 1, args)
        evaluates = step % args.evaluate_every == 0 or step == args.steps
        blocks = Blocks(model, STRIDE) if step % args.blocks_every == 0 else None
        with blocks or contextlib.nullcontext():
            loss = loss_of(text.step(step, workers.share, device))
        optimizer.zero_grad()
        loss.backward()
        norm = clip(groups, args.clip)
        optimizer.step()
        nvfp4.torch.update_scales(model)
        nvfp4.torch.agree_on_weights(model)
        line = {
            "step": step,
            "tokens": step * args.batch * args.context,
            "loss": workers.mean(loss.detach()),
        }
        taken += args.batch * args.context
        line |= {"norm": norm.item(), **(blocks.shares() if blocks else {})}
        line["tokens_a_second"] = taken / (time.perf_counter() - since)
        if evaluates:
            line |= evaluated(model, text, workers, loss_of)
        if first:
            with metrics.open("a") as file:
                file.write(json.dumps({**line, "recipe": args.recipe}) + "\n")
            print(said(line), flush=True)
        saves = args.save_every > 0 and (step % args.save_every == 0 or step == args.steps)
        if saves:
            keep(args.out, step, model, optimizer, first)
        if evaluates or saves:
            since, taken = time.perf_counter(), 0

    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=whole)
    if first:
        # Layers with delayed scaling have histories beside their weights.
        save(args.out, shape, {name: w for name, w in weights.items() if name.endswith(".weight")})
        plot(args.out)
        print(f"wrote {args.out}")
    dist.barrier()
    dist.destroy_process_group()


def evaluated(model, text, workers, loss_of):
    """The loss of the text that is held out."""
    model.eval()
    losses = torch.zeros((), device=workers.device)
    with torch.no_grad():
        for count, batch in enumerate(text.evaluation(workers.share, workers.device), 1):
            losses += loss_of(batch)
    model.train()
    return {"held_out": workers.mean(losses / count)}


def said(line):
    text = f"step {line['step']}: loss {line['loss']:.4f}, {line['tokens_a_second']:,.0f} tokens/s"
    if "held_out" in line:
        text += f", held out {line['held_out']:.4f}"
    if "saturated" in line:
        text += f", {line['saturated']:.2%} of blocks saturated, {line['lost']:.2%} lost"
    return text


def keep(folder, step, model, optimizer, first):
    """Writes a checkpoint, and drops all but the last two."""
    weights, states = state_dict.get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": step}
    dcp.save(state, checkpoint_id=folder / "checkpoints" / f"step-{step}")
    for old in checkpoints(folder)[:-2] if first else []:
        shutil.rmtree(old)


def load(folder, model, optimizer):
    """Takes up a checkpoint. Returns its step."""
    weights, states = state_dict.get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


if __name__ == "__main__":
    main()
