"""MXFP4 that stays beside NVFP4 and FP8, and DeepSeek-V4's form, loaded by vLLM. `kept.py` ends in the number that passed."""

import json

import checks
import loader
import torch
from families import make
from forms import nvfp4
from safetensors.torch import load_file, save_file
from values import compare, decoded

# A DeepSeek-V4 without sparse attention, with the sizes of heads that vLLM's classes take.
HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY, HEADS, STREAMS = 256, 128, 4, 2, 256, 64, 4
DEEPSEEK = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", torch_dtype="bfloat16", hidden_size=HIDDEN, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=128, o_groups=8,
    sliding_window=128, compress_ratios=[1] * LAYERS, rms_norm_eps=1e-6, n_routed_experts=EXPERTS, num_experts_per_tok=2,
    moe_intermediate_size=INNER, n_shared_experts=1, norm_topk_prob=True, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
    routed_scaling_factor=1.5, swiglu_limit=10.0, hidden_act="silu", num_hash_layers=0, hc_mult=STREAMS, hc_eps=1e-6, hc_sinkhorn_iters=20,
    index_topk=512, index_n_heads=64, index_head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=128, rope_theta=10000.0,
    compress_rope_theta=160000.0, rope_scaling=None, tie_word_embeddings=False, expert_dtype="fp4",
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]),
)  # fmt: skip


def powers(rows, cols):
    return torch.randint(118, 127, (rows, cols), dtype=torch.uint8)


