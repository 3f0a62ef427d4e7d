"""What modules take, and what they say about anything else: the layer, the argument, the change to
make.
"""

import numpy
import pytest
import torch

import nvfp4
import nvfp4.te as te
import nvfp4.torch

KINDS = {
    "layers.0.fc": lambda **kwargs: nvfp4.torch.Linear(64, 48, path="layers.0.fc", **kwargs),
    "layers.0.qkv": lambda **kwargs: nvfp4.torch.LayerNormLinear(
        64, 48, path="layers.0.qkv", **kwargs
    ),
    "layers.0.mlp": lambda **kwargs: nvfp4.torch.LayerNormMLP(
        64, 96, path="layers.0.mlp", **kwargs
    ),
    "layers.0.experts": lambda **kwargs: nvfp4.torch.GroupedLinear(
        2, 64, 48, path="layers.0.experts", **kwargs
    ),
}
ROUTES = ["nvfp4", "high_precision", "nvfp4_row_scaled_fwd_high_precision_bwd"]


def called(layer, x):
    if isinstance(layer, nvfp4.torch.GroupedLinear):
        tokens = x.numel() // 64 if isinstance(x, torch.Tensor) else 2
        return layer(x, [1, tokens - 1])
    return layer(x)


REFUSED = [
    (
        torch.ones(4, 65),
        ValueError,
        r"expected 64 features in the last dimension, got 65 \(shape \[4, 65\]\)$",
    ),
    (
        torch.ones(64, 4),
        ValueError,
        r"expected 64 features in the last dimension, got 4 \(shape \[64, 4\]\); it may be transposed",
    ),
    (
        torch.ones(63),
        ValueError,
        r"expected 64 features in the last dimension, got 63 \(shape \[63\]\)$",
    ),
    (
        torch.tensor(1.0),
        ValueError,
        "expected 64 features in the last dimension, got a number without dimensions",
    ),
    (
        torch.ones(4, 64, dtype=torch.int64),
        TypeError,
        r"got torch.int64; cast it, as with input.to\(torch.float32\)",
    ),
    (
        torch.ones(4, 64, dtype=torch.bool),
        TypeError,
        r"got torch.bool; cast it, as with input.to\(torch.float32\)",
    ),
    (
        torch.ones(4, 64, device="meta"),
        ValueError,
        "it is on the meta device and has no numbers; the weight is on cpu",
    ),
    (
        [[1.0] * 64] * 4,
        TypeError,
        "expected a torch.Tensor, got list; make one with torch.as_tensor",
    ),
    (
        numpy.ones((4, 64), "float32"),
        TypeError,
        "expected a torch.Tensor, got numpy.ndarray; make one with torch.as_tensor",
    ),
    (None, TypeError, "expected a torch.Tensor, got NoneType; make one with torch.as_tensor"),
]


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("path", KINDS)
def test_what_is_refused_is_named(path, recipe):
    layer = KINDS[path](recipe=recipe)
    for x, error, message in REFUSED:
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(error, match=f"^{path}:input: .*{message}"):
                called(layer, x)


@pytest.mark.parametrize("path", KINDS)
def test_float64_is_refused_where_it_would_be_quantized(path):
    double = torch.ones(4, 64, dtype=torch.float64)
    with pytest.raises(
        TypeError,
        match=rf"^{path}:input: .*got torch.float64; cast it, as with input.to\(torch.float32\)",
    ):
        called(KINDS[path](), double)
    with pytest.raises(
        TypeError,
        match=rf"^{path}.*:weight: .*got torch.float64; cast the layer, as with layer.to\(torch.float32\)",
    ):
        called(KINDS[path](dtype=torch.float64), double)
    layer = KINDS[path](dtype=torch.float64, recipe="high_precision")
    assert called(layer, double).dtype == torch.float64, "what is not quantized may be anything"


@pytest.mark.parametrize("path", KINDS)
def test_sparse_and_nested_tensors_are_refused(path):
    layer = KINDS[path]()
    sparse = torch.ones(4, 64).to_sparse()
    with pytest.raises(
        TypeError,
        match=rf"^{path}:input: expected a dense tensor, got one of torch.sparse_coo; .*input.to_dense\(\)",
    ):
        called(layer, sparse)
    nested = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(5, 64)], layout=torch.jagged)
    with pytest.raises(
        TypeError,
        match=rf"^{path}:input: expected a dense tensor, got a nested one; .*input.values\(\)",
    ):
        called(layer, nested)


