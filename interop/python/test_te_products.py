"""Products of quantized tensors under TransformerEngine's names, and the quantizers that modules
show and take.
"""

import pytest
import torch

import nvfp4.te as te
from nvfp4.te._products import general_gemm, general_grouped_gemm
from nvfp4.te.custom_recipes.gemm import GEMMType, custom_gemm
from nvfp4.te.standin._extension import generic_gemm

QUANTIZERS = {
    "fp8": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu"),
    "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": lambda: te.NVFP4Quantizer(),
    "identity": lambda: te.IdentityQuantizer(),
    "hybrid": lambda: te.HybridQuantizer(rowwise_quantizer=QUANTIZERS["mxfp8"](), columnwise_quantizer=QUANTIZERS["nvfp4"]()),
}  # fmt: skip


def columns(tensor, dtype=torch.float32):
    """The values of the column direction, [rows, columns]."""
    if hasattr(tensor, "columnwise_sub_storage"):
        tensor = tensor.columnwise_sub_storage
    if isinstance(tensor, te.IdentityTensorStorage):
        return tensor.dequantize(dtype=dtype)
    return tensor.quantized.dequantize(dtype, side="column").t()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_product_is_that_of_the_values(name):
    torch.manual_seed(0)
    x, w = torch.randn(64, 128), torch.randn(32, 128)
    qx, qw, qdy = (QUANTIZERS[name]()(tensor) for tensor in (x, w, torch.randn(64, 32)))
    close = dict(rtol=1e-5, atol=1e-4)
    y = general_gemm(qw, qx, torch.float32)[0]
    torch.testing.assert_close(y, qx.dequantize() @ qw.dequantize().t(), **close)
    dx = general_gemm(qw, qdy, torch.float32, layout="NN", grad=True)[0]
    torch.testing.assert_close(dx, qdy.dequantize() @ columns(qw), **close)
    dw = general_gemm(qx, qdy, torch.float32, layout="NT", grad=True)[0]
    torch.testing.assert_close(dw, columns(qdy).t() @ columns(qx), **close)
    # The extension's product has one layout more.
    qt = QUANTIZERS[name]()(torch.randn(128, 64))
    y = generic_gemm(qw, True, qt, True, None, None, torch.float32, None, None, False, None, False, None, 0, False, False)[0]
    torch.testing.assert_close(y, columns(qt).t() @ qw.dequantize().t(), **close)


def test_what_is_added_to_a_product():
    torch.manual_seed(0)
    x, w, bias, out = torch.randn(32, 64), torch.randn(16, 64), torch.randn(16), torch.randn(32, 16)
    qx, qw = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x), te.MXFP8Quantizer(te.DType.kFloat8E4M3)(w)
    plain = general_gemm(qw, qx, torch.float32)[0]
    torch.testing.assert_close(general_gemm(qw, qx, torch.float32, bias=bias)[0], plain + bias)
    torch.testing.assert_close(
        general_gemm(qw, qx, torch.float32, accumulate=True, out=out.clone())[0], plain + out
    )
    gelu, _, before, _ = general_gemm(qw, qx, torch.float32, gelu=True)
    torch.testing.assert_close(gelu, torch.nn.functional.gelu(before, approximate="tanh"))
    outs = [torch.empty(32, 16), torch.empty(32, 16)]
    general_grouped_gemm([qw, qw], [qx, qx], outs, [None, None], torch.float32)
    assert torch.equal(outs[0], plain) and torch.equal(outs[1], plain)
    with pytest.raises(ValueError, match="GEMM layout TT not supported"):
        general_gemm(qw, qx, layout="TT")


class Rounded:
    """A tensor of one's own."""

    custom = True

    def __init__(self, values, quantizer):
        self.data, self.data_t = values, values.t()
        self.scale = self.scale_t = torch.ones(1)
        self.dtype, self._quantizer, self.original_shape = values.dtype, quantizer, values.shape


class Rounds(te.Quantizer):
    """Rounds to halves, and multiplies by itself."""

    custom = True
    products = []

    def __init__(self):
        super().__init__(rowwise=True, columnwise=True)

    def quantize(self, tensor, **_):
        return Rounded((tensor * 2).round() / 2, self)

    def qgemm(self, qx, qw, m_params, out_dtype, sx, sw, bias=None, gemm_type=None, **_):
        Rounds.products.append(gemm_type)
        return (qx @ qw.t()).to(out_dtype)


