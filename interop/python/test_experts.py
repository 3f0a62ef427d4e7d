"""Experts that workers have some of each: two and four processes, over gloo, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch._composed import quantized
from nvfp4.torch._experts import Call, quantize_tokens
from nvfp4.torch._finite import Watch
from nvfp4.torch._routes import Padding
from workers import NEAREST, Counted, case, close, documented, evaluated, run

ROWS = nvfp4.Recipe.from_toml(
    '[[rule]]\nslot = "input"\nspec = "nvfp4(row-scaled, hadamard)"\n[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"'
)
EXPERTS, WIDE, HIDDEN = 4, 64, 96


class Layers:
    """Two layers of experts: all of them, or those of one worker."""

    def __init__(self, recipe, number=1, rank=0, kind=nvfp4.torch.GroupedLinear):
        of_te = {} if kind is te.GroupedLinear else {"recipe": recipe}
        torch.manual_seed(0)
        whole = [kind(EXPERTS, *sizes, **of_te) for sizes in ((WIDE, HIDDEN), (HIDDEN, WIDE))]
        self.experts = range(rank * EXPERTS // number, (rank + 1) * EXPERTS // number)
        self.layers = [kind(len(self.experts), *sizes, **of_te) for sizes in ((WIDE, HIDDEN), (HIDDEN, WIDE))]
        with torch.no_grad():
            for layer, all_of in zip(self.layers, whole):
                for at, expert in enumerate(self.experts):
                    getattr(layer, f"weight{at}").copy_(getattr(all_of, f"weight{expert}") * (1 + expert))
                    getattr(layer, f"bias{at}").copy_(getattr(all_of, f"bias{expert}"))

    def __call__(self, x, ways, recipe=None):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return self.layers[1](gelu(self.layers[0](x, ways[0])), ways[1])

    def gradients(self):
        """By the number of the expert among all."""
        return {
            (number, name, expert): getattr(layer, f"{name}{at}").grad
            for number, layer in enumerate(self.layers)
            for at, expert in enumerate(self.experts)
            for name in ("weight", "bias")
        }


def splits_of(number, step):
    """Tokens of each worker for each expert: one worker has none for some, one expert gets none."""
    torch.manual_seed(3)
    splits = torch.randint(1, 4, (number, EXPERTS)) * step
    splits[:, 2] = 0
    splits[0, 1] = 0
    return splits


class Batch:
    """A batch of all workers, sorted by expert, and where each worker's tokens are in it."""

    def __init__(self, splits):
        number = len(splits)
        torch.manual_seed(7)
        tokens = int(splits.sum())
        # The largest tokens are one worker's alone.
        self.x = torch.randn(tokens, WIDE) * torch.linspace(0.1, 3, tokens)[:, None]
        self.dy = torch.randn(tokens, WIDE) * torch.linspace(2, 0.2, tokens)[:, None]
        self.splits = splits.sum(0).tolist()
        of_worker = torch.arange(number).repeat(EXPERTS).repeat_interleave(splits.t().flatten())
        self.at = [(of_worker == rank).nonzero()[:, 0] for rank in range(number)]


def one_process(recipe, batch, kind=nvfp4.torch.GroupedLinear):
    alone = Layers(recipe, kind=kind)
    x = batch.x.clone().requires_grad_()
    y = alone(x, (batch.splits, batch.splits), recipe if kind is te.GroupedLinear else None)
    y.backward(batch.dy)
    return y, x.grad, alone.gradients()


def compare(rank, number, recipe, splits, kind=nvfp4.torch.GroupedLinear):
    """Results of all, and of workers: y, dx, and gradients of this worker's experts."""
    batch = Batch(splits)
    y, dx, gradients = one_process(recipe, batch, kind)
    mine = batch.at[rank]
    routes = nvfp4.torch.Routes(splits[rank].tolist())
    layers = Layers(recipe, number, rank, kind)
    x = batch.x[mine].clone().requires_grad_()
    found = layers(x, (routes.dispatch, routes.combine), recipe if kind is te.GroupedLinear else None)
    found.backward(batch.dy[mine])
    ours = layers.gradients()
    return (found, y[mine]), (x.grad, dx[mine]), {key: (of, gradients[key]) for key, of in ours.items()}


