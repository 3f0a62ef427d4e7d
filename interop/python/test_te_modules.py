"""The arguments of TransformerEngine's linear modules."""

import contextlib
import pickle

import pytest
import torch
from torch.nn import functional

import nvfp4.te as te


@pytest.fixture
def x():
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(3))


def gradients(y, *of):
    return torch.autograd.grad(y.square().sum(), of)


def test_a_bias_is_returned_and_not_added(x):
    layer = te.Linear(64, 32, return_bias=True)
    torch.nn.init.ones_(layer.bias)
    y, bias = layer(x)
    torch.testing.assert_close(y, x @ layer.weight.t())
    assert bias is layer.bias and layer(x.bfloat16())[1].dtype == torch.bfloat16
    assert te.Linear(64, 32, bias=False, return_bias=True)(x)[1] is None
    norm = te.LayerNormLinear(64, 32, return_bias=True, return_layernorm_output=True)
    y, bias, ln = norm(x)
    torch.testing.assert_close(ln, functional.layer_norm(x, (64,)))
    torch.testing.assert_close(y, ln @ norm.weight.t())
    mlp = te.LayerNormMLP(64, 96, return_bias=True, return_layernorm_output=True)
    torch.nn.init.ones_(mlp.fc2_bias)
    y, bias, ln = mlp(x)
    assert bias is mlp.fc2_bias
    torch.testing.assert_close(
        y, functional.gelu(ln @ mlp.fc1_weight.t(), approximate="tanh") @ mlp.fc2_weight.t()
    )
    grouped = te.GroupedLinear(2, 64, 32, return_bias=True)
    torch.nn.init.ones_(grouped.bias1)
    y, biases = grouped(x, torch.tensor([16, 32]))
    torch.testing.assert_close(y[16:], x[16:] @ grouped.weight1.t())
    assert biases[1] is grouped.bias1


def test_a_weight_is_several_parameters(x):
    for make in (te.Linear, te.LayerNormLinear):
        layer = make(
            64, 48, parameters_split={"query_": 32, "key": 16}, init_method=torch.nn.init.ones_
        )
        norm = [name for name in layer.state_dict() if "norm" in name]
        assert set(layer.state_dict()) - set(norm) == {
            "query_weight",
            "key_weight",
            "query_bias",
            "key_bias",
        }
        assert layer.query_weight.shape == (32, 64) and (layer.key_weight == 1).all()
        torch.nn.init.normal_(layer.query_weight), torch.nn.init.normal_(layer.key_bias)
        one = make(64, 48)
        with torch.no_grad():
            one.weight.copy_(torch.cat([layer.query_weight, layer.key_weight]))
            one.bias.copy_(torch.cat([layer.query_bias, layer.key_bias]))
        for recipe in (None, "nvfp4"):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                torch.manual_seed(1)
                y = layer(x)
                torch.manual_seed(1)
                same = one(x)
            torch.testing.assert_close(y, same)
            torch.manual_seed(2)
            parts = gradients(y, layer.query_weight, layer.key_weight)
            torch.manual_seed(2)
            torch.testing.assert_close(torch.cat(parts), *gradients(same, one.weight))
        assert "out_features=48, bias=True" in repr(layer)
    assert te.Linear(64, 48, parameters_split=("a", "b", "c"), bias=False).b_weight.shape == (
        16,
        64,
    )
    with pytest.raises(ValueError, match="add up to 48"):
        te.Linear(64, 48, parameters_split={"a": 5})
    with pytest.raises(ValueError, match="leave out parameters_split"):
        te.Linear(64, 48, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)


