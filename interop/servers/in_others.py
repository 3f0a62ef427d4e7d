"""Every family, read by transformers, compressed-tensors, gguf-py and llama.cpp: `in_others.py RESULTS.json [FAMILY …]`."""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import torch
import transformers
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from families import EVERY, make
from forms import Refused, converted, nvfp4
from safetensors.torch import load_file

FORM = "compressed-tensors W4A16"
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def in_compressed_tensors(source, root):
    """Its decoder gives our values."""
    packed, plain = converted(source, root, FORM)
    tensors, expected = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    modules = [name.removesuffix("weight_packed") for name in tensors if name.endswith(".weight_packed")]
    for module in modules:
        parts = {name.removeprefix(module): tensor for name, tensor in tensors.items() if name.startswith(module)}
        value = NVFP4PackedCompressor.decompress(parts, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
        assert torch.equal(value.to(torch.bfloat16), expected[f"{module}weight"]), f"{module}weight has other values"
    return len(modules)


def in_transformers(source, root):
    """The whole model, decoded while it loads, is the one that it loads from our decoded file."""
    packed, plain = converted(source, root, FORM)
    nvfp4("verify", packed, "--for", "transformers")
    kind = getattr(transformers, json.loads((source / "config.json").read_text())["architectures"][0])
    config = transformers.CompressedTensorsConfig(**json.loads((packed / "config.json").read_text())["quantization_config"], dequantize=True)
    found = kind.from_pretrained(packed, dtype=torch.bfloat16, quantization_config=config).state_dict()
    expected = kind.from_pretrained(plain, dtype=torch.bfloat16).state_dict()
    for name, value in expected.items():
        assert name in found, f"{name} is missing"
        assert torch.equal(found[name], value), f"{name} has other values"
    return len(expected)


def in_gguf(source, root):
    """gguf-py decodes every NVFP4 tensor to our values."""
    file = root / "model.gguf"
    nvfp4("convert", source, file, "-q", "--force", "--to", "gguf")
    packed, plain = root / "packed", root / "plain"
    nvfp4("convert", source, packed, "-q", "--force")
    nvfp4("dequant", packed, plain, "--force", "--dtype", "f32")
    expected, reader = load_file(plain / "model.safetensors"), gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = [name for name, tensor in tensors.items() if tensor.tensor_type == gguf.GGMLQuantizationType.NVFP4]
    for name in names:
        values = torch.from_numpy(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type))
        scale = torch.from_numpy(tensors[name.replace(".weight", ".scale")].data.copy())
        value = of_layer(expected, name, llama=source.name in ("llama", "mistral"))
        found = values.view(value.shape) * scale.view([-1] + [1] * (value.ndim - 1))
        # gguf-py multiplies codes by block scales, exactly; both then multiply by the tensor scale, in another order.
        assert ((found - value).abs() <= value.abs() * 2.0**-23).all(), f"{name} has other values"
    return len(names)


def of_layer(expected, name, llama):
    _, layer, part, _ = name.split(".")
    if part.endswith("_exps"):
        last = PARTS[part.removesuffix("_exps")].split(".")[1]
        experts = [expected[f"model.layers.{layer}.mlp.experts.{e}.{last}.weight"] for e in range(4)]
        return torch.stack(experts)
    value = expected[f"model.layers.{layer}.{PARTS[part]}.weight"]
    if llama and part in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, others halves of a head
        value = value.view(-1, 2, 16, value.shape[1]).transpose(1, 2).reshape(value.shape)
    return value


def in_llama_cpp(source, root):
    """llama.cpp loads the file and computes finite logits."""
    import numpy
    from llama_cpp import Llama

    file = root / "model.gguf"
    nvfp4("convert", source, file, "-q", "--force", "--to", "gguf")
    model = Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    model.eval(list(range(3, 35)))
    logits = numpy.array(model.scores[:32])
    assert numpy.isfinite(logits).all() and logits.std() > 0, "logits are not finite"
    return 32


COLUMNS = {
    "compressed-tensors": in_compressed_tensors, "transformers": in_transformers, "gguf-py": in_gguf, "llama.cpp": in_llama_cpp,
}  # fmt: skip


def cell(column, source, root):
    try:
        return "ok", str(column(source, root))
    except Refused as refusal:
        return "refused", str(refusal)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return "problem", text[0][:200] if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[0][:200]}"


def main():
    path, names = Path(sys.argv[1]), sys.argv[2:] or EVERY
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="nvfp4-servers-") as root:
            source = Path(root, name)
            make(name, source)
            results[name] = {title: cell(column, source, Path(root)) for title, column in COLUMNS.items()}
        print(name, *(f"| {state} {text if state != 'ok' else ''}" for state, text in results[name].values()), file=sys.stderr, flush=True)
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
