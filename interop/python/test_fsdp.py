"""FSDP2 of weights in high precision that travel as codes: two and four processes, over gloo."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import nvfp4
import nvfp4.torch
from nvfp4.torch._gather import GathersCodes
from nvfp4.torch._travel import columns_follow, receive, send
from workers import run

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


def train(model, steps=2, ahead=False):
    torch.manual_seed(5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
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


class Counted:
    """Counts the bytes that a worker gives to gathers, and the reductions of its amaxes."""

    def __init__(self, patch):
        self.bytes = self.reductions = 0
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        gather, reduce = getattr(dist, name), dist.all_reduce

        def gathered(output, input, *args, **kwargs):
            self.bytes += input.nbytes
            return gather(output, input, *args, **kwargs)

        def reduced(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
            self.reductions += op == dist.ReduceOp.MAX
            return reduce(tensor, op, *args, **kwargs)

        patch.setattr(dist, name, gathered)
        patch.setattr(dist, "all_reduce", reduced)


def losses(rank, number):
    for recipe in RECIPES:
        for policy in POLICIES if recipe == "nvfp4" else POLICIES[1:2]:
            plain, coded = model_of(recipe), model_of(recipe)
            nvfp4.torch.gather_codes(coded)
            assert type(coded[0].weight) is GathersCodes
            expected = train(shard(plain, **policy))
            assert train(shard(coded, **policy), ahead=recipe == "nvfp4") == expected, (recipe, policy)
            for ours, theirs in zip(coded.parameters(), plain.parameters()):
                assert torch.equal(ours.full_tensor(), theirs.full_tensor()), (recipe, policy)
    codes(rank, number)
    travelled(rank, number)
    agreed(rank, number)
    switched()
    replicated(rank)


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


def travelled(rank, number):
    """Bytes and reductions of a step: weights travel forward and backward, and are agreed on once."""
    found = {}
    for coded in (False, True):
        model = model_of("nvfp4")
        plan = nvfp4.torch.gather_codes(model, dtype=torch.bfloat16) if coded else None
        for layer in (model[0], model[2], model[3]):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            for x in torch.randn(2, 32, 64).bfloat16():
                model(x).sum().backward()
        # Weights in codes, and one more bias and the odd weight in bfloat16.
        found[coded] = counted.bytes
        assert counted.reductions == (2 if coded else 0)
        kept = 64 * 2 + 24 * 64 * 2 + 24 * 2  # of the bias, and of the layer of 24 rows
    passes = 2 * 2
    assert [t.reason is None for t in plan] == [True, True, False]
    assert sum(t.bytes for t in plan[:2]) == 2 * 64 * 256 * (1 / 2 + 1 / 256)
    assert found[False] * number == passes * (sum(t.high_precision for t in plan[:2]) + kept)
    assert found[True] * number == passes * (sum(t.bytes for t in plan[:2]) + kept)


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


def replicated(rank):
    """DDP needs no settings for delayed scaling: the amaxes of micro-batches stay each worker's own."""
    torch.manual_seed(1)
    batch = torch.randn(4, 32, 64) * torch.tensor([1.0, 5.0, 2.0, 3.0])[:, None, None]
    histories = []
    for order in ("before", "after", "alone"):
        model = model_of("delayed_scaling")
        if order == "before":
            nvfp4.torch.reduce_amaxes(model)
        wrapped = model if order == "alone" else torch.nn.parallel.DistributedDataParallel(model)
        if order == "after":
            nvfp4.torch.reduce_amaxes(wrapped)
        for x in batch if order == "alone" else batch[rank::2]:  # micro-batches of one step
            wrapped(x).sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            nvfp4.torch.update_scales(model)
        assert counted.reductions == (order != "alone"), "one for all scales"
        histories.append([model[0].delayed.input.history, model[0].delayed.input.scale])
    assert all(torch.equal(a, b) for of in histories[:2] for a, b in zip(of, histories[2]))


def saved(rank, number, folder):
    model = model_of("nvfp4")
    nvfp4.torch.gather_codes(model)
    shard(model)
    if number == 4:  # what two workers saved
        fresh = {name: torch.zeros_like(value) for name, value in get_model_state_dict(model).items()}
        set_model_state_dict(model, fresh)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=f"{folder}/../2/files")
        set_model_state_dict(model, state)
        whole = torch.load(f"{folder}/../2/whole.pt")
        assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())
        model(torch.randn(32, 64)).sum().backward()
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/files")
    else:
        expected = train(model)
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/files")
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save(whole, f"{folder}/whole.pt")
        # In place, with nothing said to the model: the next gather has the values of the file.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        x = torch.randn(32, 64)
        assert not model(x).any()
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/files")
        assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in model.named_parameters())
        single = model_of("nvfp4")
        single.load_state_dict(whole)
        assert torch.equal(model(x), single(x)) and expected


def test_losses_codes_and_bytes_are_those_of_one_process(tmp_path):
    run(2, tmp_path, losses)


def test_checkpoints_load_on_another_number_of_workers(tmp_path):
    for number in (2, 4):
        run(number, tmp_path / str(number), saved, tmp_path / str(number))
    # A plain model, in one process, reads them as well.
    state = {name: torch.zeros_like(p) for name, p in model_of("nvfp4").named_parameters()}
    dcp.load(state, checkpoint_id=tmp_path / "4" / "files", no_dist=True)
    whole = torch.load(tmp_path / "2" / "whole.pt")
    assert all(torch.equal(state[name], whole[name]) for name in whole)


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