class Doubles(te.MXFP8Quantizer):
    """Quantizes twice of a tensor."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(2 * tensor)


def test_modules_call_quantizers_with_a_product_of_their_own():
    torch.manual_seed(0)
    layer, x = te.Linear(32, 16), torch.randn(4, 8, 32, requires_grad=True)
    Rounds.products.clear()
    with te.autocast(recipe=te.CustomRecipe(lambda role: Rounds())):
        y = layer(x)
    y.sum().backward()
    rounded = [(tensor * 2).round() / 2 for tensor in (x.detach(), layer.weight.detach())]
    torch.testing.assert_close(y, rounded[0] @ rounded[1].t() + layer.bias)
    torch.testing.assert_close(x.grad, torch.ones(4, 8, 16) @ rounded[1])
    torch.testing.assert_close(layer.weight.grad, torch.ones(16, 32) @ rounded[0].flatten(0, 1))
    torch.testing.assert_close(layer.bias.grad, torch.full((16,), 32.0))
    assert Rounds.products == [GEMMType.FPROP, GEMMType.DGRAD, GEMMType.WGRAD]
    with pytest.raises(TypeError, match="must be custom tensors"):
        custom_gemm(x, x)
    square = Rounds().quantize(torch.randn(16, 16))
    with pytest.raises(ValueError, match="TT not supported for custom tensors"):
        generic_gemm(square, True, square, True, None, None, torch.float32, None, None, False, None, False, None, 0, False, False)


def test_modules_call_quantizers_of_a_class_of_ones_own():
    def factory(role):
        kind = Doubles if role.tensor_type == "input" else te.MXFP8Quantizer
        return kind(te.DType.kFloat8E4M3)

    torch.manual_seed(0)
    layer, x = te.LayerNormMLP(64, 64), torch.randn(32, 64)
    with te.autocast(recipe=te.CustomRecipe(lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3))):
        plain = te.Linear(64, 64, bias=False)
        expected = plain(2 * x)
    with te.autocast(recipe=te.CustomRecipe(factory)):
        torch.testing.assert_close(plain(x), expected)
        layer(x).sum().backward()
    assert layer.fc1_weight.grad is not None


def test_modules_show_the_quantizers_of_their_recipe():
    layer, x = te.LayerNormMLP(64, 64, name="mlp"), torch.randn(32, 64)
    assert layer.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    for recipe, kind in (
        (te.NVFP4BlockScaling(), te.NVFP4Quantizer), (te.MXFP8BlockScaling(), te.MXFP8Quantizer),
        (te.Float8BlockScaling(), te.Float8BlockQuantizer), (te.DelayedScaling(), te.Float8Quantizer),
        (te.Float8CurrentScaling(), te.Float8CurrentScalingQuantizer),
    ):  # fmt: skip
        with te.autocast(recipe=recipe):
            layer(x).sum().backward()
        shown = layer.quantizers
        assert [len(shown[key]) for key in ("scaling_fwd", "scaling_bwd")] == [6, 4]
        assert all(type(one) is kind for of in shown.values() for one in of)
        assert layer.fp8_meta["recipe"] is recipe
    roles = layer.get_quantizer_roles(fwd=True, num_quantizers=6)
    assert [role and f"{role.name} {role.tensor_type}" for role in roles] == [
        "mlp.fc1 input", "mlp.fc1 weight", "mlp.fc2 input", "mlp.fc2 input", "mlp.fc2 weight", None,
    ]  # fmt: skip


def test_scales_that_are_shown_are_the_modules_own():
    layer, recipe = te.Linear(64, 64), te.DelayedScaling(amax_history_len=4)
    for step in range(3):
        with te.autocast(recipe=recipe):
            layer((step + 1) * torch.ones(32, 64)).sum().backward()
    shown = layer.fp8_meta["scaling_fwd"]
    assert shown.amax_history[0, 0] == 0 and shown.amax_history[1:, 0].tolist() == [1, 2, 3]
    shown.scale[0] = 0.5
    layer.output_quantizer_role = te.QuantizerRole("dpa", "qkv", "next")
    assert not layer.fp8_meta_tensors_initialized
    assert layer.fp8_meta["scaling_fwd"].scale is shown.scale and layer.fp8_meta_tensors_initialized
    assert layer.delayed.input.scale.item() == 0.5
