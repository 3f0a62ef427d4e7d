"""FSDP2 of weights in high precision that travel as codes: two and four processes, over gloo."""

import copy
import io
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.torch
from nvfp4.torch._gather import GathersCodes
from nvfp4.torch._travel import columns_follow, receive, send, sent_bytes
from workers import NEAREST, Counted, case, close, documented, evaluated, run

RECIPES = ["nvfp4", "nvfp4_4over6", "nvfp4_1d_weight", "nvfp4_row_scaled", "current_scaling", "mxfp8", "float8_block_scaling"]
POLICIES = [
    {},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    {"reshard_after_forward": False},
]


def model_of(recipe):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256, bias=False), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Linear(64, 24)]
    model = torch.nn.Sequential(*layers)
    nvfp4.torch.convert_module(model, recipe)
    with torch.no_grad():
        model[0].weight[:16] *= 5  # the largest value is one worker's alone
    return model


def shard(model, **policy):
    for layer in (model[0], model[2], model[3], model):
        fully_shard(layer, **policy)
    return model


def train(model, steps=2, ahead=False, optimizer=None):
    torch.manual_seed(5)
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(steps):
        for x in torch.randn(2, 32, 64):  # micro-batches
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if ahead:
            nvfp4.torch.agree_on_weights(model)
    return losses


def two(rank, number):
    for recipe in RECIPES:
        losses(number, recipe, POLICIES if recipe == "nvfp4" else POLICIES[:2])
    codes(rank, number)
    for name, (recipe, formula) in travelling().items():
        travelled(number, name, recipe, formula)
    agreed(rank, number)
    own_tokens(rank, number)
    switched()
    replicated(rank, number)


def four(rank, number):
    for recipe in ("nvfp4", "current_scaling"):
        losses(number, recipe, POLICIES[:2])
    codes(rank, number)
    travelled(number, *["bfloat16", *travelling()["bfloat16"]])
    travelled(number, *["NVFP4, 16 × 16", *travelling()["NVFP4, 16 × 16"]])
    own_tokens(rank, number)
    replicated(rank, number)


def losses(number, recipe, policies):
    """All workers see the same tokens, so that the mean of their gradients is the gradient of one
    process: bit for bit where two equal numbers are added, which needs no rounding.
    """
    alone = model_of(recipe)
    of_one = train(alone)
    for policy in policies:
        with case(recipe, policy):
            plain, coded = model_of(recipe), model_of(recipe)
            nvfp4.torch.gather_codes(coded)
            assert type(coded[0].weight) is GathersCodes
            expected = train(shard(plain, **policy))
            assert train(shard(coded, **policy), ahead=recipe == "nvfp4") == expected
            for ours, theirs in zip(coded.parameters(), plain.parameters()):
                assert torch.equal(ours.full_tensor(), theirs.full_tensor())
            if "mp_policy" in policy:  # of weights in bfloat16
                continue
            assert expected[:2] == of_one[:2], "before the first step"
            if number == 2:
                assert expected == of_one
                for ours, theirs in zip(coded.parameters(), alone.parameters()):
                    assert torch.equal(ours.full_tensor(), theirs)
            assert expected == pytest.approx(of_one, rel=1e-3)


def own_tokens(rank, number):
    """Workers with their own tokens, by DDP and by FSDP2, beside one process with all of them."""
    torch.manual_seed(11)
    batches = torch.randn(3, 32 * number, 64) * torch.linspace(0.1, 3, 32 * number)[:, None]
    mine, found = slice(rank * 32, rank * 32 + 32), {}
    for kind in ("one process", "ddp", "fsdp", "fsdp, codes"):
        model = model_of(NEAREST)
        run, tokens = model, slice(None) if kind == "one process" else mine
        if kind != "one process":
            nvfp4.torch.reduce_amaxes(model)
        if kind == "fsdp, codes":
            nvfp4.torch.gather_codes(model)
        if kind == "ddp":
            run = torch.nn.parallel.DistributedDataParallel(model)
        elif kind != "one process":
            shard(model)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for batch in batches:
            y = run(batch[tokens])
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            if not losses:
                first = [y.detach(), *(getattr(p.grad, "full_tensor", lambda: p.grad)() for p in model.parameters())]
            losses.append(loss.item())
            optimizer.step()
        found[kind] = losses, first
    whole, expected = found.pop("one process")
    for kind, (losses, first) in found.items():
        with case(kind):
            assert torch.equal(first[0], expected[0][mine]), "all operands have the codes of one process"
            for ours, theirs in zip(first[1:], expected[1:]):
                close(ours, theirs)
            mean = torch.tensor(losses)
            dist.all_reduce(mean)
            assert (mean / number).tolist() == pytest.approx(whole, rel=1e-3)
            assert mean[0].item() / number == pytest.approx(whole[0], rel=1e-6)
    assert found["fsdp"][0] == found["fsdp, codes"][0]


