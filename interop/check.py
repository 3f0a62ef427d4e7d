"""What `nvfp4` writes, held against the real libraries. `check.py [CHECK …]` runs some or all; see `interop/run`."""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import minilm
from models import TEXT, gpt_oss, llama, nvfp4, qwen3_moe, tensors

CHECKS = {}
MODELS = {"llama": llama, "qwen3-moe": qwen3_moe}


def check(function):
    CHECKS[function.__name__] = function
    return function


def made(root, name):
    """The folder of a generated model."""
    folder = root / name
    if not folder.exists():
        {**MODELS, "gpt-oss": gpt_oss}[name](folder)
    return folder


def same_bits(a, b):
    """Every tensor of two checkpoints, folders or loaded, has the same type, shape and bytes."""
    a, b = (x if isinstance(x, dict) else tensors(x) for x in (a, b))
    assert a.keys() == b.keys(), f"only in one: {sorted(a.keys() ^ b.keys())[:6]}"
    for name, left in a.items():
        right = b[name]
        assert left.dtype == right.dtype and left.shape == right.shape, f"{name}: {left.dtype} {left.shape} {right.shape}"
        equal = torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
        assert equal, f"{name} differs"
    return len(a)


@check
def modelopt_writes_the_same_bytes(root):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(made(root, name), dtype=torch.bfloat16)
        theirs = root / f"{name}-modelopt-theirs"
        mtq.quantize(model, mtq.W4A16_NVFP4_CFG, forward_loop=None)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=theirs)
        nvfp4("convert", made(root, name), root / f"{name}-modelopt", "-q")
        print(f"  {name}: {same_bits(theirs, root / f'{name}-modelopt')} tensors")


@check
def llm_compressor_writes_the_same_bytes(root):
    from llmcompressor import model_free_ptq

    for name in MODELS:
        theirs, ours = root / f"{name}-llmc-theirs", root / f"{name}-llmc"
        start = time.time()
        model_free_ptq(
            str(made(root, name)), str(theirs), scheme="NVFP4A16", ignore=["lm_head", "re:.*mlp.gate$", "re:.*embed_tokens"],
            max_workers=2, device="cpu",
        )  # fmt: skip
        seconds = time.time() - start
        # Version 0.14.0.1 does not join gate and up inside experts, which servers do. A file asks for the same, and our checks then fail.
        joined = [["q_proj", "k_proj", "v_proj"]] + ([] if name == "qwen3-moe" else [["gate_proj", "up_proj"]])
        fuse = root / f"{name}-fuse.json"
        fuse.write_text(json.dumps(joined))
        start = time.time()
        nvfp4(
            "convert", made(root, name), ours, "-q", "--to", "compressed-tensors", "--profile", "llm-compressor",
            "--fuse", fuse, status=1 if name == "qwen3-moe" else 0,
        )  # fmt: skip
        mine = time.time() - start
        print(f"  {name}: {same_bits(theirs, ours)} tensors; theirs {seconds:.2f} s, ours {mine:.2f} s")


@check
def fix_scales_mends_llm_compressors_experts(root):
    """Experts whose gate and up differ in scale: found, mended, and decoded by compressed-tensors within a block scale's rounding."""
    from llmcompressor import model_free_ptq

    theirs, fixed = root / "moe-apart", root / "moe-fixed"
    model_free_ptq(
        str(made(root, "qwen3-moe")), str(theirs), scheme="NVFP4A16",
        ignore=["lm_head", "re:.*mlp.gate$", "re:.*embed_tokens"], max_workers=2, device="cpu",
    )  # fmt: skip
    said = nvfp4("verify", theirs, status=1)
    assert "nvfp4 convert --fix-scales --to compressed-tensors" in said, said
    said = nvfp4("convert", theirs, fixed, "-q", "--fix-scales", "--to", "compressed-tensors")
    print("  " + next(line for line in said.splitlines() if line.startswith("fixed")))
    nvfp4("verify", fixed)
    before, after = decompressed(theirs), decompressed(fixed)
    assert before.keys() == after.keys()
    for module, value in before.items():
        error = (after[module] - value).norm() / value.norm()
        assert error <= 1 / 16, f"{module}: {error}"


