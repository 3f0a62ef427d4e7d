"""TransformerEngine's norms, rotary embeddings, padding and permutations of tokens."""

import math

import pytest
import torch

import nvfp4.te as te


def generator():
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(kind, centred):
    x = torch.randn(6, 3, 32, generator=generator(), dtype=torch.float64, requires_grad=True)
    norm = kind(32, 1e-3, zero_centered_gamma=centred, params_dtype=torch.float64)
    assert list(norm.state_dict()) == (["weight", "bias"] if kind is te.LayerNorm else ["weight"])
    assert (norm.weight == (0 if centred else 1)).all()
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter)
    weight = norm.weight + 1 if centred else norm.weight
    mean = x.mean(-1, keepdim=True) if kind is te.LayerNorm else 0
    expected = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    expected = expected if norm.bias is None else expected + norm.bias
    torch.testing.assert_close(norm(x), expected)
    assert torch.autograd.gradcheck(norm, (x,))
    with pytest.warns(DeprecationWarning, match="normalized_shape"):
        older = kind(hidden_size=32, sequence_parallel=True, device="meta")
    older.reset_parameters()
    assert older.weight.sequence_parallel and not older.weight.is_meta
    mixed = kind(32)(x.bfloat16())
    assert mixed.dtype == torch.bfloat16, "with weights in another type"
    older.load_state_dict({**older.state_dict(), "_extra_state": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="normalized_shape"):
        kind()
    with pytest.raises(NotImplementedError, match="the argument sm_margin is not supported"):
        kind(32, sm_margin=1)


def turned(x, position, interleaved, features):
    """One token's vector: pairs of features, turned by the position times their frequency."""
    out = x.clone()
    for pair in range(features // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + features // 2)
        angle = position / 10000 ** (2 * pair / features)
        out[..., a] = x[..., a] * math.cos(angle) - x[..., b] * math.sin(angle)
        out[..., b] = x[..., b] * math.cos(angle) + x[..., a] * math.sin(angle)
    return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings_turn_pairs_of_features(interleaved, fused):
    freqs = te.RotaryPositionEmbedding(16, rotary_percent=0.5, interleaved=interleaved)(20)
    assert freqs.shape == (20, 1, 1, 8) and freqs.dtype == torch.float32
    x = torch.randn(5, 2, 3, 16, generator=generator(), dtype=torch.float64, requires_grad=True)

    def apply(x, *args, **kwargs):
        return te.apply_rotary_pos_emb(
            x, freqs, *args, interleaved=interleaved, fused=fused, **kwargs
        )

    expected = torch.stack([turned(x[s], s, interleaved, 8) for s in range(5)])
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(apply(x), expected, **close)
    torch.testing.assert_close(apply(x.transpose(0, 1), "bshd").transpose(0, 1), expected, **close)
    assert torch.autograd.gradcheck(apply, (x,))
    starts = torch.tensor([3, 7])
    later = torch.stack(
        [
            torch.stack([turned(x[s, b], s + 3 + 4 * b, interleaved, 8) for b in range(2)])
            for s in range(5)
        ]
    )
    torch.testing.assert_close(apply(x, "sbhd", starts), later, **close)
    packed = x.transpose(0, 1).flatten(0, 1)[:8]  # sequences of 5 and 3 tokens
    cu = torch.tensor([0, 5, 8], dtype=torch.int32)
    torch.testing.assert_close(
        apply(packed, "thd", cu_seqlens=cu), torch.cat([expected[:, 0], expected[:3, 1]]), **close
    )
    torch.testing.assert_close(
        apply(packed, "thd", starts, cu_seqlens=cu), torch.cat([later[:, 0], later[:3, 1]]), **close
    )
    with pytest.raises(ValueError, match="angles for 25 positions, got 20"):
        apply(x, "sbhd", torch.tensor([20, 0]))


def test_angles_stay_in_32_bits():
    rotary = te.RotaryPositionEmbedding(8)
    angles = rotary(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary(64), angles) and angles.dtype == torch.float32
    assert rotary.to("meta")(64).shape == (64, 1, 1, 8)


def test_positions_are_interpolated():
    plain = te.RotaryPositionEmbedding(8)(64)
    factor = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 16}
    torch.testing.assert_close(te.RotaryPositionEmbedding(8, **factor)(32), plain[:32] / 2)
    torch.testing.assert_close(te.RotaryPositionEmbedding(8, **factor)(64), plain / 4)
    torch.testing.assert_close(te.RotaryPositionEmbedding(8)(4, offset=10), plain[10:14])


@pytest.mark.parametrize(
    "recipe, tokens", [(None, 16), ("mxfp8", 32), ("nvfp4", 128), ("delayed_scaling", 16)]
)
def test_tokens_are_padded_to_whole_blocks_of_the_recipe(recipe, tokens):
    x = torch.randn(40, 8, generator=generator(), dtype=torch.float64, requires_grad=True)
    splits = [5, 0, 35]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        padded, counts = te.Fp8Padding(3)(x, splits)
        whole = -(-35 // tokens) * tokens
        assert counts == [tokens, 0, whole] and padded.shape == (tokens + whole, 8)
        assert (
            torch.equal(padded[:5], x[:5])
            and not padded[5:tokens].any()
            and torch.equal(padded[tokens : tokens + 35], x[5:])
        )
        assert torch.equal(te.Fp8Unpadding(3)(padded, splits), x)
    assert te.Fp8Padding(1, 8)(x, [40])[0] is x
    pad = te.Fp8Padding(3, 8)
    assert torch.autograd.gradcheck(
        lambda x: te.Fp8Unpadding(3, 8)(pad(x, splits)[0] ** 2, splits), (x,)
    )
    with pytest.raises(ValueError, match="expected 3 numbers"):
        pad(x, [40])


ROUTING = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
# Tokens of the first expert, of the second, of the third.
ORDER = [0, 1, 3, 0, 3, 1, 2]


def tokens_and_probs():
    x = torch.randn(5, 4, generator=generator(), dtype=torch.float64, requires_grad=True)
    return x, torch.rand(5, 3, generator=generator(), dtype=torch.float64, requires_grad=True)


def test_tokens_are_sorted_by_expert_and_back():
    x, probs = tokens_and_probs()
    permuted, row_id_map = te.moe_permute(x, ROUTING, 7)
    assert torch.equal(permuted, x[ORDER])
    n = -1
    assert row_id_map.tolist() == [
        [3, 0, n, 1, 0, n, 2],
        [5, 1, n, 2, 0, n, 2],
        [6, n, n, 2, n, n, 1],
        [4, 2, n, 1, 0, n, 2],
        [n] * 6 + [0],
    ]
    torch.testing.assert_close(
        te.moe_unpermute(permuted, row_id_map, restore_shape=x.shape),
        x * ROUTING.sum(1, keepdim=True),
    )
    merged = te.moe_unpermute(permuted, row_id_map, probs, x.shape)
    torch.testing.assert_close(merged, x * (probs * ROUTING).sum(1, keepdim=True))
    same, weights, _ = te.moe_permute_with_probs(x, probs, ROUTING, 7)
    assert torch.equal(same, permuted) and torch.equal(weights, probs.t()[ROUTING.t().bool()])

    def there_and_back(x, probs):
        permuted, weights, row_id_map = te.moe_permute_with_probs(x, probs, ROUTING, 7)
        return te.moe_unpermute(permuted**2 * weights[:, None], row_id_map, probs, x.shape)

    assert torch.autograd.gradcheck(there_and_back, (x, probs))
    with pytest.raises(ValueError, match="unknown map_type 'row'"):
        te.moe_permute(x, ROUTING, 7, map_type="row")


def test_tokens_of_experts_are_padded_as_they_are_sorted():
    x, probs = tokens_and_probs()
    counts = ROUTING.sum(0)
    permuted, weights, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(
        x, probs, ROUTING, counts, 4
    )
    assert padded.tolist() == [4, 4, 4] and offsets.tolist() == [0, 1, 3]
    rows = [0, 1, 2, 4, 5, 8, 9]
    assert torch.equal(permuted[rows], x[ORDER]) and not permuted[[3, 6, 7, 10, 11]].any()
    assert torch.equal(weights[rows], probs.t()[ROUTING.t().bool()])
    merged = te.moe_unpermute(permuted, row_id_map, probs, x.shape, pad_offsets=offsets)
    torch.testing.assert_close(merged, x * (probs * ROUTING).sum(1, keepdim=True))
    assert te.moe_permute_and_pad_with_probs(x, probs, ROUTING, counts, 1)[3] is None


def test_tokens_are_sorted_by_the_numbers_of_experts():
    x, _ = tokens_and_probs()
    index = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)
    permuted, row_id_map = te.moe_permute(x, index, 0, map_type="index")
    assert torch.equal(permuted, x[[0, 2, 4, 1, 2, 3, 0, 1, 3, 4]])
    assert row_id_map.tolist() == [6, 3, 1, 8, 2, 0, 7, 4, 5, 9], "first choices, then second ones"
    probs = torch.rand(5, 2, generator=generator(), requires_grad=True)
    merged = te.moe_unpermute(permuted, row_id_map, probs, map_type="index")
    torch.testing.assert_close(merged, x * probs.sum(1, keepdim=True).double())
    assert torch.equal(te.moe_permute(x, index, 7, map_type="index")[0], permuted[:7])
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        te.moe_unpermute(permuted, row_id_map, probs=probs, map_type="index")


def test_chunks_are_sorted():
    x = torch.randn(6, 2, generator=generator(), dtype=torch.float64, requires_grad=True)
    sizes, order = torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1])
    expected = [4, 5, 0, 1, 2, 3]
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, order), x[expected])
    chunks, probs = te.moe_sort_chunks_by_index_with_probs(x, x[:, 0], sizes, order)
    assert torch.equal(chunks, x[expected]) and torch.equal(probs, x[expected, 0])
    assert torch.autograd.gradcheck(
        lambda x: te.moe_sort_chunks_by_index(x, sizes, order) ** 2, (x,)
    )


def test_probabilities_of_no_tokens_have_gradients():
    probs = torch.rand(0, 4, requires_grad=True)
    _, rows = te.moe_permute(torch.zeros(0, 8), torch.zeros(0, 4, dtype=torch.int32), num_out_tokens=0, map_type="mask")
    te.moe_unpermute(torch.zeros(0, 8, requires_grad=True), rows, probs, torch.Size((0, 8))).sum().backward()
    assert probs.grad is not None and probs.grad.shape == (0, 4)