def test_parameters_begin_as_asked():
    def of(value):
        return lambda tensor: torch.nn.init.constant_(tensor, value)

    mlp = te.LayerNormMLP(
        64, 96, init_method=of(2.0), output_layer_init_method=of(3.0), zero_centered_gamma=True
    )
    assert (mlp.fc1_weight == 2).all() and (mlp.fc2_weight == 3).all()
    assert not any(
        p.any() for p in (mlp.fc1_bias, mlp.fc2_bias, mlp.layer_norm_weight, mlp.layer_norm_bias)
    )
    assert (te.LayerNormLinear(64, 64).layer_norm_weight == 1).all()
    assert abs(te.Linear(256, 256).weight.std().item() - 0.023) < 0.001, (
        "as TransformerEngine's begin"
    )
    assert (te.GroupedLinear(2, 64, 64, init_method=of(4.0)).weight1 == 4).all()
    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            forks.append(name)
            yield

    te.Linear(64, 64, get_rng_state_tracker=Tracker, rng_tracker_name="experts")
    te.LayerNormMLP(64, 64, get_rng_state_tracker=Tracker)
    assert forks == ["experts", "model-parallel-rng", "model-parallel-rng"]
    assert pickle.loads(pickle.dumps(te.Linear(64, 64))).weight.shape == (64, 64)


