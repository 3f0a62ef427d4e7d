"""Attention in FP8 and MXFP8, against the formula with every tensor quantized by hand."""

import contextlib

import pytest
import torch

import nvfp4
import nvfp4.te as te
from nvfp4.te.custom_recipes import quantizer_factories as factories
from nvfp4.te.custom_recipes.quantizer_factory_zoo import nvfp4_linear_fp8_dpa_factory

BATCH, QUERIES, KEYS, HEADS, GROUPS, SIZE = 2, 40, 48, 4, 2, 32
SLOTS = ("qkv", "s", "o", "do", "dp", "dqkv")
SCALE = SIZE**-0.5


def tensors(dtype=torch.float32, keys=KEYS):
    generator = torch.Generator().manual_seed(5)
    shapes = [(BATCH, QUERIES, HEADS, SIZE)] + 2 * [(BATCH, keys, GROUPS, SIZE)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    # Later tokens are smaller, so that blocks along tokens differ from blocks along features.
    made = [x * 0.8 ** torch.arange(x.shape[1])[:, None, None] for x in made]
    return [x.to(dtype).requires_grad_() for x in made]


def weights(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)


def by_rows(x, spec, axis):
    """What the codes of a tensor stand for, with blocks along an axis."""
    turned = x.transpose(axis, -1).contiguous()
    quantizer = nvfp4.Quantizer(spec=spec, directions="row")
    made = quantizer.quantize(turned.reshape(-1, turned.shape[-1]).float())
    return made.dequantize(torch.float32).reshape(turned.shape).transpose(axis, -1)


def formula(q, k, v, d_o, specs, visible=None, bias=None):
    """O and the gradients of Q, K, V, of [batch, tokens, heads, features]; ``specs`` by slots."""
    q, k, v, d_o = (x.detach().transpose(1, 2).double() for x in (q, k, v, d_o))
    each = HEADS // GROUPS
    groups = [slice(h // each, h // each + 1) for h in range(HEADS)]

    def shared(x):
        return torch.cat([x[:, group] for group in groups], 1)

    def quantized(slot, x, axis):
        return x if slot not in specs else by_rows(x, specs[slot], axis).double()

    def packed(slot, tensors, axes):
        if slot not in specs or specs[slot].startswith("mxfp8"):
            return [quantized(slot, x, axis) for x, axis in zip(tensors, axes)]
        flat = quantized(slot, torch.cat([x.flatten() for x in tensors])[None], -1)[0]
        parts = flat.split([x.numel() for x in tensors])
        return [part.reshape(x.shape) for part, x in zip(parts, tensors)]

    qf, kf, vt = packed("qkv", (q, k, v), (-1, -1, -2))
    qt, kt, vf = packed("qkv", (q, k, v), (-2, -2, -1))
    scores = qf @ shared(kf).mT * SCALE
    scores = scores if bias is None else scores + bias.double()
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    p = scores.softmax(-1)
    o = quantized("s", p, -1) @ shared(vt)
    rows = o.transpose(1, 2).flatten(2)
    o = quantized("o", rows, -1)
    dv = quantized("s", p, -2).mT @ quantized("do", d_o, -2)
    dp = quantized("do", d_o, -1) @ shared(vf).mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dq = quantized("dp", ds, -1) @ shared(kt) * SCALE
    dk = quantized("dp", ds, -2).mT @ qt * SCALE
    dk, dv = (x.unflatten(1, (GROUPS, each)).sum(2) for x in (dk, dv))
    if specs.get("dqkv", "").startswith("mxfp8"):
        grads = [quantized("dqkv", x.transpose(1, 2).flatten(2), -1) for x in (dq, dk, dv)]
        grads = [g.unflatten(2, (-1, SIZE)) for g in grads]
    else:
        grads = [x.transpose(1, 2) for x in packed("dqkv", (dq, dk, dv), (-1, -1, -1))]
    return [o, *grads]


def attended(recipe, q, k, v, mask="no_mask", dropout=0.0, **given):
    module = te.DotProductAttention(
        HEADS, SIZE, num_gqa_groups=GROUPS, attention_dropout=dropout, qkv_format="bshd",
        attn_mask_type=mask,
    )  # fmt: skip
    with te.autocast(recipe=recipe):
        y = module(q, k, v, **given)
    return module, y


def distance(made, expected):
    expected = expected.to(made.dtype)
    return ((made - expected).norm() / expected.norm()).item()


CURRENT = dict(zip(SLOTS, 3 * ["fp8(e4m3)"] + 3 * ["fp8(e5m2)"]))
BLOCKS = dict.fromkeys(SLOTS, "mxfp8(e4m3)")
RECIPES = {
    "current": (lambda: te.Float8CurrentScaling(fp8_dpa=True), CURRENT),
    "current in E4M3": (
        lambda: te.Float8CurrentScaling(fp8_format=te.Format.E4M3, fp8_dpa=True),
        dict.fromkeys(SLOTS, "fp8(e4m3)"),
    ),
    "mxfp8": (lambda: te.MXFP8BlockScaling(fp8_dpa=True), BLOCKS),
    "mxfp8 with squares": (
        lambda: te.MXFP8BlockScaling(fp8_dpa=True, enable_2d_quantization=True), BLOCKS,
    ),
    "factory": (lambda: te.CustomRecipe(factories.mxfp8_factory, fp8_dpa=True), BLOCKS),
    "preset": (lambda: "current_scaling+attention", CURRENT),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_tensor_is_quantized_as_the_recipe_says(name):
    """Within what a code that is rounded the other way makes; without the quantization of any one
    tensor the result is further away.
    """
    make, specs = RECIPES[name]
    q, k, v = tensors()
    _, y = attended(make(), q, k, v)
    d_o = weights(y)
    found = [y, *torch.autograd.grad(y, (q, k, v), d_o)]
    d_o = d_o.unflatten(2, (HEADS, SIZE))
    for made, expected in zip(found, formula(q, k, v, d_o, specs)):
        assert distance(made, expected) < 2e-3
    changes = {"qkv": 0, "s": 0, "o": 0, "do": 3, "dp": 1, "dqkv": 1}
    for slot, at in changes.items():
        without = {of: spec for of, spec in specs.items() if of != slot}
        assert distance(found[at], formula(q, k, v, d_o, without)[at]) > 8e-3, slot


@pytest.mark.parametrize(
    "mask, window", [("causal_bottom_right", None), ("no_mask", (5, 3)), ("padding", None)]
)
def test_masks_and_windows_hide_the_same_keys(mask, window):
    q, k, v = tensors()
    row, column = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
    between = row - column + KEYS - QUERIES
    lengths = torch.tensor([30, KEYS]).reshape(BATCH, 1, 1, 1)
    visible = {
        "causal_bottom_right": between >= 0,
        "no_mask": (between <= 5) & (between >= -3),
        "padding": (column < lengths).expand(BATCH, 1, QUERIES, KEYS),
    }[mask]
    given = {"window_size": window}
    if mask == "padding":
        queries = torch.zeros(BATCH, 1, 1, QUERIES, dtype=torch.bool)
        given["attention_mask"] = (queries, (torch.arange(KEYS) >= lengths))
    _, y = attended(te.Float8CurrentScaling(fp8_dpa=True), q, k, v, mask, **given)
    d_o = weights(y)
    found = [y, *torch.autograd.grad(y, (q, k, v), d_o)]
    expected = formula(q, k, v, d_o.unflatten(2, (HEADS, SIZE)), CURRENT, visible)
    for made, right in zip(found, expected):
        assert distance(made, right) < 2e-3


def test_biases_sinks_and_queries_that_see_nothing():
    """What is not quantized follows the formula of high precision, whose result is near."""
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(1, HEADS, QUERIES, KEYS, generator=generator, requires_grad=True)
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.bool)
    mask[:, :, 3] = True  # sees no key
    for softmax in ("vanilla", "off-by-one", "learnable"):
        module = te.DotProductAttention(
            HEADS, SIZE, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type="arbitrary",
            softmax_type=softmax, return_max_logit=True,
        )  # fmt: skip
        inputs = [q, k, v, bias] + list(module.parameters())
        given = dict(core_attention_bias_type="post_scale_bias", core_attention_bias=bias)

        def run(region):
            with region:
                y, logit = module(q, k, v, mask, **given)
            return [y, logit, *torch.autograd.grad(y, inputs, weights(y))]

        plain = run(contextlib.nullcontext())
        made = run(te.autocast(recipe=te.Float8CurrentScaling(fp8_dpa=True)))
        assert torch.all(made[0][:, 3] == 0)
        for one, other in zip(made, plain):
            assert 1e-4 < distance(one, other) < 0.2, softmax


def test_dropout_drops_the_same_in_both_passes():
    """O is linear in V: with the numbers that were drawn, its gradient has the same terms."""
    recipe = te.MXFP8BlockScaling(fp8_dpa=True)
    q, k, v = tensors()
    torch.manual_seed(3)
    _, y = attended(recipe, q, k, v, dropout=0.5)
    _, other = attended(recipe, q, k, v, dropout=0.5)
    assert not torch.equal(y, other)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        _, y = attended(recipe, q, k, v, dropout=0.5, checkpoint_core_attention=checkpointed)
        grads.append([y, *torch.autograd.grad(y, (q, k, v), weights(y))])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # The sum of y∘w is that of v∘dv, but for what rounding v, dO, O and dV changes.
    y, _, _, dv = grads[0]
    left, right = (y * weights(y)).sum(), (v * dv).sum()
    assert abs(left - right) < 5e-3 * y.norm() * weights(y).norm(), (left, right)


def test_delayed_scaling_keeps_a_history_for_every_tensor():
    """Scales begin at 1, and follow from the amaxes of a pass at its end."""
    recipe = te.DelayedScaling(amax_history_len=4, fp8_dpa=True)
    q, k, v = tensors()
    module, y = attended(recipe, q, k, v)
    scales = dict(module.delayed.named_children())
    forward = {"qkv", "s", "o"}
    assert {slot for slot, of in scales.items() if of.scale.item() != 1} == forward
    y.backward(weights(y))
    assert set(scales) == set(SLOTS) and all(of.scale.item() != 1 for of in scales.values())
    packed = torch.cat([x.flatten() for x in (q, k, v)])
    amaxes = {"qkv": packed.abs().max(), "do": weights(y).abs().max()}
    amaxes = {slot: of.history[-1].clone() for slot, of in scales.items()} | amaxes
    assert all(amax > 0 for amax in amaxes.values()) and amaxes["s"] <= 1
    for slot, of in scales.items():
        largest = 448 if slot in forward else 57344
        torch.testing.assert_close(of.scale[0], largest / amaxes[slot])
    # A state dict has it, and another module goes on from there.
    other = te.DotProductAttention(
        HEADS, SIZE, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type="no_mask"
    )
    other.load_state_dict(module.state_dict())
    with te.autocast(recipe=recipe):
        torch.testing.assert_close(other(q, k, v), module(q, k, v), rtol=0, atol=0)


def test_evaluation_leaves_histories_alone():
    recipe = te.DelayedScaling(fp8_dpa=True)
    q, k, v = tensors()
    with torch.no_grad():
        module, _ = attended(recipe, q, k, v)
    assert all(of.history.count_nonzero() == 0 for of in module.delayed.children())


def multihead(**given):
    torch.manual_seed(0)
    return te.MultiheadAttention(
        HEADS * SIZE, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, fuse_qkv_params=True,
        attn_mask_type="no_mask", name="m", **given,
    )  # fmt: skip


def test_the_projection_reads_the_output_as_it_was_quantized():
    """Its product is that of the codes, with the scale that attention took."""
    x = torch.randn(QUERIES, BATCH, HEADS * SIZE, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        module = multihead(bias=False, params_dtype=dtype)
        seen = []
        module.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with te.autocast(recipe=te.Float8CurrentScaling(fp8_dpa=True)):
            y = module(x.to(dtype))
        o, weight = seen[0].detach().flatten(0, 1), module.proj.weight.detach()
        # What attention gave is what codes stand for, and the largest of them is the largest code.
        spec = dict(spec="fp8(e4m3)", directions="row")
        codes = nvfp4.Quantizer(**spec).quantize(o, amax=seen[0]._nvfp4_given.amax)
        torch.testing.assert_close(codes.dequantize(dtype), o, rtol=0, atol=0)
        product = nvfp4.matmul(codes.row, nvfp4.Quantizer(**spec).quantize(weight).row, dtype=dtype)
        torch.testing.assert_close(y.flatten(0, 1), product, rtol=0, atol=0)


@pytest.mark.parametrize("mha, rotary", [(False, False), (True, False), (True, True)])
def test_what_is_handed_over_is_not_quantized_again(mha, rotary):
    """A linear layer remembers no amax of what it is handed over quantized."""
    module, x = multihead(), torch.randn(QUERIES, BATCH, HEADS * SIZE)
    angles = te.RotaryPositionEmbedding(SIZE)(QUERIES) if rotary else None
    with te.autocast(recipe=te.DelayedScaling(fp8_dpa=True, fp8_mha=mha)):
        y = module(x.requires_grad_(), rotary_pos_emb=angles)
    y.sum().backward()

    def saw(part, slot):
        return getattr(part.delayed, slot).history[-1].item() > 0

    assert all(saw(module.core_attention, slot) for slot in SLOTS)
    assert not saw(module.proj, "input") and saw(module.proj, "grad_output")
    assert saw(module.qkv, "input") and saw(module.qkv, "grad_output") is not (mha and not rotary)


def test_gradients_are_handed_over_in_the_codes_of_attention():
    """The gradient of the weight before attention is the product of those codes."""
    module, x = multihead(bias=False), torch.randn(QUERIES, BATCH, HEADS * SIZE)
    recipe, seen = te.DelayedScaling(fp8_dpa=True, fp8_mha=True), []
    module.qkv.register_forward_hook(lambda _, __, y: y.register_hook(seen.append) and None)
    for _ in range(2):
        module.zero_grad()
        with te.autocast(recipe=recipe):
            module(x).sin().sum().backward()
    scale = module.core_attention.delayed.dqkv.scale
    assert scale.item() != 1 and scale.item() != module.qkv.delayed.grad_output.scale.item()
    gradient = seen[-1].flatten(0, 1)
    codes = nvfp4.Quantizer(spec="fp8-delayed(e5m2)", directions="column").quantize(
        gradient, scale=scale
    )
    read = nvfp4.Quantizer(spec="fp8-delayed(e4m3)", directions="column").quantize(
        x.flatten(0, 1), scale=module.qkv.delayed.input.scale
    )
    product = nvfp4.matmul(codes.column, read.column, dtype=torch.float32)
    torch.testing.assert_close(module.qkv.weight.grad, product, rtol=0, atol=0)


ROLES = tuple(f"dpa/{slot}/m.core_attention" for slot in ("qkv", "s", "do", "dp"))


@pytest.mark.parametrize("flags", [{}, {"fp8_dpa": True}, {"fp8_dpa": True, "fp8_mha": True}])
def test_factories_are_asked_with_the_roles_of_attention(flags):
    asked = []

    def factory(role):
        asked.append(f"{role.module_type}/{role.tensor_type}/{role.name}")
        return factories.delayed_scaling_factory(role)

    module, x = multihead(), torch.randn(QUERIES, BATCH, HEADS * SIZE)
    with te.autocast(recipe=te.CustomRecipe(factory, **flags)):
        module(x).sum().backward()
    slots = ("input", "weight", "grad_output")
    linear = [f"linear/{slot}/m.{part}" for part in ("linear_qkv", "proj") for slot in slots]
    edges = ["//m.core_attention.dpa_output", "//m.core_attention.dpa_grad_input"]
    if "fp8_mha" in flags:
        edges = ["linear/input/m.proj", "linear/grad_output/m.linear_qkv"]
    assert sorted(asked) == sorted([*linear, *(ROLES if flags else ()), *(edges if flags else ())])


@pytest.mark.parametrize("mha", [False, True])
def test_a_factory_gives_what_the_recipe_gives(mha):
    """Delayed scaling from requests has the numbers of the recipe. Without fp8_mha a factory's
    attention hands nothing over, so there the output alone is compared.
    """
    flags, x = {"fp8_dpa": True, "fp8_mha": mha}, torch.randn(QUERIES, BATCH, HEADS * SIZE)
    found = []
    factory = te.CustomRecipe(factories.delayed_scaling_factory, **flags)
    for recipe in (te.DelayedScaling(**flags), factory):
        module = multihead() if mha else te.DotProductAttention(
            HEADS, SIZE, num_gqa_groups=GROUPS, qkv_format="bshd", attn_mask_type="no_mask"
        )  # fmt: skip
        inputs = [x.clone().requires_grad_()] if mha else tensors()
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = module(*inputs)
            grads = torch.autograd.grad(y.sin().sum(), inputs)
        found.append([y, *grads])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nvfp4_with_fp8_attention():
    """The zoo's factory is the preset of the same name."""
    x, found = torch.randn(QUERIES, BATCH, HEADS * SIZE), []
    factory = te.CustomRecipe(nvfp4_linear_fp8_dpa_factory, fp8_dpa=True)
    for recipe in (factory, "nvfp4_linear_fp8_dpa"):
        module = multihead()
        for _ in range(2):
            with te.autocast(recipe=recipe), torch.no_grad():
                y = module(x)
        found.append(y)
        assert [str(of.spec) for of in module.core_attention.delayed.children()] == [
            "fp8-delayed(e4m3, history=1, most-recent)",
            "fp8-delayed(e5m2, history=1, most-recent)",
        ]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, factory",
    [
        ("Float8CurrentScaling", nvfp4_linear_fp8_dpa_factory),
        ("MXFP8BlockScaling", lambda role: NVFP4_AND_MXFP8[role.module_type == "linear"](role)),
        ("DelayedScaling", lambda role: NVFP4_AND_DELAYED[role.module_type == "linear"](role)),
    ],
)  # fmt: skip
def test_a_variable_names_the_recipe_of_attention(name, factory, monkeypatch):
    """It has the numbers of a factory that gives attention these formats."""
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", name)
    if name == "MXFP8BlockScaling":  # whose factory has E4M3 in both passes
        monkeypatch.setenv("NVTE_DPA_FP8_FORMAT", "E4M3")
    named = te.NVFP4BlockScaling(fp8_dpa=True)
    monkeypatch.delenv("NVTE_DPA_FP8_RECIPE")
    found = []
    for recipe in (named, te.CustomRecipe(factory, fp8_dpa=True)):
        torch.manual_seed(4)
        module, x = multihead(), torch.randn(QUERIES, BATCH, HEADS * SIZE, requires_grad=True)
        for _ in range(3):
            torch.manual_seed(8)
            module.zero_grad()
            with te.autocast(recipe=recipe):
                y = module(x)
            gradients = torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])
        found.append([y, *gradients])
        kinds = [type(one).__name__ for one in module.core_attention.fp8_meta["local_recipes"]]
        assert kinds == [name, *["DelayedScaling"] * (name == "Float8CurrentScaling")]
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _last(role):
    return te.DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")


NVFP4_AND_MXFP8 = (factories.mxfp8_factory, factories.nvfp4_factory)
NVFP4_AND_DELAYED = (_last, factories.nvfp4_factory)


def test_a_variable_says_what_attention_hands_over(monkeypatch):
    x = torch.randn(QUERIES, BATCH, HEADS * SIZE, requires_grad=True)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    for variable, output, both in (
        (None, False, False), ("NVTE_DPA_FP8_RECIPE_DPA", True, False),
        ("NVTE_DPA_FP8_RECIPE_MHA", True, True),
    ):  # fmt: skip
        if variable is not None:
            monkeypatch.setenv(variable, "1")
        module = multihead()
        with te.autocast(recipe=te.DelayedScaling(fp8_dpa=True)):
            module(x).sum().backward()
        assert (module.proj.delayed.input.history[-1].item() > 0) is not output
        assert (module.qkv.delayed.grad_output.history[-1].item() > 0) is not both


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_another_backward_pass_is_that_of_attention_too(backward):
    q, k, v = tensors()
    _, y = attended(te.Float8CurrentScaling(fp8_dpa=True, backward_override=backward), q, k, v)
    d_o = weights(y)
    grads = torch.autograd.grad(y, (q, k, v), d_o)
    d_o = d_o.unflatten(2, (HEADS, SIZE))
    if backward == "dequantized":
        expected = formula(q, k, v, d_o, {slot: CURRENT[slot] for slot in ("qkv", "s")})
    else:
        expected = formula(q, k, v, d_o, {})
    for made, right in zip(grads, expected[1:]):
        assert distance(made, right) < 2e-3


def test_checkpoints_compute_the_same_again():
    """With torch's, outside of the region, and with te's."""
    x, found = torch.randn(QUERIES, BATCH, HEADS * SIZE), []
    ways = [
        lambda module, x: module(x),
        lambda module, x: te.checkpoint(module, x, use_reentrant=False),
        lambda module, x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False),
    ]
    for way in ways:
        module = multihead()
        for _ in range(3):
            module.zero_grad()
            with te.autocast(recipe=te.DelayedScaling(fp8_dpa=True, fp8_mha=True)):
                y = way(module, x)
            y.sin().sum().backward()
        found.append([y, *(parameter.grad for parameter in module.parameters())])
    for other in found[1:]:
        for one, two in zip(found[0], other):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_what_is_not_finite_is_named():
    q, k, v = tensors()
    recipe = nvfp4.Recipe("current_scaling+attention").with_finite("refuse")
    with torch.no_grad():
        q[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="attention:qkv"):
        attended(recipe, q, k, v)