def codes(rank, number):
    """What is gathered is what one process makes, code for code."""
    for recipe in ("nvfp4", "nvfp4_4over6", "nvfp4_1d_weight", "current_scaling"):
        whole, model = model_of(recipe), model_of(recipe)
        nvfp4.torch.gather_codes(model)
        shard(model)
        model[0].unshard()
        gathered, spec = model[0].weight, whole[0].formats.weight.spec
        expected = nvfp4.torch.QuantizedTensor.quantize(whole[0].weight, spec)
        assert torch.equal(gathered.row, expected.row) and torch.equal(gathered.column, expected.column), recipe
        model[0].reshard()
        assert all(block.untyped_storage().nbytes() == 0 for block in (gathered.row, gathered.column))


def travelling():
    """What docs/scale.md says of a weight: for each row of the table, a recipe and the formula."""
    recipes = {
        "bfloat16": None,  # without gather_codes
        "FP8, one scale": "current_scaling",
        "NVFP4, 16 × 16": "nvfp4",
        "NVFP4, 1 × 16, both directions": "nvfp4_1d_weight",
        "MXFP8, both directions": "mxfp8",
    }
    table = documented("FSDP2")
    assert table.keys() == recipes.keys()
    return {name: (recipes[name], formula) for name, (formula, _) in table.items()}


def travelled(number, name, recipe, formula):
    """Bytes and reductions of a step: weights travel forward and backward, and are agreed on once."""
    # In bfloat16 codes of MXFP8 would be more bytes: it is counted in float32.
    dtype = torch.float32 if recipe == "mxfp8" else torch.bfloat16
    model = model_of(recipe or "nvfp4")
    plan = [] if recipe is None else nvfp4.torch.gather_codes(model, dtype=dtype)
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=True)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        for x in torch.randn(2, 32, 64).to(dtype):
            model(x).sum().backward()
    with case(name):
        of_weights = evaluated(formula, N=256, K=64) + evaluated(formula, N=64, K=256)
        # A bias, and the layer whose 24 rows are no whole blocks in all formats.
        odd = (plan[2].bytes if plan else 24 * 64 * dtype.itemsize) + (64 + 24) * dtype.itemsize
        passes = 2 * 2
        assert counted.taken() * number == passes * (of_weights + odd)
        assert not plan or sum(of.bytes for of in plan[:2]) == of_weights
        # Once for each weight, and once more for columns that are made of decoded rows.
        times = {"mxfp8": 0, "nvfp4_1d_weight": 2}.get(recipe, 1)
        assert len(counted.reductions) == times * sum(of.reason is None for of in plan)


def test_the_documents_sizes_of_a_gather():
    for name, (recipe, formula) in travelling().items():
        size, plain, said = evaluated(formula, N=4096, K=4096), 2 * 4096**2, documented("FSDP2")[name][1]
        sent = plain if recipe is None else sent_bytes(model_of(recipe)[0].formats.weight.spec, "both", (4096, 4096))
        assert sent == size
        assert said == (f"{size / 1e6:.1f} MB" if size <= plain else "bfloat16 is less")


def agreed(rank, number):
    """Workers with their own tokens agree on the amaxes of activations too."""
    made = []
    for coded in (False, True):
        model = nvfp4.torch.reduce_amaxes(model_of("nvfp4"))
        if coded:
            nvfp4.torch.gather_codes(model)
        shard(model)
        torch.manual_seed(rank)
        x = torch.randn(32, 64) * (rank + 1)
        torch.manual_seed(3)
        model(x).square().sum().backward()
        made.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*made))


def switched():
    """A layer that switches to another recipe gathers codes of that one, or values."""
    x = torch.randn(32, 64)
    for recipe in ("current_scaling", "high_precision", "delayed_scaling"):
        model, plain = model_of("nvfp4"), model_of(recipe)
        nvfp4.torch.gather_codes(model)
        shard(model), shard(plain)
        for layer in (model[0], model[2], model[3]):
            layer.use_recipe(recipe)
        torch.testing.assert_close(model(x), plain(x))
    model[0].use_recipe("nvfp4")
    with pytest.raises(RuntimeError, match="switch recipes before the first pass"):
        model(x)
    with pytest.raises(ValueError, match="call it before fully_shard"):
        nvfp4.torch.gather_codes(model)