@pytest.mark.parametrize(
    "make",
    [te.Linear, te.LayerNormLinear, te.LayerNormMLP, lambda *a, **k: te.GroupedLinear(2, *a, **k)],
)
def test_a_module_on_the_meta_device_becomes_real(make, x):
    module = make(64, 64, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    assert not any(p.is_meta for p in module.parameters())
    args = ([16, 32],) if isinstance(module, te.GroupedLinear) else ()
    with te.autocast():
        module(x, *args).sum().backward()
    assert module(x, *args).std() > 0


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_weights_of_norms_may_be_centred_on_zero(x, normalization):
    plain = te.LayerNormLinear(64, 32, normalization=normalization)
    centred = te.LayerNormLinear(64, 32, normalization=normalization, zero_centered_gamma=True)
    torch.nn.init.uniform_(plain.layer_norm_weight)
    with torch.no_grad():
        centred.layer_norm_weight.copy_(plain.layer_norm_weight - 1)
        centred.weight.copy_(plain.weight)
    y, same = plain(x), centred(x)
    torch.testing.assert_close(y, same)
    torch.testing.assert_close(
        gradients(y, plain.layer_norm_weight), gradients(same, centred.layer_norm_weight)
    )
    with pytest.raises(ValueError, match="expected 64 features in the last dimension, got 63"):
        centred(x[:, :63])
    tiny = te.LayerNormLinear(
        64, 64, normalization=normalization, zero_centered_gamma=True, params_dtype=torch.bfloat16
    )
    torch.nn.init.constant_(tiny.layer_norm_weight, 2.0**-10)
    wide = functional.layer_norm if normalization == "LayerNorm" else functional.rms_norm
    expected = (wide(x.bfloat16().float(), (64,), eps=1e-5) * (1 + 2.0**-10)).bfloat16()
    assert torch.equal(tiny.normalized(x.bfloat16()), expected), "1 + weight is not rounded"


def halves(function):
    return lambda x: function(x[..., :96]) * x[..., 96:]


def quick(x):
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "gelu": torch.nn.GELU("tanh"),
    "geglu": halves(torch.nn.GELU("tanh")),
    "glu": halves(torch.sigmoid),
    "qgelu": quick,
    "qgeglu": halves(quick),
    "relu": torch.relu,
    "reglu": halves(torch.relu),
    "srelu": lambda x: torch.relu(x) ** 2,
    "sreglu": halves(lambda x: torch.relu(x) ** 2),
    "silu": functional.silu,
    "swiglu": halves(functional.silu),
    "clamped_swiglu": lambda x: (
        quick(x[..., :96].clamp(max=7.0)) * (x[..., 96:].clamp(-7.0, 7.0) + 1)
    ),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_transformer_engines(x, activation):
    mlp = te.LayerNormMLP(
        64, 96, activation=activation, init_method=lambda t: torch.nn.init.normal_(t, std=1.0)
    )
    inside = functional.layer_norm(x, (64,)) @ mlp.fc1_weight.t()
    expected = ACTIVATIONS[activation](inside) @ mlp.fc2_weight.t()
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(
        gradients(mlp(x), mlp.fc1_weight), gradients(expected, mlp.fc1_weight), rtol=1e-4, atol=1e-3
    )


def test_the_settings_of_an_activation_and_one_that_there_is_not(x):
    settings = {"limit": 1.0, "alpha": 2.0, "glu_linear_offset": 0.5}
    mlp = te.LayerNormMLP(64, 96, activation="clamped_swiglu", activation_params=settings)
    inside = functional.layer_norm(x, (64,)) @ mlp.fc1_weight.t()
    gate, linear = inside[:, :96].clamp(max=1.0), inside[:, 96:].clamp(-1, 1)
    torch.testing.assert_close(
        mlp(x), (gate * torch.sigmoid(2 * gate) * (linear + 0.5)) @ mlp.fc2_weight.t()
    )
    with pytest.raises(ValueError, match="unknown activation 'tanh'; there are 'gelu', 'geglu'"):
        te.LayerNormMLP(64, 96, activation="tanh")


def test_gradients_go_to_main_grad_and_begin_with_the_first_micro_batch(x):
    for layer in (
        te.Linear(64, 32, fuse_wgrad_accumulation=True),
        te.LayerNormLinear(64, 32, fuse_wgrad_accumulation=True),
    ):
        layer.weight.main_grad = torch.full((32, 64), 7.0)
        for first, times in ((True, 1), (False, 2), (None, 3), (True, 1)):
            layer(x, is_first_microbatch=first).sum().backward()
            inside = layer.normalized(x) if isinstance(layer, te.LayerNormLinear) else x
            torch.testing.assert_close(
                layer.weight.main_grad,
                times * inside.sum(0).detach().expand(32, 64),
                rtol=1e-4,
                atol=1e-4,
            )
        with torch.no_grad():
            before = layer.weight.main_grad.clone()
            layer(x, is_first_microbatch=True)
        assert torch.equal(layer.weight.main_grad, before) and layer.weight.grad is None


@pytest.mark.parametrize("recipe", [None, "nvfp4", "mxfp8"])
def test_an_mlp_that_is_computed_again_gives_the_same(x, recipe):
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(4)
        mlp = te.LayerNormMLP(64, 96, checkpoint=checkpoint)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = mlp(x)
        results.append([y, *gradients(y, *mlp.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("recipe", [None, te.MXFP8BlockScaling(), te.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda **of: te.Linear(64, 32, **of),
        lambda **of: te.Linear(64, 32, parameters_split=("q", "k"), **of),
        lambda **of: te.LayerNormLinear(64, 32, **of),
        lambda **of: te.LayerNormMLP(64, 96, **of),
        lambda **of: te.GroupedLinear(2, 64, 32, **of),
    ],
    ids=["Linear", "split", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"],
)
def test_gradients_of_weights_wait_for_backward_dw(x, make, recipe):
    """Two backward passes, and then all that they left out: numbers as if nothing had waited."""
    found, called = [], []
    for delayed in (False, True):
        torch.manual_seed(0)
        layer = make(delay_wgrad_compute=delayed)
        for scale in (1.0, 2.0):
            with te.autocast(recipe is not None, recipe=recipe):
                splits = ([16, 32],) if isinstance(layer, te.GroupedLinear) else ()
                layer(scale * x, *splits).square().sum().backward()
        weights = {n: p for n, p in layer.named_parameters() if "weight" in n and "norm" not in n}
        assert layer.need_backward_dw() == delayed
        if delayed:
            assert all(weight.grad is None for weight in weights.values())
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
            layer.backward_dw()  # once for each backward pass
        layer.backward_dw()
        found.append({name: p.grad for name, p in layer.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and called == [1, 1]
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected)


def test_what_waits_is_added_to_main_grad(x):
    layer = te.Linear(64, 32, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    layer.weight.main_grad = torch.ones(32, 64)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.ones(32, 64))
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.main_grad, 1 + x.sum(0).expand(32, 64))
    assert layer.weight.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.LayerNorm(64),
        lambda: te.RMSNorm(64, zero_centered_gamma=True),
        lambda: te.LayerNormLinear(64, 64, return_layernorm_output=True),
        lambda: te.TransformerLayer(64, 64, 4, hidden_dropout=0.0, attention_dropout=0.0),
    ],
    ids=["LayerNorm", "RMSNorm", "LayerNormLinear", "TransformerLayer"],
)
def test_torchs_autocast_gives_its_type(x, make):
    """TransformerEngine's norms and layers do, where torch's norms give float32."""
    layer = make()
    tokens = x.reshape(12, 4, 64).clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(tokens)
    y = y if isinstance(y, tuple) else (y,)
    assert {one.dtype for one in y} == {torch.bfloat16}
    sum(one.float().sum() for one in y).backward()
    assert tokens.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters() if p.grad is not None)
    expected = layer(x.reshape(12, 4, 64))
    for found, true in zip(y, expected if isinstance(expected, tuple) else (expected,)):
        torch.testing.assert_close(found.float(), true, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("given", [("out",), ("dgrad_out",), ("out", "dgrad_out")])
def test_experts_write_into_buffers_of_the_caller(x, given):
    layer, splits = te.GroupedLinear(2, 64, 32), [16, 32]
    sizes = {"out": 32, "dgrad_out": 64}
    buffers = {name: torch.full((48, sizes[name]), 7.0) for name in given}
    runs = []
    for more in ({}, buffers, buffers):  # and again, in the same memory
        here = x.clone().requires_grad_()
        with te.autocast(recipe=te.MXFP8BlockScaling()):
            y = layer(here, splits, **more)
        y.square().sum().backward()
        runs.append((y, here.grad))
    for y, dx in runs[1:]:
        assert torch.equal(y, runs[0][0]) and torch.equal(dx, runs[0][1])
    if "out" in given:
        assert y.data_ptr() == buffers["out"].data_ptr()
    if "dgrad_out" in given:
        assert torch.equal(buffers["dgrad_out"], runs[0][1])
    with pytest.raises(ValueError, match=r"grouped_linear:out: .*\(48, 32\) .* got \(49, 32\)"):
        layer(x, splits, out=torch.empty(49, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make, name",
    [
        (te.LayerNorm, "bias"),
        (lambda size, **k: te.LayerNormLinear(size, size, **k), "layer_norm_bias"),
    ],
    ids=["LayerNorm", "LayerNormLinear"],
)
def test_gradients_of_norms_are_summed_in_32_bits(make, name, dtype):
    """Torch's LayerNorm on CPUs adds them in 16: in bfloat16 its sum of ones ends at 256."""
    module, x = make(64, params_dtype=dtype), torch.randn(4096, 64).to(dtype)
    if name == "layer_norm_bias":
        torch.nn.init.eye_(module.weight)
    module(x).sum().backward()
    normal = functional.layer_norm(x.float(), (64,))
    parameters = dict(module.named_parameters())
    assert (parameters[name].grad == 4096).all()
    weight = parameters[name.replace("bias", "weight")]
    torch.testing.assert_close(weight.grad.float(), normal.sum(0), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
def test_strides_change_no_number_of_a_norm(kind, centred):
    module, x = kind(128, zero_centered_gamma=centred), torch.randn(128, 256).t()
    runs = []
    for given in (x, x.contiguous()):
        module.zero_grad()
        y = module(given)
        y.square().sum().backward()
        runs.append([y, *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*runs))


MODULES = [
    lambda: te.Linear(64, 64),
    lambda: te.LayerNormMLP(64, 96),
    lambda: te.GroupedLinear(2, 64, 64),
    lambda: te.TransformerLayer(64, 96, 4, hidden_dropout=0, attention_dropout=0),
]


def delayed_step(module, x):
    x = x.reshape(48, 1, 64) if isinstance(module, te.TransformerLayer) else x
    module.zero_grad()
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=2)):
        y = module(x, *([16, 32],) if isinstance(module, te.GroupedLinear) else ())
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("shown", [False, True], ids=["", "shown"])
def test_scales_begin_again(make, shown, x):
    module = make()
    first, second = delayed_step(module, x), delayed_step(module, x)
    assert not torch.equal(first[0], second[0])
    if shown:
        for part in module.modules():
            getattr(part, "quantizers", None)
    module.reset_fp8_meta_tensors()
    assert all(map(torch.equal, delayed_step(module, x), first))
    assert all(map(torch.equal, delayed_step(module, x), second))


@pytest.mark.parametrize("make", MODULES[:3])
def test_scales_are_put_back(make, x):
    module = make()
    assert module.get_fp8_meta_tensors() is None
    delayed_step(module, x)
    kept = module.get_fp8_meta_tensors()
    second, _ = delayed_step(module, x), delayed_step(module, 9 * x)
    assert not torch.equal(delayed_step(module, x)[0], second[0])
    module.reset_fp8_meta_tensors(kept)
    assert all(map(torch.equal, delayed_step(module, x), second))
    with pytest.raises(KeyError, match="fp8_meta_tensors: expected 'scaling_fwd'"):
        module.reset_fp8_meta_tensors({})


def test_what_is_shown_is_made_of_a_recipe():
    module, recipe = te.Linear(64, 64), te.MXFP8BlockScaling()
    module.set_meta_tensor(True, recipe)
    made = module.quantizers
    assert isinstance(made["scaling_fwd"][0], te.MXFP8Quantizer)
    module.set_meta_tensor(False, recipe)
    assert module.quantizers is made and module.get_fp8_meta_tensors() is None
    module.reset_fp8_meta_tensors()  # of which there are none


@pytest.mark.parametrize("centre", [0.0, 1.0])
@pytest.mark.parametrize(
    "make",
    [te.LayerNorm, te.RMSNorm, lambda n, **k: te.LayerNormLinear(n, n, **k), lambda n, **k: te.LayerNormMLP(n, n, **k)],
)  # fmt: skip
def test_a_norm_begins_again_alone(make, centre):
    module = make(64, zero_centered_gamma=centre == 0.0)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    kind = "rms" if isinstance(module, te.RMSNorm) else "layer"
    with pytest.warns(DeprecationWarning, match="use reset_parameters"):
        getattr(module, f"reset_{kind}_norm_parameters")()
    alone = isinstance(module, (te.LayerNorm, te.RMSNorm))
    for name, parameter in module.named_parameters():
        again = alone or name.startswith("layer_norm_")
        assert torch.equal(parameter, before[name] if again else torch.full_like(parameter, 3.0))


def test_margins_are_zero():
    for norm, name in ((te.LayerNorm(8), "ln"), (te.RMSNorm(8), "rmsnorm")):
        for when in ("fwd", "bwd", "inf"):
            margin = f"{when}_{name}_sm_margin"
            setattr(norm, margin, 0)
            assert getattr(norm, margin) == 0
            with pytest.raises(NotImplementedError, match=margin):
                setattr(norm, margin, 2)


def test_attributes_are_set_beside_torch():
    for module in (te.Linear(8, 8), te.LayerNorm(8), te.TransformerLayer(64, 96, 4)):
        module.fast_setattr("noted", 3)
        assert module.noted == 3


def test_experts_say_how_they_would_be_split():
    def said(parameter):
        names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
        return {name: getattr(parameter, name) for name in names if hasattr(parameter, name)}

    def split(dim):
        return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}

    for mode, weight, bias in (
        (None, split(0), {}),
        ("column", split(0), split(0)),
        ("row", split(1), {"sequence_parallel": False}),
    ):
        module = te.GroupedLinear(2, 64, 32, parallel_mode=mode)
        assert said(module.weight1) == weight and said(module.bias1) == bias
