"""Quantizers and quantized tensors by TransformerEngine's interface."""

import copy
import io
import pickle

import pytest
import torch

import nvfp4
import nvfp4.te as te

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
U8, F32 = torch.uint8, torch.float32


def hybrid(row, column, source="original"):
    return te.HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source
    )


def block(dim):
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


MAKE = {
    "nvfp4": te.NVFP4Quantizer,
    "nvfp4 squares": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 row-scaled": lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "mxfp8 squares": lambda: te.MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "block 1": lambda: block(1),
    "block 2": lambda: block(2),
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, None),
    "delayed": lambda: te.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3),
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: hybrid(te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer(), "rowwise_dequantized"),
    "hybrid identity": lambda: hybrid(te.NVFP4Quantizer(), te.IdentityQuantizer()),
}
ALL = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@pytest.fixture
def x():
    return torch.randn(64, 384, generator=torch.Generator().manual_seed(3))


def arrays(tensor):
    return {
        name: value
        for name, value in tensor.get_metadata().items()
        if isinstance(value, torch.Tensor)
    }


def same(one, other):
    """Whether two tensors are stored as the same bytes."""
    if isinstance(one, te.HybridQuantizedTensorStorage):
        sides = ("_rowwise_storage", "_columnwise_storage")
        return all(same(getattr(one, side), getattr(other, side)) for side in sides)
    mine, theirs = arrays(one), arrays(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


# Shapes of a tensor of 2×32×384 values: codes and scales of rows, and of columns.
STORED = {
    "nvfp4": [
        ((2, 32, 192), U8), ((128, 24), U8), ((1,), F32),
        ((384, 32), U8), ((384, 4), U8), ((1,), F32),
    ],
    "nvfp4 row-scaled": [
        ((2, 32, 192), U8), ((128, 24), U8), ((64,), F32),
        ((384, 32), U8), ((384, 4), U8), ((384,), F32),
    ],
    "mxfp8": [((2, 32, 384), U8), ((128, 12), U8), ((2, 32, 384), U8), ((4, 384), U8)],
    "block 1": [((2, 32, 384), U8), ((3, 64), F32), ((384, 2, 32), U8), ((1, 384), F32)],
    "block 2": [((2, 32, 384), U8), ((1, 4), F32), ((384, 2, 32), U8), ((3, 4), F32)],
    "current": [((2, 32, 384), U8), ((1,), F32)],
    "delayed": [((2, 32, 384), U8), ((1,), F32)],
    "identity": [((2, 32, 384), F32)],
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_arrays_have_transformer_engines_shapes(x, name):
    quantizer = MAKE[name]()
    for made in (quantizer(x.reshape(2, 32, 384)), quantizer.make_empty((2, 32, 384))):
        names = [n for side in made._SIDES.values() for n in side if getattr(made, n) is not None]
        names = list(dict.fromkeys([*names, *(n for n in made._ARRAYS if n == "_scale_inv")]))
        found = [(tuple(getattr(made, n).shape), getattr(made, n).dtype) for n in names]
        assert found == STORED[name] and made.shape == (2, 32, 384)
        assert type(made) is quantizer._CLASSES[1] and isinstance(made, te.QuantizedTensor)
    quantizer.internal = True
    stored = quantizer(x)
    assert type(stored) is quantizer._CLASSES[0] and not isinstance(stored, torch.Tensor)
    assert stored.shape == x.shape and stored._dtype == x.dtype


def test_scales_are_padded_with_zeros_to_whole_tiles(x):
    direct = nvfp4.Quantizer(spec="mxfp8", directions="both").quantize(x).as_torch()
    made = te.MXFP8Quantizer(E4M3)(x)
    assert torch.equal(made._rowwise_scale_inv[:64, :12], direct.row.scales)
    assert not made._rowwise_scale_inv[64:].any()
    assert torch.equal(made._columnwise_scale_inv[:2], direct.column.scales)
    assert not made._columnwise_scale_inv[2:].any()
    direct = nvfp4.Quantizer(spec="fp8-block", directions="both").quantize(x).as_torch()
    assert torch.equal(block(1)(x)._rowwise_scale_inv, direct.row.scales.t())


def test_scales_for_products_lie_as_tensor_cores_read_them():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    for make in (te.NVFP4Quantizer, lambda: te.MXFP8Quantizer(E4M3)):
        quantizer = make()
        plain = quantizer(x)
        quantizer.optimize_for_gemm = True
        ordered = quantizer(x)
        assert ordered._with_gemm_swizzled_scales and not plain._with_gemm_swizzled_scales
        scales, width = plain._rowwise_scale_inv, plain._rowwise_scale_inv.shape[1]
        flat = ordered._rowwise_scale_inv.flatten()
        for row, col in ((0, 0), (1, 0), (32, 0), (33, 2), (127, 3), (128, 4), (255, width - 1)):
            tile = row // 128 * (width // 4) + col // 4
            assert (
                flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4] == scales[row, col]
            )
        assert torch.equal(ordered.dequantize(), plain.dequantize())
        assert ordered.quantized == plain.quantized


@ALL
def test_operations_compute_on_the_values(x, make):
    q = make()(x)
    values = q.dequantize()
    assert torch.equal(q + 1, values + 1) and type(q + 1) is torch.Tensor
    assert torch.equal(torch.sin(q), torch.sin(values)) and torch.equal(q[3], values[3])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert q.dequantize(dtype=dtype).dtype is dtype
    assert q.float().dtype is torch.float32 and q.bfloat16().dtype is torch.bfloat16
    assert torch.equal(torch.empty_like(values).copy_(q), values)


@ALL
def test_operations_in_place_quantize_their_result(x, make):
    q = make()(x.clone())  # what is not quantized is the tensor itself
    expected = make()(q.dequantize() * 2)
    assert q.mul_(2) is q and same(q, expected)
    q = make()(x.clone())
    for write in (lambda: q.copy_(-x), lambda: q.quantize_(-x), lambda: setattr(q, "data", -x)):
        q.zero_()
        write()
        assert same(q, make()(-x)), "a copy, a call or an assignment"
    torch._foreach_add_([q], 1.0)
    assert same(q, make()(make()(-x).dequantize() + 1))


@ALL
def test_a_flag_leaves_a_tensor_as_it_is(x, make):
    for flag in (0.0, 1.0):
        q = make()(x.clone())
        make().update_quantized(2 * x, q, noop_flag=torch.full((1,), flag))
        assert same(q, make()(x if flag else 2 * x))


@ALL
def test_copies_are_their_own(x, make):
    q = make()(x.clone())
    for other in (
        q.clone(),
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        torch.empty_like(q).copy_(q),
    ):
        assert type(other) is type(q) and same(other, q) and other.shape == q.shape
        other.zero_()
        assert not same(other, q)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), q)
    assert same(q.to("cpu"), q) and same(q.detach(), q)
    there = q.to("meta")
    assert type(there) is type(q) and there.device.type == "meta" and there.shape == q.shape
    q.detach().zero_()
    assert not q.dequantize().any(), "what is detached has the same arrays"


