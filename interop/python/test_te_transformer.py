"""TransformerEngine's attention modules and layers against torch's operations."""

import math

import pytest
import torch
from torch.nn import functional

import nvfp4.te as te

SIZE, HEADS, GROUPS, WIDE = 64, 4, 2, 96
FEATURES = SIZE // HEADS


@pytest.fixture
def x():
    return torch.randn(16, 2, SIZE, generator=torch.Generator().manual_seed(2))


def begin(module):
    """Numbers that tell everything apart: large weights, no zeros."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * (0.2 if parameter.ndim == 2 else 0.5)
            )
    return module


def norm(state, x, prefix, kind="LayerNorm", centre=0.0):
    weight = state[f"{prefix}weight"] + centre
    if kind == "RMSNorm":
        return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
    return functional.layer_norm(x, x.shape[-1:], weight, state[f"{prefix}bias"], 1e-5)


def part(state, name, x):
    return functional.linear(x, state[f"{name}_weight"], state.get(f"{name}_bias"))


def attend(q, k, v, causal):
    """Of [tokens, sequences, heads·features]."""

    def heads(t):
        return t.reshape(*t.shape[:2], -1, FEATURES).permute(1, 2, 0, 3)

    q, k, v = heads(q), heads(k), heads(v)
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(FEATURES)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def self_attention(state, x, prefix="", normed=True, **kind):
    at = f"{prefix}layernorm_qkv." if normed else f"{prefix}qkv."
    inside = norm(state, x, f"{at}layer_norm_", **kind) if normed else x
    q, k, v = (part(state, f"{at}{name}", inside) for name in ("query", "key", "value"))
    y = attend(q, k, v, True)
    return functional.linear(y, state[f"{prefix}proj.weight"], state[f"{prefix}proj.bias"]), inside


def cross_attention(state, x, encoder, prefix=""):
    at = f"{prefix}layernorm_query."
    q = part(state, f"{at}query", norm(state, x, f"{at}layer_norm_"))
    k, v = (part(state, f"{prefix}key_value.{name}", encoder) for name in ("key", "value"))
    return functional.linear(
        attend(q, k, v, False), state[f"{prefix}proj.weight"], state[f"{prefix}proj.bias"]
    )


def mlp(state, x, prefix="layernorm_mlp.", **kind):
    inside = norm(state, x, f"{prefix}layer_norm_", **kind)
    y = functional.linear(inside, state[f"{prefix}fc1_weight"], state[f"{prefix}fc1_bias"])
    return functional.linear(
        functional.gelu(y, approximate="tanh"),
        state[f"{prefix}fc2_weight"],
        state[f"{prefix}fc2_bias"],
    ), inside


def same(module, made, expected, x):
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    inputs = [x, *module.parameters()]
    weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(6))
    grads = (
        torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (made, expected)
    )
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-4 + 1e-3 * theirs.abs().max().item()
        )


def state_of(module):
    return dict(module.named_parameters())


LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.layernorm_qkv.query_weight",
    "self_attention.layernorm_qkv.query_bias",
    "self_attention.layernorm_qkv.key_weight",
    "self_attention.layernorm_qkv.key_bias",
    "self_attention.layernorm_qkv.value_weight",
    "self_attention.layernorm_qkv.value_bias",
    "self_attention.proj.weight",
    "self_attention.proj.bias",
    "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.layer_norm_bias",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc1_bias",
    "layernorm_mlp.fc2_weight",
    "layernorm_mlp.fc2_bias",
}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_a_layer_is_attention_and_an_mlp(x, kind, centred):
    layer = begin(
        te.TransformerLayer(
            SIZE, WIDE, HEADS, GROUPS, normalization=kind, zero_centered_gamma=centred, **QUIET
        )
    )
    state, x = state_of(layer), x.requires_grad_()
    assert set(state) == {
        name for name in LAYER if kind == "LayerNorm" or not name.endswith("layer_norm_bias")
    }
    settings = {"kind": kind, "centre": 1.0 if centred else 0.0}
    y = x + self_attention(state, x, "self_attention.", **settings)[0]
    same(layer, layer(x), y + mlp(state, y, **settings)[0], x)


@pytest.mark.parametrize(
    "settings",
    ["parallel_attention_mlp", "output_layernorm", "apply_residual_connection_post_layernorm"],
)
def test_where_norms_and_residuals_are(x, settings):
    layer = begin(te.TransformerLayer(SIZE, WIDE, HEADS, GROUPS, **{settings: True}, **QUIET))
    state, x = state_of(layer), x.requires_grad_()
    a, inside = self_attention(state, x, "self_attention.", normed=settings != "output_layernorm")
    if settings == "parallel_attention_mlp":
        expected = x + a + mlp(state, x)[0]
    elif settings == "output_layernorm":
        expected = norm(state, x + a + mlp(state, x + a)[0], "layernorm.")
    else:
        m, middle = mlp(state, inside + a)
        expected = middle + m
    same(layer, layer(x), expected, x)


def test_a_decoder_attends_to_an_encoder(x):
    layer = begin(te.TransformerLayer(SIZE, WIDE, HEADS, GROUPS, layer_type="decoder", **QUIET))
    state, x = state_of(layer), x.requires_grad_()
    encoder = torch.randn(10, 2, SIZE, generator=torch.Generator().manual_seed(3))
    assert {name for name in state if name.startswith("inter_attention")} == {
        f"inter_attention.{name}"
        for name in (
            "layernorm_query.layer_norm_weight",
            "layernorm_query.layer_norm_bias",
            "layernorm_query.query_weight",
            "layernorm_query.query_bias",
            "key_value.key_weight",
            "key_value.key_bias",
            "key_value.value_weight",
            "key_value.value_bias",
            "proj.weight",
            "proj.bias",
        )
    }
    y = x + self_attention(state, x, "self_attention.")[0]
    y = y + cross_attention(state, y, encoder, "inter_attention.")
    same(layer, layer(x, encoder_output=encoder), y + mlp(state, y)[0], x)
    with pytest.raises(ValueError, match="needs encoder_output"):
        layer(x)
    with pytest.raises(NotImplementedError, match="the argument inference_params is not supported"):
        layer(x, encoder_output=encoder, inference_params=object())


@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_one_weight_for_queries_keys_and_values(x, attention_type, interleaved):
    """Interleaved, rows lie group by group: the group's queries, its key, its value."""
    settings = {
        "num_gqa_groups": GROUPS,
        "attention_dropout": 0.0,
        "attention_type": attention_type,
    }
    split = begin(te.MultiheadAttention(SIZE, HEADS, **settings))
    fused = te.MultiheadAttention(
        SIZE, HEADS, fuse_qkv_params=True, qkv_weight_interleaved=interleaved, **settings
    )
    state, names = (
        split.state_dict(),
        ("query", "key", "value") if attention_type == "self" else ("key", "value"),
    )
    at = "qkv" if attention_type == "self" else "key_value"
    for kind in ("weight", "bias"):
        parts = [state.pop(f"{at}.{name}_{kind}") for name in names]
        if interleaved:
            parts = [
                torch.cat([p.reshape(GROUPS, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 1)
            ]
        state[f"{at}.{kind}"] = torch.cat(parts)
    fused.load_state_dict(state)
    other = (
        (None, torch.randn(10, 2, SIZE, generator=torch.Generator().manual_seed(3)))
        if attention_type == "cross"
        else ()
    )
    torch.testing.assert_close(
        fused(x, *other, attn_mask_type="no_mask"), split(x, *other, attn_mask_type="no_mask")
    )


def test_what_attention_returns(x):
    plain = te.MultiheadAttention(SIZE, HEADS, attention_dropout=0.0, input_layernorm=True)
    more = te.MultiheadAttention(
        SIZE,
        HEADS,
        attention_dropout=0.0,
        input_layernorm=True,
        return_bias=True,
        return_layernorm_output=True,
    )
    more.load_state_dict(begin(plain).state_dict())
    y, bias, inside = more(x)
    torch.testing.assert_close(y + bias, plain(x))
    torch.testing.assert_close(inside, norm(state_of(plain), x, "layernorm_qkv.layer_norm_"))


@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("before", [True, False])
def test_queries_and_keys_are_normed_and_turned(x, kind, before):
    module = begin(
        te.MultiheadAttention(
            SIZE,
            HEADS,
            attention_dropout=0.0,
            qk_norm_type=kind,
            qk_norm_eps=1e-5,
            qk_norm_before_rope=before,
        )
    )
    state, freqs = state_of(module), te.RotaryPositionEmbedding(FEATURES)(16)
    assert ("q_norm.weight" in state) == (kind != "L2Normalization")

    def normed(t, name):
        if kind == "L2Normalization":
            return t * (t.square().sum(-1, keepdim=True) + 1e-5).rsqrt()
        return norm(state, t, f"{name}_norm.", kind)

    def turned(t):
        return te.apply_rotary_pos_emb(t, freqs)

    q, k, v = (
        part(state, f"qkv.{name}", x).unflatten(-1, (HEADS, FEATURES))
        for name in ("query", "key", "value")
    )
    q, k = (
        (turned(normed(t, n)) if before else normed(turned(t), n)) for t, n in ((q, "q"), (k, "k"))
    )
    y = attend(q.flatten(2), k.flatten(2), v.flatten(2), True)
    torch.testing.assert_close(
        module(x, rotary_pos_emb=freqs),
        functional.linear(y, state["proj.weight"], state["proj.bias"]),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts_and_padding(x, layout):
    settings = {"self_attn_mask_type": "padding_causal", **QUIET}
    layer = begin(te.TransformerLayer(SIZE, WIDE, HEADS, **settings))
    other = te.TransformerLayer(SIZE, WIDE, HEADS, attn_input_format=layout, **settings)
    other.load_state_dict(layer.state_dict())
    freqs = te.RotaryPositionEmbedding(FEATURES)(16)
    lengths = [16, 11]
    mask = torch.tensor([[token >= length for token in range(16)] for length in lengths])[
        :, None, None
    ]
    expected = layer(x, mask, rotary_pos_emb=freqs)
    if layout == "bshd":
        torch.testing.assert_close(
            other(x.transpose(0, 1), mask, rotary_pos_emb=freqs).transpose(0, 1), expected
        )
        return
    packed = torch.cat([x[:length, b] for b, length in enumerate(lengths)])
    made = other(
        packed, cu_seqlens_q=torch.tensor([0, 16, 27], dtype=torch.int32), rotary_pos_emb=freqs
    )
    torch.testing.assert_close(
        made, torch.cat([expected[:length, b] for b, length in enumerate(lengths)])
    )


def test_tokens_that_come_one_by_one(x):
    layers = [
        begin(te.TransformerLayer(SIZE, WIDE, HEADS, GROUPS, layer_number=n, **QUIET)).eval()
        for n in (1, 2)
    ]
    freqs = te.RotaryPositionEmbedding(FEATURES)(16)

    def run(x, **settings):
        for layer in layers:
            x = layer(x, rotary_pos_emb=freqs, **settings)
        return x

    with torch.no_grad():
        expected = run(x)
        cache = te.InferenceParams(2, 16, GROUPS, FEATURES, torch.float32, qkv_format="sbhd")
        made, done = [], 0
        for count in (10, 1, 1, 1, 1, 1, 1):
            cache.pre_step({0: count, 1: count})
            made.append(
                run(
                    x[done : done + count],
                    self_attn_mask_type="padding_causal",
                    inference_params=cache,
                )
            )
            done += count
    torch.testing.assert_close(torch.cat(made), expected, rtol=1e-4, atol=1e-4)


def test_what_a_layer_adds_is_dropped(x):
    layer = begin(te.TransformerLayer(SIZE, WIDE, HEADS, drop_path_rate=0.5, **QUIET))
    torch.manual_seed(1)
    kept = ((layer(x) - x).abs().amax((1, 2)) > 0).tolist()
    assert 0 < sum(kept) < 16, "entries of the first dimension, both parts of which were dropped"
    assert ((layer.eval()(x) - x).abs().amax((1, 2)) > 0).all()
    layer = te.TransformerLayer(SIZE, WIDE, HEADS, hidden_dropout=1.0)
    assert torch.equal(layer(x), x) and not torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed_scaling"])
def test_layers_train_in_recipes(x, recipe):
    torch.manual_seed(3)
    model = torch.nn.ModuleList(
        te.TransformerLayer(
            SIZE, WIDE, HEADS, GROUPS, activation="swiglu", layer_number=n + 1, **QUIET
        )
        for n in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(6):
        with te.autocast(recipe=recipe):
            y = x
            for layer in model:
                y = layer(y)
        loss = (y - x.roll(1, 0)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_layer_is_one_graph(x):
    layer = te.TransformerLayer(SIZE, WIDE, HEADS, GROUPS, **QUIET)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for recipe in ("nvfp4", "mxfp8"):
        with torch.no_grad(), te.autocast(recipe=recipe):
            assert torch.equal(compiled(x), layer(x))


def test_a_state_dict_of_transformer_engine_loads():
    """It has an entry for the recipes of each module that computes."""
    layer = te.TransformerLayer(SIZE, WIDE, HEADS, layer_type="decoder", output_layernorm=True)
    computing = (
        "self_attention.qkv",
        "self_attention.core_attention",
        "self_attention.proj",
        "layernorm_mlp",
        "layernorm",
        "inter_attention.layernorm_query",
        "inter_attention.core_attention",
    )
    theirs = {
        **layer.state_dict(),
        **{f"{name}._extra_state": torch.zeros(3, dtype=torch.uint8) for name in computing},
    }
    assert not any(
        torch.nn.ModuleList([layer]).load_state_dict(
            {f"0.{name}": value for name, value in theirs.items()}
        )
    )
    with pytest.raises(RuntimeError, match="self_attention.more"):
        layer.load_state_dict({**theirs, "self_attention.more": torch.zeros(1)})


def test_a_layer_on_the_meta_device_becomes_real(x):
    layer = te.TransformerLayer(
        SIZE,
        WIDE,
        HEADS,
        device="meta",
        softmax_type="learnable",
        qk_norm_type="RMSNorm",
        output_layernorm=True,
    )
    assert all(p.is_meta for p in layer.parameters())
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(p.is_meta for p in layer.parameters())
    layer(x).sum().backward()


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (
            {"parallel_attention_mlp": True, "output_layernorm": True},
            ValueError,
            "parallel_attention_mlp needs",
        ),
        ({"fuse_wgrad_accumulation": True}, ValueError, "needs fuse_qkv_params=True"),
        ({"layer_type": "both"}, ValueError, "unknown layer_type 'both'"),
        ({"self_attn_mask_type": "some"}, ValueError, "unknown attn_mask_type 'some'"),
        ({"qk_norm_type": "some"}, ValueError, "unknown qk_norm_type 'some'"),
        (
            {"ub_tp_comm_overlap": True},
            NotImplementedError,
            "the argument ub_tp_comm_overlap is not supported",
        ),
        (
            {"tp_size": 7, "set_parallel_mode": True},
            ValueError,
            "does not divide among 7 workers",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        te.TransformerLayer(SIZE, WIDE, HEADS, **settings)