def test_compiled_modules_leave_the_graph_for_it():
    torch._dynamo.reset()
    module, x = multihead(), torch.randn(QUERIES, BATCH, HEADS * SIZE)
    compiled = torch.compile(module, backend="eager")
    for recipe in (te.Float8CurrentScaling(fp8_dpa=True), te.MXFP8BlockScaling(fp8_dpa=True)):
        with te.autocast(recipe=recipe):
            torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    torch._dynamo.reset()
    whole = torch.compile(module, backend="eager", fullgraph=True)
    with te.autocast(recipe=te.MXFP8BlockScaling()):  # attention in high precision is in the graph
        torch.testing.assert_close(whole(x), module(x))
    with te.autocast(recipe=recipe):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fp8_dpa"):
            whole(x)


def test_a_backward_pass_after_the_next_region_has_the_scales_of_its_own():
    """What the forward pass made is made again with the scales that it had, and the step under way
    does not see it.
    """
    recipe, grads = te.DelayedScaling(fp8_dpa=True), []
    for between in (False, True):
        q, k, v = tensors()
        module, y = attended(recipe, q, k, v)
        if between:
            smaller = [x.detach().div(2).requires_grad_() for x in (q, k, v)]
            with te.autocast(recipe=recipe):
                module(*smaller)
            assert module.delayed.qkv.scale.item() != 1
        grads.append(torch.autograd.grad(y, (q, k, v), weights(y)))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    largest = max(x.abs().max().item() for x in smaller)
    assert module.delayed.qkv.history[-1].item() == largest