def test_shapes_change_where_scales_allow_it(x):
    for name, shape in (
        ("mxfp8", (2, 32, 384)),
        ("nvfp4", (2, 32, 384)),
        ("block 1", (4, 16, 384)),
        ("current", (128, 192)),
    ):
        q = MAKE[name]()(x)
        for viewed in (q.view(*shape), q.reshape(shape), q.view(-1, *shape[1:])):
            assert type(viewed) is type(q) and viewed.shape == shape
            assert torch.equal(viewed.dequantize(), q.dequantize().view(shape))
    q = MAKE["nvfp4"]()(x)
    with pytest.warns(UserWarning, match="does not support reshaping inner dimension"):
        assert type(q.view(128, 192)) is torch.Tensor
    quantizer = te.MXFP8Quantizer(E4M3)
    quantizer.internal = True
    with pytest.raises(RuntimeError, match="does not support reshaping inner dimension"):
        quantizer(x).view(128, 192)


def test_directions_come_and_go(x):
    for name in ("nvfp4 squares", "block 2"):
        q, quantizer = MAKE[name]()(x), MAKE[name]()
        quantizer.set_usage(columnwise=False)
        rows = quantizer(x)
        assert rows.get_usages() == {"rowwise": True, "columnwise": False}
        rows.update_usage(columnwise_usage=True)
        assert same(rows, q), "columns of squares are rows, transposed"
        rows.update_usage(rowwise_usage=False)
        assert rows.get_usages() == {"rowwise": False, "columnwise": True}
    q = te.MXFP8Quantizer(E4M3, columnwise=False)(x)
    with pytest.raises(RuntimeError, match="missing column-scaled data"):
        q.update_usage(columnwise_usage=True)
    for name in ("mxfp8", "block 1"):
        q = MAKE[name]()(x)
        q.update_usage(rowwise_usage=False)
        assert (q.dequantize() - x).abs().max() < 0.25, "columns alone are decoded too"
    q = te.NVFP4Quantizer(rowwise=False)(x)
    with pytest.raises(NotImplementedError, match="column-wise NVFP4"):
        q.dequantize()


def test_gradients_pass_as_they_are(x):
    y = x.clone().requires_grad_()
    q = te.MXFP8Quantizer(E4M3)(y)
    assert q.requires_grad
    (q.view(2, 32, 384).dequantize() * 3).sum().backward()
    assert torch.equal(y.grad, torch.full_like(x, 3.0))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantizer):
        saved, ctx.tensor_objects = te.prepare_for_saving(quantizer(x), x, None)
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stored, x, nothing = te.restore_from_func_ctx(ctx)
        assert nothing is None and ctx.tensor_objects is None
        return grad * stored.dequantize(), None