def decompressed(folder):
    """The values of every NVFP4 weight, as compressed-tensors decodes them."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    packed, args = tensors(folder), preset_name_to_scheme("NVFP4A16", ["Linear"])
    values = {}
    for module in [k.removesuffix("weight_packed") for k in packed if k.endswith(".weight_packed")]:
        parts = {k.removeprefix(module): v for k, v in packed.items() if k.startswith(module)}
        value = NVFP4PackedCompressor.decompress(parts, args)
        values[module] = (value["weight"] if isinstance(value, dict) else value).float()
    return values


@check
def time_beside_model_free_ptq(root):
    """The checkpoint of `nvfp4 demo`: the same bytes, and the seconds of both; the import of torch does not count."""
    from llmcompressor import model_free_ptq

    nvfp4("demo", "--dir", root / "demo")
    source = root / "demo" / "llama"
    start = time.time()
    ignore = ["lm_head", "re:.*embed_tokens"]
    model_free_ptq(str(source), str(root / "theirs"), scheme="NVFP4A16", ignore=ignore, max_workers=2, device="cpu")
    theirs, start = time.time() - start, time.time()
    nvfp4("convert", source, root / "ours", "-q", "--to", "compressed-tensors", "--profile", "llm-compressor")
    ours, size = time.time() - start, sum(f.stat().st_size for f in source.glob("*.safetensors"))
    same_bits(root / "theirs", root / "ours")
    print(f"  {size / 1e6:.0f} MB: model_free_ptq {theirs:.2f} s, nvfp4 convert {ours:.2f} s, ratio {theirs / ours:.0f}")


@check
def compressed_tensors_decompresses_to_our_values(root):
    for name in MODELS:
        ours, plain = root / f"{name}-ct", root / f"{name}-ct-plain"
        nvfp4("convert", made(root, name), ours, "-q", "--to", "compressed-tensors")
        nvfp4("dequant", ours, plain)
        decoded, values = tensors(plain), decompressed(ours)
        for module, value in values.items():
            assert torch.equal(value.to(torch.bfloat16), decoded[f"{module}weight"]), module
        print(f"  {name}: {len(values)} weights")


@check
def transformers_loads_compressed_tensors(root):
    from transformers import AutoModelForCausalLM

    for name in MODELS:
        ours = root / f"{name}-transformers"
        nvfp4("convert", made(root, name), ours, "-q", "--to", "compressed-tensors")
        # It loses the tensor scales of experts, whoever wrote them, and `verify` must say so.
        said = nvfp4("verify", ours, "--for", "transformers", status=1 if name == "qwen3-moe" else 0)
        assert ("does not load separate experts" in said) == (name == "qwen3-moe"), said
        model = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16)
        original = AutoModelForCausalLM.from_pretrained(made(root, name), dtype=torch.bfloat16)
        tokens = torch.arange(1, 33).unsqueeze(0)
        with torch.inference_mode():
            logits, expected = model(tokens).logits.float(), original(tokens).logits.float()
        assert torch.isfinite(logits).all()
        cosine = torch.nn.functional.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
        print(f"  {name}: finite logits, cosine to the original's {cosine:.4f}")


@check
def keys_and_values_in_fp8_are_read(root):
    """`--kv fp8-cast`: ModelOpt says the same in its recipe of that name; compressed-tensors and transformers read the scales."""
    import modelopt.torch.quantization as mtq
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationArgs
    from modelopt.recipe import load_recipe
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    source, ours, theirs, ct = made(root, "llama"), root / "kv-modelopt", root / "kv-theirs", root / "kv-ct"
    nvfp4("convert", source, ours, "-q", "--kv", "fp8-cast")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    mtq.quantize(model, load_recipe("general/ptq/nvfp4_weight_only-kv_fp8_cast").quantize.model_dump(), forward_loop=None)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=theirs)
    config = lambda folder, file: json.loads((folder / file).read_text())
    assert config(ours, "hf_quant_config.json") == config(theirs, "hf_quant_config.json")
    assert config(ours, "config.json")["quantization_config"] == config(theirs, "config.json")["quantization_config"]
    # It leaves the scales out, which are 1 to servers then; ours are there.
    own, others = tensors(ours), tensors(theirs)
    extra = [f"model.layers.{l}.self_attn.{x}_proj.{x}_scale" for l in range(2) for x in "kv"]
    assert sorted(own.keys() - others.keys()) == extra and all(own[name] == 1 for name in extra)
    same_bits({k: v for k, v in own.items() if k in others}, others)

    fp8 = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
    converter = ModelOptNvfp4Converter(ignore=["lm_head"], targets=["re:.*_proj$"], kv_cache_scheme=fp8)
    converted = converter.validate(dict(own))
    assert all(converted[name] == 1 for name in extra)

    tokens = torch.arange(1, 33).unsqueeze(0)
    for origin in (source, ours):
        nvfp4("convert", origin, ct, "-q", "--to", "compressed-tensors", "--kv", "fp8-cast", "--force")
        nvfp4("verify", ct, "--for", "transformers")
        model = AutoModelForCausalLM.from_pretrained(ct, dtype=torch.bfloat16)
        attention = [layer.self_attn for layer in model.model.layers]
        assert all(scale == 1 for a in attention for scale in (a.k_scale, a.v_scale)), [a.k_scale for a in attention]
        with torch.inference_mode():
            assert torch.isfinite(model(tokens).logits).all()
    print(f"  {len(own)} tensors beside ModelOpt's; {len(extra)} scales read by compressed-tensors and transformers")


@check
def gguf_py_decodes_to_modelopts_values(root):
    import gguf

    for name in MODELS:
        ours, plain = root / f"{name}-py.gguf", root / f"{name}-py"
        nvfp4("convert", made(root, name), ours, "-q", "--to", "gguf")
        nvfp4("convert", made(root, name), plain, "-q")
        reference = tensors(plain)
        reader = gguf.GGUFReader(ours)
        fields, found = {f.name for f in reader.fields.values()}, {t.name: t for t in reader.tensors}
        assert "general.architecture" in fields and "tokenizer.ggml.tokens" in fields
        count = 0
        for tensor in (t for t in reader.tensors if t.tensor_type == gguf.GGMLQuantizationType.NVFP4):
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            scale = torch.from_numpy(found[tensor.name.replace(".weight", ".scale")].data.copy())
            expected = modelopt_values(reference, tensor.name, name)
            if expected.ndim == 3:
                scale = scale.view(-1, 1, 1)
            # gguf-py multiplies codes by block scales, exactly; both then multiply by the tensor scale, in another order.
            difference = (values.view(expected.shape) * scale - expected).abs()
            assert (difference <= expected.abs() * 2.0**-23).all(), tensor.name
            count += 1
        print(f"  {name}: {count} tensors")


CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def decode(packed, scales, scale):
    values = CODES[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
    return values * (scales.float() * scale).repeat_interleave(16, -1)


def modelopt_values(reference, name, model):
    """The values of a GGUF tensor, from ModelOpt's tensors of the same weights."""
    _, layer, part, _ = name.split(".")
    of = lambda module: decode(*(reference[f"{module}.{p}"] for p in ("weight", "weight_scale", "weight_scale_2")))
    if part.endswith("_exps"):
        projection = NAMES[part.removesuffix("_exps")].split(".")[1]
        return torch.stack([of(f"model.layers.{layer}.mlp.experts.{e}.{projection}") for e in range(8)])
    values = of(f"model.layers.{layer}.{NAMES[part]}")
    if model == "llama" and part in ("attn_q", "attn_k"):
        values = values.view(-1, 2, 32, values.shape[1]).transpose(1, 2).reshape(values.shape)
    return values


