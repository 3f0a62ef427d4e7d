"""Modules without numbers: on the meta device, and of fake tensors."""

import contextlib

import pytest
import torch
from test_inputs import KINDS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import nvfp4
import nvfp4.te as te
import nvfp4.torch

PLACES = {
    "device=": contextlib.nullcontext,
    "torch.device": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", nvfp4.Recipe.presets())
@pytest.mark.parametrize("path", KINDS)
def test_both_passes_have_the_shapes_and_types_of_real_ones(path, recipe, place):
    def both(dtype, device=None):
        layer = KINDS[path](recipe=recipe, dtype=dtype, device=device)
        x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True, device=device)
        args = ([4, 11],) if path.endswith("experts") else ()
        y = layer(x, *args)
        y.sum().backward()
        with torch.no_grad():
            evaluated = layer.eval()(x, *args)
        return layer, [
            y,
            evaluated,
            x.grad,
            *(p.grad for p in layer.parameters()),
            *layer.buffers(),
        ]

    for dtype in (torch.float32, torch.bfloat16):
        _, real = both(dtype)
        with PLACES[place]():
            layer, made = both(dtype, "meta" if place == "device=" else None)
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in real]
        device = "cpu" if place == "fake" else "meta"
        assert all(t.device.type == device for t in [*made, *layer.parameters()])


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed_scaling", "mxfp8"])
def test_a_model_is_converted_called_and_then_loaded(recipe):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    x = torch.randn(32, 64)

    def converted(model):
        nvfp4.torch.convert_module(model, nvfp4.Recipe(recipe).with_finite("refuse"))
        return model

    def step(model):
        model.zero_grad()
        torch.manual_seed(1)
        y = model(x)
        y.sum().backward()
        nvfp4.torch.check_finite(model)
        nvfp4.torch.update_scales(model)
        return [y, *(p.grad for p in model.parameters()), *model.buffers()]

    for load in ("assign", "copy"):
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
            converted(empty)(torch.randn(32, 64)).sum().backward()
            nvfp4.torch.check_finite(empty)
            nvfp4.torch.update_scales(empty)
        if load == "copy":
            empty.to_empty(device="cpu")
        empty.load_state_dict(plain.state_dict(), assign=load == "assign")
        twin = converted(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)))
        twin.load_state_dict(plain.state_dict())
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(step(empty), step(twin)))


def test_assigned_scales_are_those_of_the_state():
    trained = nvfp4.torch.Linear(64, 64, recipe="delayed_scaling")
    trained(torch.randn(32, 64)).sum().backward()
    nvfp4.torch.update_scales(trained)
    layer = nvfp4.torch.Linear(64, 64, recipe="delayed_scaling", device="meta")
    layer.load_state_dict(trained.state_dict(), assign=True)
    state, expected = layer.state_dict(), trained.state_dict()
    assert list(state) == list(expected) and all(
        torch.equal(state[key], expected[key]) for key in state
    )
    assert layer.delayed.input.scale != 1


def test_modules_of_te():
    layers = [
        te.Linear(64, 48, device="meta"),
        te.LayerNormLinear(64, 48, device="meta"),
        te.LayerNormMLP(64, 96, device="meta"),
    ]
    for layer in layers:
        with te.autocast(recipe=te.NVFP4BlockScaling()):
            y = layer(torch.randn(32, 64, device="meta"))
        y.sum().backward()
        assert y.is_meta and all(p.grad.is_meta for p in layer.parameters())