def mxfp4(rows, cols):
    """Codes and scales of a matrix."""
    return torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8), powers(rows, cols // 32)


def deepseek_v4(folder):
    """The model as DeepSeek publishes it: FP8 in blocks and experts in MXFP4, with `scale` beside each."""
    torch.manual_seed(1)
    tensors = {}

    def plain(name, *shape, dtype=torch.bfloat16):
        tensors[name] = (0.05 * torch.randn(shape)).to(dtype)

    def eight(module, rows, cols):
        tensors[f"{module}.weight"] = torch.randn(rows, cols).to(torch.float8_e4m3fn)
        tensors[f"{module}.scale"] = powers(-(-rows // 128), -(-cols // 128)).view(torch.float8_e8m0fnu)

    def four(module, rows, cols):
        codes, scales = mxfp4(rows, cols)
        tensors[f"{module}.weight"], tensors[f"{module}.scale"] = codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)

    for layer in range(LAYERS):
        at = f"layers.{layer}"
        for part in ("attn", "ffn"):
            plain(f"{at}.{part}_norm.weight", HIDDEN)
            mixed = (2 + STREAMS) * STREAMS
            for name, shape in ("fn", (mixed, STREAMS * HIDDEN)), ("base", (mixed,)), ("scale", (3,)):
                plain(f"{at}.hc_{part}_{name}", *shape, dtype=torch.float32)
        plain(f"{at}.attn.attn_sink", HEADS, dtype=torch.float32)
        plain(f"{at}.attn.q_norm.weight", 128)
        plain(f"{at}.attn.kv_norm.weight", 512)
        eight(f"{at}.attn.wq_a", 128, HIDDEN)
        eight(f"{at}.attn.wkv", 512, HIDDEN)
        eight(f"{at}.attn.wq_b", HEADS * 512, 128)
        eight(f"{at}.attn.wo_a", 8 * 128, HEADS * 512 // 8)
        eight(f"{at}.attn.wo_b", HIDDEN, 8 * 128)
        plain(f"{at}.ffn.gate.weight", EXPERTS, HIDDEN)
        plain(f"{at}.ffn.gate.bias", EXPERTS, dtype=torch.float32)
        for which, write in ("shared_experts", eight), *((f"experts.{e}", four) for e in range(EXPERTS)):
            write(f"{at}.ffn.{which}.w1", INNER, HIDDEN)
            write(f"{at}.ffn.{which}.w2", HIDDEN, INNER)
            write(f"{at}.ffn.{which}.w3", INNER, HIDDEN)
    plain("embed.weight", VOCABULARY, HIDDEN)
    plain("head.weight", VOCABULARY, HIDDEN)
    plain("norm.weight", HIDDEN)
    for name, shape in ("fn", (STREAMS, STREAMS * HIDDEN)), ("base", (STREAMS,)), ("scale", (1,)):
        plain(f"hc_head_{name}", *shape, dtype=torch.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DEEPSEEK, indent=1))


def is_same(a, b):
    return a.shape == b.shape and torch.equal(loader.bytes_of(a), loader.bytes_of(b))


def in_deepseek_v4s_form(root):
    """vLLM reads every expert in NVFP4 with the values of its MXFP4, and everything else as it was."""
    deepseek_v4(root / "in")
    nvfp4("convert", root / "in", root / "out", "-q", "--to", "deepseek-v4", "--acts", "const")
    nvfp4("verify", root / "out", "--for", "vllm")
    before, after = loader.load(root / "in"), loader.load(root / "out")
    empty = [name for name, parameter in [*before.items(), *after.items()] if loader.unfilled(parameter)]
    assert not empty, f"not filled: {empty}"
    experts = [name for name in before if name.endswith(("w13_weight", "w2_weight"))]
    for name in before:
        if name in experts:
            assert torch.equal(decoded(before, name), decoded(after, name)), f"{name} has other values"
        elif not name.endswith("weight_scale") or ".experts." not in name:
            assert is_same(before[name], after[name]), f"{name} has other bytes"
    assert all((value == 1).all() for name, value in after.items() if name.endswith("input_scale")), "activation scales"
    return f"{len(experts)} tensors of experts have their values, {len(before) - 2 * len(experts)} parameters their bytes"


def beside(model, kept, other):
    """A check of a compressed-tensors source whose `kept` is MXFP4: it stays, and the rest gets another form."""

    def check(root):
        make(model, root / "plain-source")
        tensors, config = load_file(root / "plain-source/model.safetensors"), json.loads((root / "plain-source/config.json").read_text())
        torch.manual_seed(2)
        for name in [name for name in tensors if kept in name and name.endswith("_proj.weight")]:
            module, shape = name.removesuffix(".weight"), tensors.pop(name).shape
            tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"] = mxfp4(*shape)
        numbers = dict(num_bits=4, type="float", symmetric=True, group_size=32, strategy="group", dynamic=False, scale_dtype="torch.uint8")
        group = dict(targets=[rf"re:.*{kept}.*_proj$"], weights=numbers, input_activations=None, format="mxfp4-pack-quantized")
        config["quantization_config"] = dict(
            config_groups=dict(group_0=group), quant_method="compressed-tensors", format="mxfp4-pack-quantized", ignore=["lm_head"],
            quantization_status="compressed",
        )  # fmt: skip
        (root / "in").mkdir()
        save_file(tensors, root / "in/model.safetensors", {"format": "pt"})
        (root / "in/config.json").write_text(json.dumps(config))
        (root / "rules.toml").write_text(f'[[rule]]\npath = "**.{kept}.**"\nform = "mxfp4"\n[default]\nform = "{other}"\n')
        nvfp4("convert", root / "in", root / "out", "-q", "--to", "compressed-tensors", "--rules", root / "rules.toml")
        nvfp4("verify", root / "out", "--for", "vllm")
        nvfp4("dequant", root / "out", root / "plain")
        written = load_file(root / "out/model.safetensors")
        same = [name for name in written if name.endswith(".weight_packed") and name in tensors]
        assert same and all(torch.equal(written[name], tensors[name]) for name in same), "codes of MXFP4"
        problems, count = compare(loader.load(root / "out"), loader.load(root / "plain"), activations=False)
        assert not problems, problems
        return f"{len(same)} weights in MXFP4 as they were, {count} quantized matrices in vLLM"

    return check


CHECKS = {
    "DeepSeek-V4's form": in_deepseek_v4s_form,
    "Llama: MLPs in MXFP4 beside NVFP4": beside("llama", "mlp", "nvfp4"),
    "Llama: MLPs in MXFP4 beside FP8": beside("llama", "mlp", "fp8"),
    "Qwen3-MoE: experts in MXFP4 beside NVFP4": beside("qwen3_moe", "mlp.experts", "nvfp4"),
}


if __name__ == "__main__":
    loader.begin()
    checks.run(CHECKS)
