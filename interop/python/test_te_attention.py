"""TransformerEngine's attention against a few lines of the formula."""

import contextlib
import itertools

import pytest
import torch

import nvfp4.te as te

BATCH, QUERIES, KEYS, HEADS, GROUPS, SIZE = 2, 6, 8, 4, 2, 8
# The lengths of two sequences.
OF_QUERIES, OF_KEYS = [6, 4], [7, 8]


def tensors(queries=QUERIES, keys=KEYS, groups=GROUPS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = [
        (BATCH, queries, HEADS, SIZE),
        (BATCH, keys, groups, SIZE),
        (BATCH, keys, groups, SIZE),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes
    ]


def formula(q, k, v, sees, scale=SIZE**-0.5, bias=None, sink=None):
    """[batch, tokens, heads·size]; ``sees(sequence, query, key)`` says what is seen."""
    heads = [(h, h * k.shape[2] // HEADS) for h in range(HEADS)]
    out = []
    for b, i in itertools.product(range(q.shape[0]), range(q.shape[1])):
        keys = [j for j in range(k.shape[1]) if sees(b, i, j)]
        for h, g in heads:
            if not keys:
                out.append(torch.zeros(SIZE, dtype=q.dtype))
                continue
            scores = k[b, keys, g] @ q[b, i, h] * scale
            scores = scores if bias is None else scores + bias(b, h, i, keys)
            extra = [] if sink is None else [sink[h].reshape(1).to(q.dtype)]
            out.append(torch.cat([scores, *extra]).softmax(0)[: len(keys)] @ v[b, keys, g])
    return torch.stack(out).reshape(q.shape[0], q.shape[1], HEADS * SIZE)


def same(made, expected, *inputs):
    torch.testing.assert_close(made, expected)
    weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(6), dtype=made.dtype)
    torch.testing.assert_close(
        torch.autograd.grad((made * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
    )


def hidden(lengths, most):
    return torch.tensor([[token >= length for token in range(most)] for length in lengths])[
        :, None, None, :
    ]


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def inside(b, i, j):
    return i < OF_QUERIES[b] and j < OF_KEYS[b]


def shift(b):
    return OF_KEYS[b] - OF_QUERIES[b]


ARBITRARY = torch.rand(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(7)) < 0.4
# What is seen, by mask, window and corner.
MASKS = {
    ("no_mask", None, None): lambda b, i, j: True, ("causal", None, None): lambda b, i, j: j <= i,
    ("causal_bottom_right", None, None): lambda b, i, j: j <= i + 2,
    ("padding", None, None): inside, ("padding_causal", None, None): lambda b, i,
    j: inside(b, i, j) and j <= i, ("causal,padding", None, None): lambda b, i,
    j: inside(b, i, j) and j <= i, ("padding_causal_bottom_right", None, None): lambda b, i,
    j: inside(b, i, j) and j <= i + shift(b), ("arbitrary", None, None): lambda b, i,
    j: not ARBITRARY[0, 0, i, j], ("no_mask", (2, 1), None): lambda b, i,
    j: i + 2 - 2 <= j <= i + 2 + 1, ("no_mask", (2, 1), False): lambda b, i, j: i - 2 <= j <= i + 1,
    ("causal", (2, 0), None): lambda b, i, j: i - 2 <= j <= i,
    ("causal_bottom_right", (3, 0), None): lambda b, i, j: i - 1 <= j <= i + 2,
    ("padding", (2, 1), None): lambda b, i,
    j: inside(b, i, j) and i + shift(b) - 2 <= j <= i + shift(b) + 1,
    ("padding", (2, 1), False): lambda b, i, j: inside(b, i, j) and i - 2 <= j <= i + 1,
    ("arbitrary", (2, 2), None): lambda b, i, j: not ARBITRARY[0, 0, i, j] and i <= j <= i + 4,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask, window, corner", MASKS)
def test_masks_windows_and_groups(mask, window, corner, layout):
    q, k, v = tensors()
    attention = te.DotProductAttention(
        HEADS, SIZE, num_gqa_groups=GROUPS, qkv_format=layout, attn_mask_type=mask,
        window_size=window, bottom_right_diagonal=corner, attention_type="cross",
    )  # fmt: skip
    given = {"arbitrary": ARBITRARY}.get(
        mask, (hidden(OF_QUERIES, QUERIES), hidden(OF_KEYS, KEYS)) if "padding" in mask else None
    )
    lay = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
    made = lay(attention(lay(q), lay(k), lay(v), given))
    same(made, formula(q, k, v, MASKS[mask, window, corner]), q, k, v)
    if "padding" in mask:
        lengths = {"cu_seqlens_q": cumulative(OF_QUERIES), "cu_seqlens_kv": cumulative(OF_KEYS)}
        assert torch.equal(lay(attention(lay(q), lay(k), lay(v), **lengths)), made), "by lengths"
    again = te.DotProductAttention(HEADS, SIZE, num_gqa_groups=GROUPS, attention_type="cross")
    later = again(
        lay(q),
        lay(k),
        lay(v),
        given,
        layout,
        attn_mask_type=mask,
        window_size=window,
        bottom_right_diagonal=corner,
    )
    assert torch.equal(lay(later), made), "asked for in the call"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_sequences_that_lie_one_after_another(mask, apart):
    q, k, v = tensors()
    expected = formula(q, k, v, MASKS[mask, None, None])

    def pack(x, lengths):
        parts = [x[b, :length] for b, length in enumerate(lengths)]
        gap = x.new_full((2, *x.shape[2:]), float("nan"))
        return torch.cat([piece for part in parts for piece in ((part, gap) if apart else (part,))])

    places = {}
    if apart:
        places = {
            "cu_seqlens_q_padded": cumulative([8, 6]),
            "cu_seqlens_kv_padded": cumulative([9, 10]),
            "pad_between_seqs": True,
        }
    attention = te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="thd", attn_mask_type=mask)
    packed = [pack(x, lengths) for x, lengths in ((q, OF_QUERIES), (k, OF_KEYS), (v, OF_KEYS))]
    lengths = {"cu_seqlens_q": cumulative(OF_QUERIES), "cu_seqlens_kv": cumulative(OF_KEYS)}
    made = attention(*packed, **lengths, **places)
    rows = [*range(6), *range(8, 12)] if apart else [*range(10)]
    same(made[rows], torch.cat([expected[0, :6], expected[1, :4]]), q, k, v)
    assert not apart or not made[[6, 7, 12, 13]].any()
    torch.testing.assert_close(
        attention(*packed, **lengths, **places, max_seqlen_q=16, max_seqlen_kv=16), made
    )


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi", "alibi slopes"])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_biases(kind, mask):
    q, k, v = tensors()
    bias = torch.randn(
        1,
        HEADS,
        QUERIES,
        KEYS,
        generator=torch.Generator().manual_seed(8),
        dtype=q.dtype,
        requires_grad=True,
    )
    slopes = torch.tensor([[0.5, 0.25, 0.125, 0.75], [1.0, 0.1, 0.2, 0.3]])
    attention = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="bshd", attn_mask_type=mask, softmax_scale=0.3
    )
    settings = {"core_attention_bias_type": kind.split()[0]}
    offset = 2 if mask == "no_mask" else 0
    if "alibi" in kind:
        used = (
            slopes
            if "slopes" in kind
            else torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).expand(2, 4)
        )
        settings["alibi_slopes"] = slopes if "slopes" in kind else None
        added = lambda b, h, i, keys: -(i + offset - torch.tensor(keys)).abs() * used[b, h]  # noqa: E731
        inputs = (q, k, v)
    else:
        settings["core_attention_bias"] = bias
        factor = 0.3 if kind == "pre_scale_bias" else 1.0
        added = lambda b, h, i, keys: bias[0, h, i, keys] * factor  # noqa: E731
        inputs = (q, k, v, bias)
    same(
        attention(q, k, v, **settings),
        formula(q, k, v, MASKS[mask, None, None], 0.3, added),
        *inputs,
    )


def test_slopes_for_heads_that_are_no_power_of_two():
    q = torch.zeros(1, 1, 6, 4, dtype=torch.float64)
    k = torch.zeros(1, 2, 6, 4, dtype=torch.float64)
    v = torch.eye(2, dtype=torch.float64)[None, :, None, :].expand(1, 2, 6, 2)
    attention = te.DotProductAttention(6, (4, 2), qkv_format="bshd", attn_mask_type="no_mask")
    seen = attention(q, k, v, core_attention_bias_type="alibi").reshape(6, 2)
    slopes = torch.tensor(
        [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], dtype=torch.float64
    )
    torch.testing.assert_close((seen[:, 1] / seen[:, 0]).log(), slopes)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("mask", ["no_mask", "padding_causal"])
def test_a_key_that_is_always_there(kind, mask):
    q, k, v = tensors()
    attention = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="bshd", attn_mask_type=mask, softmax_type=kind
    )
    inputs, sink = (q, k, v), torch.zeros(HEADS)
    if kind == "learnable":
        torch.nn.init.normal_(attention.softmax_offset)
        sink, inputs = attention.softmax_offset, (q, k, v, attention.softmax_offset)
    lengths = (
        {"cu_seqlens_q": cumulative(OF_QUERIES), "cu_seqlens_kv": cumulative(OF_KEYS)}
        if "padding" in mask
        else {}
    )
    same(
        attention(q, k, v, **lengths), formula(q, k, v, MASKS[mask, None, None], sink=sink), *inputs
    )


def test_packed_inputs_recomputation_dropout_and_scores():
    q, k, v = tensors(KEYS, KEYS, HEADS)
    attention = te.DotProductAttention(
        HEADS, SIZE, qkv_format="bshd", attention_dropout=0.5, return_max_logit=True
    ).eval()
    expected, scores = attention(q, k, v)
    full = torch.einsum("bihd,bjhd->bhij", q, k) / SIZE**0.5
    torch.testing.assert_close(
        scores,
        full.masked_fill(torch.ones(KEYS, KEYS).triu(1).bool(), float("-inf")).amax((0, 2, 3)),
    )
    for dim in (-3, -2):
        assert torch.equal(
            attention(qkv_layer=torch.stack((q, k, v), dim), qkv_interleave_dim=dim)[0], expected
        )
        assert torch.equal(
            attention(q, kv_layer=torch.stack((k, v), dim), qkv_interleave_dim=dim)[0], expected
        )
    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            forks.append(1)
            yield

    dropped = te.DotProductAttention(
        HEADS, SIZE, qkv_format="bshd", attention_dropout=0.5, get_rng_state_tracker=Tracker
    )
    torch.manual_seed(1)
    first = dropped(q, k, v)
    torch.manual_seed(1)
    again = dropped(q, k, v, checkpoint_core_attention=True)
    assert torch.equal(first, again) and not torch.equal(first, expected) and len(forks) == 2
    same(again, first, q, k, v)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_keys_are_kept_for_inference(layout):
    """Tokens that come step by step see what they see all at once; the first sequence ends early."""
    q, k, v = tensors(KEYS, KEYS)
    attention = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format=layout, attn_mask_type="padding_causal"
    )
    expected = formula(q, k, v, lambda b, i, j: j <= i)
    cache = te.InferenceParams(
        2, KEYS, GROUPS, SIZE, torch.float64, qkv_format=layout, max_ctx_len=KEYS
    )
    done = {0: 0, 1: 0}
    for step in ({0: 5, 1: 3}, {0: 1, 1: 1}, {1: 1}, {1: 1}):
        cache.pre_step(step)
        assert cache.get_seqlens_pre_step().tolist() == [done[b] for b in step]
        most = max(step.values())

        def new(x):
            parts = [x[b, done[b] : done[b] + count] for b, count in step.items()]
            if layout == "thd":
                return torch.cat(parts)
            filled = torch.stack(
                [
                    torch.cat([part, part.new_full((most - len(part), *part.shape[1:]), 9.0)])
                    for part in parts
                ]
            )
            return filled.transpose(0, 1) if layout == "sbhd" else filled

        lengths = {
            "cu_seqlens_q": cumulative(step.values()),
            "cu_seqlens_kv": cumulative(step.values()),
        }
        y = attention(new(q), new(k), new(v), inference_params=cache, **lengths)
        y = y.transpose(0, 1) if layout == "sbhd" else y
        first = 0
        for place, (b, count) in enumerate(step.items()):
            made = y[first : first + count] if layout == "thd" else y[place, :count]
            torch.testing.assert_close(made, expected[b, done[b] : done[b] + count])
            done[b], first = done[b] + count, first + count
    with pytest.raises(ValueError, match="at most 8 tokens"):
        cache.pre_step({1: 6})
    cache.reset()
    with pytest.raises(ValueError, match="at most 2 sequences"):
        cache.pre_step({1: 1, 2: 1, 3: 1})


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda a: a(attn_mask_type="diagonal"),
            ValueError,
            "unknown attn_mask_type 'diagonal'; there are 'no_mask'",
        ),
        (lambda a: a(attn_mask_type="arbitrary"), ValueError, "needs an attention_mask"),
        (
            lambda a: a(attn_mask_type="padding"),
            ValueError,
            "needs attention_mask, or cu_seqlens_q",
        ),
        (
            lambda a: a(attn_mask_type="padding", attention_mask=torch.zeros(2, 1, 1, 3)),
            ValueError,
            r"expected \[2, 1, 1, 6\]",
        ),
        (
            lambda a: a(attn_mask_type="no_mask", window_size=(3, -1)),
            ValueError,
            "window_size: expected",
        ),
        (lambda a: a(qkv_format="thd"), ValueError, "needs cu_seqlens_q"),
        (lambda a: a(qkv_format="hds"), ValueError, "unknown qkv_format 'hds'"),
        (
            lambda a: a(core_attention_bias_type="more"),
            ValueError,
            "unknown core_attention_bias_type",
        ),
        (
            lambda a: a(core_attention_bias_type="post_scale_bias"),
            ValueError,
            "needs a core_attention_bias",
        ),
        *(
            (
                lambda a, given=given: a(**given),
                NotImplementedError,
                f"the argument {next(iter(given))} is not supported here, but for",
            )
            for given in (
                {"score_mod": print}, {"score_mod_bprop": print}, {"score_mod_tensors": {}},
                {"score_mod_bprop_tensors": {}}, {"bf16_backward": True}, {"num_splits": 2},
            )
        ),
        (lambda a: te.DotProductAttention(4, 8, 3), ValueError, "expected a divisor of 4"),
        (
            lambda a: te.DotProductAttention(4, 8, tp_size=2),
            NotImplementedError,
            "the argument tp_size is not supported",
        ),
        (
            lambda a: te.DotProductAttention(4, 8, cp_group=object()),
            NotImplementedError,
            "no context parallelism",
        ),
        (
            lambda a: te.InferenceParams(1, 8, 1, 8, torch.float32, is_paged=True),
            NotImplementedError,
            "the argument is_paged",
        ),
        (lambda a: te.InferenceParams(1, 8), ValueError, "needs num_heads_kv"),
    ],
)
def test_what_cannot_be_is_named(call, error, message):
    q, k, v = tensors()
    attention = te.DotProductAttention(
        HEADS, SIZE, GROUPS, qkv_format="bshd", attention_type="cross"
    )
    with pytest.raises(error, match=message):
        call(lambda **settings: attention(q, k, v, **settings))