def equals(rank, number):
    """Every code is that of one process, and NVFP4's sums do not depend on an order."""
    for kind in (nvfp4.torch.GroupedLinear, te.GroupedLinear):
        for recipe in (NEAREST, ROWS, "nvfp4_4over6", "current_scaling", "mxfp8", "float8_block_scaling", "high_precision"):
            if kind is te.GroupedLinear and recipe not in (NEAREST, "mxfp8"):
                continue
            step = 128 if recipe == "float8_block_scaling" else 32
            y, dx, gradients = compare(rank, number, recipe, splits_of(number, step), kind)
            exact = recipe in (NEAREST, ROWS)
            if recipe == "nvfp4_4over6":  # gradients are rounded stochastically
                assert torch.equal(*y) and torch.isfinite(dx[0]).all()
                continue
            for name, (found, expected) in {"y": y, "dx": dx, **gradients}.items():
                close(found, expected)
                assert not exact or "bias" in name or torch.equal(found, expected), (recipe, name)


def odd(rank, number):
    """Where a worker's tokens are no whole blocks, rows have the same codes all the same."""
    splits = splits_of(number, 1) * torch.tensor([7, 5, 1, 3])
    for recipe in (NEAREST, ROWS, "mxfp8"):
        y, dx, gradients = compare(rank, number, recipe, splits)
        for found, expected in (y, dx):
            close(found, expected)
            assert recipe == "mxfp8" or torch.equal(found, expected)
        for key, (found, expected) in gradients.items():
            # Blocks along the tokens are others.
            assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.98 or expected.norm() == 0, key
    with torch.no_grad():
        batch, routes = Batch(splits), nvfp4.torch.Routes(splits[rank])
        whole = Layers(NEAREST)(batch.x, (batch.splits, batch.splits))
        found = Layers(NEAREST, number, rank)(batch.x[batch.at[rank]], (routes.dispatch, routes.combine))
        assert torch.equal(found, whole[batch.at[rank]])


def codes(rank, number):
    """What arrives at an expert is the codes of all of its tokens, code for code."""
    splits = splits_of(number, 32)
    batch, routes = Batch(splits), nvfp4.torch.Routes(splits[rank])
    for recipe in (NEAREST, ROWS, "current_scaling", "mxfp8"):
        layer = Layers(recipe, number, rank).layers[0]
        watches = [Watch()] * len(layer.formats)
        call = Call(routes.dispatch, layer.formats, 0, watches, (), [])
        padding = Padding.of(routes, 32, batch.x.device)
        formats = [of.input for of in layer.formats]
        tokens = quantize_tokens(batch.x[batch.at[rank]], "input", formats, call, None, padding, 32)
        row, column = tokens.taken(["row", "column"], padding, routes.dispatch)
        parts = batch.x.split(batch.splits)
        for at, expert in enumerate(Layers(recipe, number, rank).experts):
            expected = quantized(parts[expert].contiguous(), formats[at])
            arrived = [*row[at], *column[at]]
            assert len(arrived) == len(expected), recipe
            assert all(torch.equal(a, b) for a, b in zip(arrived, expected)), (recipe, expert)


# What docs/scale.md says of tokens that travel: a recipe for each row of the table.
TRAVELLING = {
    "bfloat16": "high_precision",
    "FP8, one scale": "current_scaling",
    "MXFP8": "mxfp8",
    "NVFP4": NEAREST,
    "NVFP4, x row-scaled": ROWS,
}