@pytest.mark.parametrize("path", KINDS)
def test_a_layer_without_numbers_says_so(path):
    layer = KINDS[path](device="meta")
    with pytest.raises(
        ValueError,
        match=rf"^{path}:weight: it is on the meta device and has no numbers; load them with",
    ):
        called(layer, torch.ones(4, 64))


@pytest.mark.parametrize("recipe", ["nvfp4", "high_precision"])
@pytest.mark.parametrize("path", KINDS)
def test_inputs_of_any_shape_and_strides_are_taken_as_by_torch(path, recipe):
    layer, plain = KINDS[path](recipe=recipe).eval(), torch.nn.Linear(64, 48)
    wide = torch.randn(4, 128)
    inputs = [
        torch.randn(64, 4).t(),
        torch.randn(1, 64).expand(4, 64),
        wide[:, ::2],
        wide[:, :64],
        torch.randn(2, 64, 3).mT,
    ]
    if path != "layers.0.experts":
        inputs += [
            torch.randn(64),
            torch.randn(0, 64),
            torch.randn(2, 0, 64),
            torch.randn(1, 1, 1, 64),
        ]
    for x in inputs:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            y = called(layer, x.to(dtype))
            assert y.shape[:-1] == plain(x).shape[:-1] and y.dtype == dtype
            # torch's own products add up in an order that depends on strides.
            assert recipe == "high_precision" or torch.equal(
                y, called(layer, x.to(dtype).contiguous())
            )


def test_a_vector_is_one_token_in_both_passes():
    layer, x = nvfp4.torch.Linear(64, 48, recipe="mxfp8"), torch.randn(64)
    given, row = x.clone().requires_grad_(), x[None].clone().requires_grad_()
    y, expected = layer(given), layer(row)
    assert y.shape == (48,) and torch.equal(y, expected[0])
    y.sum().backward()
    expected.sum().backward()
    assert torch.equal(given.grad, row.grad[0])


def test_what_requires_gradients_decides_what_has_one():
    for wants_x in (False, True):
        for wants_weight in (False, True):
            for wants_bias in (False, True):
                layer, x = nvfp4.torch.Linear(64, 48), torch.randn(4, 64, requires_grad=wants_x)
                layer.weight.requires_grad_(wants_weight)
                layer.bias.requires_grad_(wants_bias)
                y = layer(x)
                assert y.requires_grad == (wants_x or wants_weight or wants_bias)
                if y.requires_grad:
                    y.sum().backward()
                given = (x.grad, layer.weight.grad, layer.bias.grad)
                assert tuple(g is not None for g in given) == (wants_x, wants_weight, wants_bias)


def test_autocast_casts_what_it_casts():
    layer = nvfp4.torch.Linear(64, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.float64, torch.float16):
            assert layer(torch.randn(4, 64, dtype=dtype)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="linear:input: expected 64 features"):
            layer(torch.randn(4, 63))


def test_an_activation_of_another_width_is_named():
    layer = nvfp4.torch.LayerNormMLP(64, 96, activation=lambda x: x[..., :48], path="layers.0.mlp")
    with pytest.raises(
        ValueError,
        match=r"^layers.0.mlp.fc2:input: expected 96 features in the last dimension, got 48",
    ):
        layer(torch.randn(4, 64))


def test_names_of_converted_and_of_te_modules():
    model = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Linear(64, 64))})
    nvfp4.torch.convert_module(model, "nvfp4")
    with pytest.raises(ValueError, match="^encoder.0:input: expected 64 features"):
        model["encoder"](torch.randn(4, 63))
    layer = te.Linear(64, 64, name="layers.0.proj")
    with (
        te.autocast(recipe=te.NVFP4BlockScaling()),
        pytest.raises(ValueError, match="^layers.0.proj:input: expected 64 features"),
    ):
        layer(torch.randn(4, 63))


def test_other_arguments():
    experts = KINDS["layers.0.experts"]()
    for splits in ([4], [1, 2], [-1, 5], [1, 1, 2]):
        with pytest.raises(
            ValueError,
            match="^layers.0.experts:m_splits: expected 2 numbers of tokens that add up to 4, got",
        ):
            experts(torch.randn(4, 64), splits)
    with pytest.raises(
        TypeError, match="recipe: expected the name of a preset or an nvfp4.Recipe, got int"
    ):
        nvfp4.torch.Linear(64, 64, recipe=4)