@check
def llama_cpp_runs_our_gguf(root):
    import numpy as np
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in MODELS:
        ours, packed, plain = root / f"{name}-cpp.gguf", root / f"{name}-cpp", root / f"{name}-cpp-plain"
        nvfp4("convert", made(root, name), ours, "-q", "--to", "gguf")
        nvfp4("convert", made(root, name), packed, "-q")
        nvfp4("dequant", packed, plain)
        model = Llama(str(ours), n_ctx=128, logits_all=True, verbose=False)
        tokenizer = AutoTokenizer.from_pretrained(made(root, name))
        for text in TEXT:
            assert model.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text), text
        tokens = tokenizer.encode(TEXT[1])
        model.eval(tokens)
        logits = torch.from_numpy(np.array(model.scores[: len(tokens)]))
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        assert torch.isfinite(logits).all()
        cosine = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
        # llama.cpp rounds activations to 8 bits, so logits are near and not equal; rows in another order would not be near.
        print(f"  {name}: same tokens, cosine to transformers' logits at least {cosine.min():.5f}")
        assert cosine.min() > 0.99


@check
def comfy_kitchen_decodes_our_bytes(root):
    import comfy_kitchen
    from safetensors.torch import load_file

    ours, plain = root / "llama-comfy.safetensors", root / "llama-comfy-plain"
    nvfp4("convert", made(root, "llama"), ours, "-q", "--to", "comfyui")
    nvfp4("verify", ours, "--for", "comfyui")
    nvfp4("dequant", ours, plain, "--dtype", "f32")
    parts, decoded, source = load_file(ours), tensors(plain), tensors(made(root, "llama"))
    modules = [key.removesuffix(".comfy_quant") for key in parts if key.endswith(".comfy_quant")]
    same = 0
    for module in modules:
        codes, scales, scale = (parts[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        assert json.loads(parts[f"{module}.comfy_quant"].numpy().tobytes()) == {"format": "nvfp4"}
        expected = decoded[f"{module}.weight"]
        layout = comfy_kitchen.tensor.TensorCoreNVFP4Layout
        shape = tuple(expected.shape)
        assert tuple(codes.shape) == layout.get_storage_shape(shape), module
        params = layout.Params(scale=scale, orig_dtype=torch.float32, orig_shape=shape, block_scale=scales)
        assert torch.equal(layout.dequantize(codes, params), expected), module
        # It keeps the scale 0 of a block of zeros, which is 1 here, and divides in another order: most bytes are the same.
        own, tiles = comfy_kitchen.quantize_nvfp4(source[f"{module}.weight"], scale)
        assert tiles.shape == scales.shape and own.shape == codes.shape
        same += int(torch.equal(own, codes) and torch.equal(tiles.view(torch.uint8), scales.view(torch.uint8)))
    print(f"  {len(modules)} weights have our values; of {same} its own quantizer makes the same bytes")


@check
def torchao_decodes_our_bytes(root):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    packed, plain = root / "llama-ao", root / "llama-ao-plain"
    nvfp4("convert", made(root, "llama"), packed, "-q")
    nvfp4("dequant", packed, plain)
    parts, decoded = tensors(packed), tensors(plain)
    count = 0
    for key in [k for k in parts if k.endswith(".weight_scale_2")]:
        module = key.removesuffix(".weight_scale_2")
        tensor = NVFP4Tensor(
            parts[f"{module}.weight"], parts[f"{module}.weight_scale"], 16, torch.float32,
            per_tensor_scale=parts[key], is_swizzled_scales=False,
        )  # fmt: skip
        values = tensor.dequantize(torch.float32)
        assert torch.equal(values.to(torch.bfloat16), decoded[f"{module}.weight"]), module
        count += 1
    print(f"  {count} weights")


@check
def gpt_oss_keeps_its_values(root):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, packed, plain = made(root, "gpt-oss"), root / "oss", root / "oss-plain"
    nvfp4("convert", source, packed, "-q")
    nvfp4("dequant", packed, plain)
    original, decoded = tensors(source), tensors(plain)
    count = 0
    for key in [k for k in original if k.endswith("_blocks")]:
        module = key.removesuffix("_blocks")
        expected = convert_moe_packed_tensors(original[key], original[f"{module}_scales"], dtype=torch.bfloat16)
        assert torch.equal(expected, decoded[module]), f"{module}: {expected.shape} {decoded[module].shape}"
        count += 1
    print(f"  {count} tensors of experts")


@check
def minilm_before_and_after(root):
    minilm.table(root)


def main():
    wanted = sys.argv[1:] or list(CHECKS)
    passed, failed = 0, 0
    with tempfile.TemporaryDirectory() as root:
        for name in wanted:
            print(name, flush=True)
            try:
                CHECKS[name](Path(root))
                passed += 1
            except Exception:
                traceback.print_exc()
                failed += 1
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