def test_packed_sequences_are_padded_ones():
    lengths, recipe = [9, 17, 4], te.MXFP8BlockScaling(fp8_dpa=True)
    generator = torch.Generator().manual_seed(9)
    packed = [torch.randn(30, heads, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    ends = torch.tensor([0, 9, 26, 30], dtype=torch.int32)
    padded = [torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True) for x in packed]
    hidden = torch.arange(17) >= torch.tensor(lengths)[:, None]
    _, y = attended(recipe, *padded, mask="padding_causal", attention_mask=hidden[:, None, None])
    _, other = attended(
        recipe, *packed, mask="padding_causal", qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends
    )  # fmt: skip
    torch.testing.assert_close(other, y[~hidden], rtol=0, atol=0)


def test_a_cache_of_keys_gives_what_whole_sequences_give():
    """Causal attention of MXFP8, whose blocks along features do not depend on other tokens. Those of
    values lie along tokens, so they are near.
    """
    torch.manual_seed(0)
    module = te.MultiheadAttention(
        HEADS * SIZE, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal",
    ).eval()  # fmt: skip
    x = torch.randn(BATCH, 12, HEADS * SIZE)
    cache = te.InferenceParams(BATCH, 16, GROUPS, SIZE, torch.float32)
    with torch.no_grad(), te.autocast(recipe=te.MXFP8BlockScaling(fp8_dpa=True)):
        expected, made, done = module(x), [], 0
        for count in (8, 1, 3):
            cache.pre_step({0: count, 1: count})
            part = x[:, done : done + count]
            made.append(module(part, attn_mask_type="padding_causal", inference_params=cache))
            done += count
    assert distance(torch.cat(made, 1), expected) < 0.05


def test_modules_show_the_quantizers_of_attention():
    """As TransformerEngine numbers them: QKV, O, S forward, dQKV, dO, dP backward, each several
    times. Scales of earlier steps are the module's own.
    """
    q, k, v = tensors()
    module, y = attended(te.CustomRecipe(nvfp4_linear_fp8_dpa_factory, fp8_dpa=True), q, k, v)
    y.backward(weights(y))
    kinds = {key: [type(of).__name__ for of in made] for key, made in module.quantizers.items()}
    current, delayed = "Float8CurrentScalingQuantizer", "Float8Quantizer"
    assert kinds == {
        "scaling_fwd": [current] * 6 + [delayed] * 3,
        "scaling_bwd": [current] * 4 + [delayed] * 2,
    }
    module.delayed.s.scale.fill_(7)
    module.delayed.dp.scale.fill_(9)
    assert module.quantizers["scaling_fwd"][8].scale.item() == 7
    assert module.quantizers["scaling_bwd"][5].scale.item() == 9
    roles = module.get_quantizer_roles(fwd=True, num_quantizers=9)
    assert [role.tensor_type for role in roles] == ["qkv"] * 3 + [""] * 3 + ["s"] * 3
    assert roles[3].name == "dpa_output"