@ALL
def test_storages_are_saved_for_backward(x, make):
    quantizer, y = make(), x.clone().requires_grad_()
    quantizer.internal = True
    Saves.apply(y, quantizer).sum().backward()
    assert torch.equal(y.grad, make()(x).dequantize())


def test_delayed_scaling_notes_the_largest_amax(x):
    scale, amax = torch.full((1,), 4.0), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    q = quantizer(x)
    assert amax.item() == x.abs().max().item() and q._scale_inv.item() == 0.25
    quantizer(x / 2)
    assert amax.item() == x.abs().max().item(), "of all tensors until someone takes it"
    assert torch.equal(q._data, (x * 4).clamp(-448, 448).to(torch.float8_e4m3fn).view(U8))


def test_two_formats_at_once(x):
    q = MAKE["hybrid"]()(x)
    row, column = q.rowwise_sub_storage, q.columnwise_sub_storage
    assert same(row, te.MXFP8Quantizer(E4M3, columnwise=False)(x))
    assert same(column, te.NVFP4Quantizer(rowwise=False)(row.dequantize()))
    assert torch.equal(q.dequantize(), row.dequantize())
    q.update_usage(rowwise_usage=False)
    assert q.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(RuntimeError, match="no rowwise sub-storage"):
        q.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert q.columnwise_sub_storage is column, "nothing of it was done"
    rotated = hybrid(te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), te.NVFP4Quantizer())
    assert rotated.spec() == "nvfp4 / nvfp4", "rows are never rotated"


@pytest.mark.parametrize("name", ["mxfp8", "block 2", "current", "nvfp4 squares", "identity"])
def test_shards_are_gathered_as_codes(name):
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    x[0, 0] = x[128, 0] = 8.0  # each half has the amax of both
    shards = [MAKE[name]()(half) for half in x.chunk(2)]
    sent = [
        shard.fsdp_pre_all_gather(None, shard.shape, shard.stride(), None, None) for shard in shards
    ]
    gathered = tuple(torch.cat(parts) for parts in zip(*(arrays for arrays, _ in sent)))
    whole, _ = shards[0].fsdp_post_all_gather(gathered, sent[0][1], torch.float32)
    expected = MAKE[name]()(x)
    assert same(whole, expected)
    again, _ = shards[0].fsdp_post_all_gather(gathered, sent[0][1], torch.float32, out=whole)
    assert again is whole and same(whole, expected)


def test_layers_multiply_by_the_codes_that_are_there(x):
    recipe = te.MXFP8BlockScaling()
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(384, 32, bias=False)
    with te.autocast(recipe=recipe):
        before = layer(x)
        assert before.abs().sum() > 0
        layer.weight._rowwise_data.zero_()
        assert not layer(x).any()
        layer.weight.data.copy_(torch.ones(32, 384))
        torch.testing.assert_close(layer(x)[:, :1], x.sum(1, keepdim=True), rtol=0.1, atol=2.0)


def test_what_is_of_another_format_is_named(x):
    with pytest.raises(
        ValueError, match="MXFP8Quantizer can only update MXFP8TensorStorage, not NVFP4Tensor"
    ):
        te.MXFP8Quantizer(E4M3).update_quantized(x, te.NVFP4Quantizer()(x))
    with pytest.raises(TypeError, match="expected the format of MXFP8Tensor"):
        te.MXFP8Quantizer(E4M3)(x).copy_from_storage(te.NVFP4Quantizer()(x))
    with pytest.raises(ValueError, match="no data"):
        q = te.MXFP8Quantizer(E4M3)(x)
        q.prepare_for_saving()
        q.dequantize()


def test_quantizers_of_settings_are_equal_if_their_settings_are():
    for name in ("nvfp4", "mxfp8", "block 1", "current"):
        quantizer, other = MAKE[name](), MAKE[name]()
        assert quantizer == other and hash(quantizer) == hash(other)
        text, names = quantizer.__fx_repr__()
        assert eval(text, dict(names)) == quantizer, "what a compiled program makes"
        other.set_usage(columnwise=False)
        assert quantizer != other
    assert MAKE["delayed"]() != MAKE["delayed"](), "scales are its own"


def test_compiled_layers_follow_their_codes(x):
    recipe = te.Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(384, 32)
    compiled = torch.compile(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = compiled(x)
            assert torch.equal(y, layer(x))
        y.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("mask", [True, False])
def test_the_matrix_of_the_hadamard_transform(mask):
    quantizer = te.NVFP4Quantizer(with_random_sign_mask=mask)
    matrix, signs = quantizer.rht_matrix.float(), quantizer.rht_matrix_random_sign_mask_t
    assert signs == (0xD7E8 if mask else 0)
    assert torch.equal(matrix @ matrix.T, torch.eye(16))
    first = [-0.25 if signs >> row & 1 else 0.25 for row in range(16)]
    assert matrix[:, 0].tolist() == first, "signs are of rows"
