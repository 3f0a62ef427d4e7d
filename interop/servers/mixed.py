"""Mixed checkpoints: the bytes of ModelOpt and of llm-compressor for the same rules. `mixed.py` ends in the number that agree."""

import checks
import torch
import transformers
from families import make
from forms import nvfp4
from safetensors.torch import load_file

MODELS = ("llama", "qwen3_moe")
RULES = """
[[rule]]
path = "**.mlp.**"
form = "{mlp}"
[[rule]]
path = "**.self_attn.*"
form = "{attention}"
"""
# ModelOpt's quantizers of weights and inputs, by the form that a rule names.
E4M3, E2M1 = (4, 3), (2, 1)
NVFP4 = {"num_bits": E2M1, "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": E4M3}}
MODELOPT = {
    "nvfp4-w4a16": (NVFP4, None),
    "nvfp4-w4a4": (NVFP4, NVFP4),
    "fp8-tensor": ({"num_bits": E4M3}, {"num_bits": E4M3}),
    "fp8-block": ({"num_bits": E4M3, "block_sizes": {-1: 128, -2: 128}}, None),
}
# llm-compressor's schemes.
SCHEMES = {"nvfp4-w4a16": "NVFP4A16", "fp8-channel": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "mxfp8": "MXFP8"}


def ours(source, root, forms, *options):
    rules, folder = root / "rules.toml", root / "ours"
    rules.write_text(RULES.format(mlp=forms[0], attention=forms[1]))
    nvfp4("convert", source, folder, "-q", "--force", "--rules", rules, *options)
    nvfp4("verify", folder, "--for", "vllm")
    nvfp4("dequant", folder, root / "plain", "--force")
    return load_file(folder / "model.safetensors")


def of_modelopt(source, root, forms):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    rules = [{"quantizer_name": "*", "enable": False}]
    for part, form in zip(("*mlp*", "*self_attn*"), forms):
        for kind, quantizer in zip(("weight", "input"), MODELOPT[form]):
            if quantizer:
                rules.append({"quantizer_name": f"{part}{kind}_quantizer", "cfg": quantizer, "enable": True})
    rules += [{"quantizer_name": "*mlp.gate.*", "enable": False}]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, forward_loop=lambda model: model(torch.arange(3, 67).view(1, -1)))
    for name, module in model.named_modules():
        if name.endswith("input_quantizer") and module.is_enabled:
            module.amax = torch.tensor(448.0 if module.num_bits == E4M3 else 2688.0)  # the scale 1
    folder = root / "theirs"
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder)
    return load_file(folder / "model.safetensors")


def of_llm_compressor(source, root, forms):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    groups = {SCHEMES[form]: [target] for form, target in zip(forms, (r"re:.*mlp\..*_proj$", r"re:.*self_attn.*_proj$"))}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    from compressed_tensors.quantization import preset_name_to_scheme

    groups = {f"group_{i}": preset_name_to_scheme(scheme, targets) for i, (scheme, targets) in enumerate(groups.items())}
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]), pipeline="datafree")
    folder = root / "theirs"
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(a, b):
    assert a.keys() == b.keys(), f"only in one: {sorted(a.keys() ^ b.keys())[:6]}"
    for name, left in a.items():
        right = b[name]
        assert left.dtype == right.dtype and left.numel() == right.numel(), f"{name}: {left.dtype} {left.shape}, {right.dtype} {right.shape}"
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), f"{name} differs"
    return len(a)


def beside(model, forms, theirs, options):
    """A check of one model with one form for MLPs and another for attention."""

    def check(root):
        # k_proj has whole blocks of 128 × 128, and two of them: ModelOpt takes the only block of a matrix for a tensor scale.
        make(model, root / model, num_key_value_heads=4, hidden_size=256)
        expected = theirs(root / model, root, forms)
        return f"{same(ours(root / model, root, forms, *options), expected)} tensors are the same"

    return f"{model}: {forms[0]} and {forms[1]}, {theirs.__name__.removeprefix('of_')}", check


CHECKS = dict([
    *(beside(model, ("nvfp4-w4a16", "fp8-tensor"), of_modelopt, ["--acts", "const"]) for model in MODELS),
    *(beside(model, ("nvfp4-w4a4", "fp8-tensor"), of_modelopt, ["--acts", "const"]) for model in MODELS),
    *(beside(model, ("nvfp4-w4a16", "fp8-block"), of_modelopt, []) for model in MODELS),
    *(beside("llama", ("nvfp4-w4a16", other), of_llm_compressor, ["--to", "compressed-tensors", "--profile", "llm-compressor"])
      for other in ("fp8-channel", "fp8-block", "mxfp8")),
])  # fmt: skip


if __name__ == "__main__":
    checks.run(CHECKS)