def replicated(rank, number):
    """DDP needs no settings for delayed scaling: the amaxes of micro-batches stay each worker's own."""
    torch.manual_seed(1)
    batch = torch.randn(4, 32, 64) * torch.tensor([1.0, 5.0, 2.0, 3.0])[:, None, None]  # for up to four workers
    histories = []
    for order in ("before", "after", "alone"):
        model = model_of("delayed_scaling")
        if order == "before":
            nvfp4.torch.reduce_amaxes(model)
        wrapped = model if order == "alone" else torch.nn.parallel.DistributedDataParallel(model)
        if order == "after":
            nvfp4.torch.reduce_amaxes(wrapped)
        for x in batch if order == "alone" else batch[rank::number]:  # micro-batches of one step
            wrapped(x).sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            nvfp4.torch.update_scales(model)
        assert len(counted.reductions) == (order != "alone"), "one for all scales"
        histories.append([model[0].delayed.input.history, model[0].delayed.input.scale])
    assert all(torch.equal(a, b) for of in histories[:2] for a, b in zip(of, histories[2]))


def saved(rank, number, folder, source):
    """Saves a model and the state of its optimizer, after what another number of workers saved."""
    model = model_of("nvfp4")
    nvfp4.torch.gather_codes(model)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if source is not None:
        weights, states = get_state_dict(model, optimizer)
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        set_model_state_dict(model, weights)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=source / "files")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        whole = torch.load(source / "whole.pt")
        found = contents(model, optimizer)
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    losses = train(model, optimizer=optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "files")
    whole = contents(model, optimizer)
    assert all(torch.isfinite(value).all() for value in whole.values())
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
        (folder / "losses.json").write_text(json.dumps(losses))
    # In place, with nothing said to the model: the next gather has the values of the file.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.randn(32, 64)
    assert not model(x).any()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "files")
    single = model_of("nvfp4")
    single.load_state_dict({name: whole[name] for name, _ in single.named_parameters()})
    assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())
    assert torch.equal(model(x), single(x))


def contents(model, optimizer):
    """The parameters, and the state of their optimizer, as ordinary tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.full_tensor().detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = getattr(value, "full_tensor", lambda: value)().clone()
    return found


def test_losses_codes_and_bytes_are_those_of_one_process(tmp_path):
    run(2, tmp_path, two)


def test_four_workers_too(tmp_path):
    run(4, tmp_path, four)


def test_checkpoints_load_on_another_number_of_workers(tmp_path):
    source, losses = None, []
    for name, number in (("two", 2), ("four", 4), ("two again", 2)):
        folder = tmp_path / name
        run(number, folder, saved, folder, source)
        source = folder
        losses += json.loads((folder / "losses.json").read_text())
    # As if nothing had stopped, but for the order in which gradients of workers are added.
    alone = model_of("nvfp4")
    optimizer = torch.optim.AdamW(alone.parameters(), 1e-2)
    assert losses == pytest.approx([loss for _ in range(3) for loss in train(alone, optimizer=optimizer)], rel=1e-2)
    # A plain model, in one process, reads them as well.
    state = {"model": {name: torch.zeros_like(p) for name, p in model_of("nvfp4").named_parameters()}}
    dcp.load(state, checkpoint_id=source / "files", no_dist=True)
    whole = torch.load(source / "whole.pt")
    assert all(torch.equal(value, whole[name]) for name, value in state["model"].items())


def test_a_weight_that_gathers_codes_is_a_parameter_like_any_other():
    model, plain = model_of("nvfp4"), model_of("nvfp4")
    nvfp4.torch.gather_codes(model, workers=2)
    assert train(model) == train(plain), "without FSDP2 its values are used"
    copied = copy.deepcopy(model)
    assert type(copied[0].weight) is GathersCodes and torch.equal(copied[0].weight.raw, model[0].weight.raw)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert type(state["0.weight"]) is torch.Tensor
    plain.load_state_dict(state)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight.raw, plain[0].weight)
    assert type(torch.zeros_like(model[0].weight)) is torch.Tensor and model.double()[0].weight.dtype is torch.float64


@pytest.mark.parametrize("spec", ["nvfp4(16x16)", "nvfp4(16x16, 4over6-mae-strict-256)", "nvfp4", "nvfp4(hadamard)", "fp8(e4m3)", "mxfp8(e4m3)", "nvfp4(row-scaled)"])  # fmt: skip
@pytest.mark.parametrize("directions", ["row", "both"])
def test_arrays_arrive_as_they_are(spec, directions):
    x = torch.randn(64, 96)
    x[3] = 0
    arrays = torch.ops.nvfp4.quantize(x, spec, directions, 0, None, None, None)
    sent, freight = send(arrays, spec, directions, (64, 96))
    received, shape = receive(sent, freight)
    assert shape == (64, 96) and len(arrays) == len(received)
    assert all(torch.equal(a, b) for a, b in zip(arrays, received))
    rows = torch.ops.nvfp4.quantize(x, spec, "row", 0, None, None, None)
    alone = sum(array.nbytes for array in rows)
    # One scale of all is not sent; nor are columns, where they are the rows.
    common = directions == "row" and spec in ("nvfp4", "nvfp4(hadamard)")
    assert (sent.nbytes < alone) == (columns_follow(spec) or common)