def travels(rank, number):
    """Bytes that go to experts: of x and dy in each direction that is read there."""
    splits, table = splits_of(number, 32), documented("Expert parallelism")
    batch, routes = Batch(splits), nvfp4.torch.Routes(splits[rank])
    tokens, arrived = int(splits[rank].sum()), sum(routes.here)
    assert table.keys() == TRAVELLING.keys()
    for name, recipe in TRAVELLING.items():
        layers, ways = Layers(recipe, number, rank), (routes.dispatch, routes.combine)
        for layer in layers.layers:
            layer.bfloat16()
        x, dy = (of[batch.at[rank]].bfloat16() for of in (batch.x, batch.dy))
        forward, backward = (evaluated(formula, T=tokens, K=WIDE) for formula in table[name])
        with case(name), pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            y = layers(x.requires_grad_(), ways)
            # What comes back are values, of as many tokens as arrived.
            back, codes = {torch.bfloat16: arrived * WIDE * 2}, torch.uint8
            if name == "bfloat16":
                back[torch.bfloat16] += forward
            else:
                back[codes] = forward
            assert counted.bytes == back
            # One reduction for a tensor of all experts: an amax for each direction, or, where tokens
            # have amaxes of their own, one for each feature of the column direction.
            of_dy = [] if recipe in ("high_precision", "mxfp8") else [(1 if recipe == "current_scaling" else 2) * EXPERTS]
            of_x = [EXPERTS * WIDE] if recipe is ROWS else of_dy
            assert counted.reductions == of_x
            counted.bytes.clear()
            y.backward(dy)
            # dx comes back, and a bias's gradient of the layer that combines is summed in float32.
            back = {torch.bfloat16: arrived * WIDE * 2, torch.float32: EXPERTS * WIDE * 4}
            if name == "bfloat16":
                back[torch.bfloat16] += backward
                del back[torch.float32]  # from the tokens that arrived
            else:
                back[codes] = backward
            assert counted.bytes == back
            assert counted.reductions == of_x + of_dy
            counted.reductions.clear()
            with torch.no_grad():
                layers(x, ways)
            assert counted.reductions == ([] if recipe is ROWS else [EXPERTS] * len(of_x))


def plain(rank, number):
    """Rows that are moved as they are come back, and so do their gradients."""
    splits = splits_of(number, 3)
    routes = nvfp4.torch.Routes(splits[rank])
    assert routes.here == splits.sum(0).chunk(number)[rank].tolist()
    x = torch.randn(int(splits[rank].sum()), 3, requires_grad=True)
    there = routes.dispatch(x)
    assert there.shape == (sum(routes.here), 3)
    back = routes.combine(2 * there)
    back.backward(x.detach())
    assert torch.equal(back, 2 * x) and torch.equal(x.grad, 2 * x)
    # Delayed scales are those of the experts' workers: tokens travel as they are.
    y, dx, gradients = compare(rank, number, "delayed_scaling", splits_of(number, 16))
    for found, expected in (y, dx, *gradients.values()):
        close(found, expected)
    layer = nvfp4.torch.GroupedLinear(3, 64, 64)
    with pytest.raises(ValueError, match="experts for each of .* workers, the layer has 3"):
        layer(torch.randn(len(x), 64), routes.dispatch)
    with pytest.raises(ValueError, match="tokens to dispatch, got 1"):
        Layers(NEAREST, number, rank).layers[0](torch.randn(1, 64), routes.dispatch)
    with pytest.raises(ValueError, match=f"as many for each of {number} workers, got"):
        nvfp4.torch.Routes([1] * (number + 1))


def every(rank, number):
    for check in (plain, codes, travels, odd, equals):
        check(rank, number)


def few(rank, number):
    """With one expert for each worker."""
    codes(rank, number)
    for recipe in (NEAREST, ROWS):
        y, dx, gradients = compare(rank, number, recipe, splits_of(number, 16))
        for name, (found, expected) in {"y": y, "dx": dx, **gradients}.items():
            assert torch.equal(found, expected) or ("bias" in name and close(found, expected) is None), name


def test_two_workers_give_experts_the_codes_of_one_process(tmp_path):
    run(2, tmp_path, every)


def test_four_workers_too(tmp_path):
    run(4, tmp_path, few)
