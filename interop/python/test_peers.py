"""Other libraries read our bytes, and theirs are ours. A library that is missing here is a failure: `requirements.txt` has them all."""

import importlib
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

import nvfp4
import nvfp4.transformers

EXAMPLES = Path(__file__).parents[2] / "examples/python"


@pytest.fixture
def w():
    return torch.randn(256, 320, generator=torch.Generator().manual_seed(4)).bfloat16()


def tiles(q):
    """Swizzled scales in the shape that torchao gives them."""
    rows, cols = q.shape
    return q.row.swizzled_scales.view(torch.float8_e4m3fn).reshape(32 * -(-rows // 128), 16 * -(-cols // 64))


class TestTorchao:
    """`torchao.prototype.mx_formats.NVFP4Tensor` over our arrays."""

    @pytest.fixture
    def module(self):
        return importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def tensor(self, module, w, swizzled):
        q = nvfp4.quantize(w, profile="torchao")
        scales = tiles(q) if swizzled else q.row.typed_scales
        per_tensor = q.row.global_scale.reshape(())
        return q, module.NVFP4Tensor(
            q.codes, scales, 16, torch.bfloat16, per_tensor_scale=per_tensor, is_swizzled_scales=swizzled
        )

    @pytest.mark.parametrize("swizzled", [False, True])
    def test_its_bytes_are_ours(self, module, w, swizzled):
        scale = module.per_tensor_amax_to_scale(w.abs().max())
        theirs = module.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale, is_swizzled_scales=swizzled)
        q, ours = self.tensor(module, w, swizzled)
        assert torch.equal(theirs.qdata.view(torch.uint8), q.codes)
        assert torch.equal(theirs.scale.view(torch.uint8), ours.scale.view(torch.uint8))
        assert torch.equal(theirs.per_tensor_scale.float().reshape(1), q.row.global_scale)

    @pytest.mark.parametrize("swizzled", [False, True])
    def test_it_decodes_multiplies_slices_and_saves_them(self, module, w, swizzled, tmp_path):
        q, ours = self.tensor(module, w, swizzled)
        decoded = ours.dequantize(torch.float32)
        assert torch.equal(decoded, q.dequantize()), "the scales are multiplied first, the code last"
        x = torch.randn(8, 320).bfloat16()
        assert torch.equal(linear(x, ours), linear(x, ours.dequantize(torch.bfloat16)))
        assert torch.equal(ours[128:256].dequantize(torch.float32), decoded[128:256])
        assert torch.equal(ours[:, 64:192].dequantize(torch.float32), decoded[:, 64:192])
        assert torch.equal(ours.t().dequantize(torch.float32), decoded.t())
        torch.save(ours, tmp_path / "w.pt")
        with torch.serialization.safe_globals([module.NVFP4Tensor]):
            again = torch.load(tmp_path / "w.pt", weights_only=True)
        assert torch.equal(again.dequantize(torch.float32), decoded)


def test_compressed_tensors_packs_as_we_do_and_decodes_our_bytes(w):
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

    q = nvfp4.quantize(w, profile="llm-compressor")
    values = unpack_fp4_from_uint8(q.codes, *w.shape, dtype=torch.float32)
    assert torch.equal(pack_fp4_to_uint8(values), q.codes)
    scales = q.row.typed_scales.float() / q.row.global_scale
    assert torch.equal(values * scales.repeat_interleave(16, 1), q.dequantize())


def test_compressed_tensors_decompresses_our_state(w):
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q = nvfp4.quantize(w, profile="llm-compressor")
    state = {"weight_packed": q.codes, "weight_scale": q.row.typed_scales, "weight_global_scale": q.row.global_scale}
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="nvfp4-pack-quantized")
    weight = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
    # It divides and multiplies in float32, and rounds the result to bfloat16, as we do.
    assert weight.dtype == torch.bfloat16 and torch.equal(weight, q.dequantize("bfloat16"))


def test_modelopt_writes_and_decodes_our_bytes(w):
    from modelopt.torch.quantization import qtensor

    q = nvfp4.quantize(w, profile="modelopt")
    theirs, scales, scale_2 = qtensor.NVFP4QTensor.quantize(w, 16)
    assert torch.equal(theirs._quantized_data, q.codes)
    assert torch.equal(scales.view(torch.uint8), q.scales)
    assert torch.equal(scale_2.float().reshape(1), q.row.global_scale)
    ours = qtensor.NVFP4QTensor(w.shape, torch.float32, q.codes)
    decoded = ours.dequantize(torch.float32, scale=q.row.typed_scales, double_scale=q.row.global_scale, block_sizes={-1: 16})
    assert torch.equal(decoded, q.dequantize())


def test_safetensors_keeps_them(w, tmp_path):
    from safetensors.torch import load_file, save_file

    q = nvfp4.quantize(w)
    parts = dict(zip(("codes", "scales", "amax"), (part.clone() for part in q.row.parts)))
    save_file(parts, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert nvfp4.QuantTensor.from_parts("nvfp4", q.shape, row=[loaded[name] for name in parts]) == q


def test_transformers_computes_what_pretrain_saved(tmp_path, monkeypatch):
    transformers = importlib.import_module("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from llama import Llama, Shape, save

    torch.manual_seed(0)
    model = Llama(Shape(layers=2, width=64, hidden=192, heads=4, kv_heads=2, context=64))
    model = model.to(torch.bfloat16).float()  # as it is saved
    save(tmp_path, model.shape, model.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer("Zwölf Boxkämpfer\n\tjagen 雨")["input_ids"]
    assert bytes(tokens).decode() == tokenizer.decode(tokens) == "Zwölf Boxkämpfer\n\tjagen 雨"
    assert tokenizer.eos_token_id == Shape.end
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    x = torch.tensor([tokens])
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mixtral", "gpt-oss"])
def test_transformers_loads_what_modelopt_exports(tmp_path, name):
    """Its own files, GPT-OSS with experts in one tensor; and calibration has its scales, to the bit."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors.torch import load_file

    from test_transformers import TOKENS, decoded, layers, loaded, made

    model = made(name)
    model.config.architectures = [type(model).__name__]
    quantized = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda model: model(TOKENS))
    export_hf_checkpoint(quantized, dtype=torch.float32, export_dir=tmp_path)
    scales = {key: t for key, t in load_file(tmp_path / "model.safetensors").items() if key.endswith(".input_scale")}
    stats = nvfp4.calibrate(made(name), [TOKENS])
    assert len(scales) >= 8
    for key, scale in scales.items():
        assert torch.equal(stats[key.replace("input_scale", "input_amax")].reshape([]) / 2688, scale), key
    assert all(hasattr(layer, "input_amax") for layer in layers(loaded(tmp_path)).values())
    ours = loaded(tmp_path, quantization_config=nvfp4.transformers.Config(activations="none"))
    reference = decoded(made(name), ours)
    with torch.no_grad():
        own, theirs = ours(TOKENS).logits.double(), reference(TOKENS).logits.double()
        exact = reference.double()(TOKENS).logits
    assert (own - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_transformers_loads_fp8_of_compressed_tensors_by_itself(tmp_path):
    from test_transformers import TOKENS, loaded, made

    made("llama").save_pretrained(tmp_path / "plain")
    nvfp4.convert(str(tmp_path / "plain"), str(tmp_path / "fp8"), to="compressed-tensors", preset="fp8")
    model = loaded(tmp_path / "fp8")
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()
