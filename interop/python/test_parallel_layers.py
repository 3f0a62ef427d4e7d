"""Layers of several parts under ``parallelize_module``: two processes, over gloo, against one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel

import nvfp4.te as te
import nvfp4.torch as layers
from workers import NEAREST, case, close, run

EACH = 32  # tokens of a worker
SPLITS = [48, 0, 80]  # of experts


def made(kind, **settings):
    torch.manual_seed(0)
    sizes = {"LayerNormLinear": (64, 96), "LayerNormMLP": (64, 128), "GroupedLinear": (3, 64, 96)}
    layer = getattr(layers, kind)(*sizes[kind], recipe=NEAREST, **settings)
    with torch.no_grad():  # the largest values are one worker's alone
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif "2" not in name:
                parameter[:16] *= 4
            else:
                parameter[:, :16] *= 3
    return layer


def compared(rank, layer, spread, sequence, outputs, *splits):
    """Runs a layer and the same one on two workers. Gives whether each of their results is, bit for
    bit, the part that it should be.
    """
    torch.manual_seed(7)
    shape = (2, 2 * EACH, 96 if outputs == "features" or splits else 64)
    x, dy = torch.randn(2, 2 * EACH, 64) * torch.linspace(0.1, 3, 2 * EACH)[:, None], torch.randn(shape)
    tokens = slice(rank * EACH, rank * EACH + EACH) if sequence else slice(None)
    of_output = {
        "features": (slice(None), slice(None), slice(rank * 48, rank * 48 + 48)),
        "tokens": (slice(None), tokens),
        "all": (slice(None),),
    }[outputs]
    whole, part = x.clone().requires_grad_(), x[:, tokens].clone().requires_grad_()
    expected, y = layer(whole, *splits), spread(part, *splits)
    expected.backward(dy)
    y.backward(dy[of_output])
    close(y, expected[of_output])
    close(part.grad, whole.grad[:, tokens])
    same = {"y": torch.equal(y, expected[of_output])}
    for (name, parameter), found in zip(layer.named_parameters(), spread.parameters()):
        gradient = found.grad.full_tensor()
        close(gradient, parameter.grad)
        same[name] = torch.equal(gradient, parameter.grad)
    spread.eval(), layer.eval()
    with torch.no_grad():
        close(spread(part, *splits), layer(whole, *splits)[of_output])
    return same


def norms(rank, mesh):
    for normalization in ("LayerNorm", "RMSNorm"):
        for sequence in (False, True):
            with case("LayerNormLinear", normalization, sequence):
                given = {"normalization": normalization}
                tokens = Shard(1) if sequence else Replicate()
                style = layers.ColwiseParallel(input_layouts=tokens)
                spread = parallel.parallelize_module(made("LayerNormLinear", **given), mesh, style)
                assert spread.layer_norm_weight.placements == (Replicate(),)
                assert spread.weight.to_local().shape == (48, 64)
                same = compared(rank, made("LayerNormLinear", **given), spread, sequence, "features")
                # No sum goes over workers on the way there.
                assert same["y"] and same["weight"], same
            with case("LayerNormMLP", normalization, sequence):
                style = layers.ColwiseRowwiseParallel(input_layouts=tokens, output_layouts=tokens)
                spread = parallel.parallelize_module(made("LayerNormMLP", **given), mesh, style)
                assert spread.fc2_weight.to_local().shape == (64, 64)
                alone = made("LayerNormMLP", **given)
                same = compared(rank, alone, spread, sequence, "tokens")
                assert same["fc1_weight"] and same["fc2_weight"], same


def experts(rank, mesh):
    rowwise = layers.RowwiseParallel(input_layouts=Replicate())
    for style, outputs in ((layers.ColwiseParallel(), "features"), (rowwise, "all")):
        with case("GroupedLinear", outputs):
            spread = parallel.parallelize_module(made("GroupedLinear"), mesh, style)
            same = compared(rank, made("GroupedLinear"), spread, False, outputs, SPLITS)
            assert all(same[f"weight{expert}"] for expert in range(3)), same
            assert same["y"] or outputs == "all"


def refused(mesh):
    def spread(layer, style):
        return parallel.parallelize_module(layer, mesh, style)

    for kind, style, message in (
        ("LayerNormMLP", layers.ColwiseParallel(), "use ColwiseRowwiseParallel"),
        ("LayerNormMLP", layers.RowwiseParallel(), "a norm reads all features of a token"),
        ("LayerNormLinear", layers.RowwiseParallel(), "a norm reads all features .* use ColwiseParallel"),
        ("LayerNormLinear", layers.ColwiseRowwiseParallel(), "is for LayerNormMLP, not for LayerNormLinear"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            spread(made(kind), style)
    with pytest.raises(NotImplementedError, match="the activation has a gate"):
        spread(made("LayerNormMLP", activation="swiglu"), layers.ColwiseRowwiseParallel())
    with pytest.raises(ValueError, match="split by tp_group and parallel_mode"):
        spread(te.LayerNormLinear(64, 64), layers.ColwiseParallel())
    grouped = spread(made("GroupedLinear"), layers.ColwiseParallel())
    with pytest.raises(ValueError, match="some experts each, or a part of every expert, not both"):
        grouped(torch.randn(128, 64), layers.Routes([32, 32, 64] * 2).dispatch)
    norm = spread(made("LayerNormLinear"), layers.ColwiseParallel())
    with pytest.raises(TypeError, match="the weight is a DTensor and the input is not"):
        norm.normalized(torch.randn(4, 64))


def two(rank, number):
    mesh = init_device_mesh("cpu", (number,))
    norms(rank, mesh)
    experts(rank, mesh)
    refused(mesh)


def test_composed_layers_and_one_process_multiply_the_same_codes(tmp_path):
    run(2, tmp_path, two)
