"""Small generated models in the shapes of Llama, Qwen3-MoE and GPT-OSS, and what is needed to read them."""

import json
import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BINARY = os.environ["NVFP4_BINARY"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = ["The cat sat on the mat, and it's 1234 o'clock.", "Ships sail 7 seas;\n\n  winds blow   where they will.", "a b c d"]


def nvfp4(*arguments, status=0):
    """Runs the command and returns what it printed."""
    done = subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == status, f"nvfp4 {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def tensors(folder):
    """All tensors of a checkpoint."""
    return {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}


def tokenizer(folder, size):
    """A byte-level BPE of at most `size` tokens that splits text as Qwen does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tok.train_from_iterator(TEXT * 50, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>").save_pretrained(folder)


def heavy_tailed(model):
    """Weights with outliers, as trained ones have."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn_like(parameter, dtype=torch.float32)
                parameter.copy_(0.05 * noise / (0.3 + torch.rand_like(noise)))
    return model


def llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    heavy_tailed(LlamaForCausalLM(config).to(torch.bfloat16)).save_pretrained(folder)
    tokenizer(folder, 512)


def qwen3_moe(folder):
    """Every token goes to every expert: to the best two, a last bit might decide which, and logits would not compare."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=8, vocab_size=512,
        max_position_embeddings=512, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    heavy_tailed(Qwen3MoeForCausalLM(config).to(torch.bfloat16)).save_pretrained(folder)
    tokenizer(folder, 512)


def gpt_oss(folder, experts=4, hidden=128, inner=64):
    """GPT-OSS's tensors: attention in BF16, experts in MXFP4."""
    torch.manual_seed(2)
    folder = Path(folder)
    folder.mkdir(parents=True)
    weights = {"model.embed_tokens.weight": torch.randn(64, hidden), "lm_head.weight": torch.randn(64, hidden)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        for projection in "qkvo":
            weights[f"{name}self_attn.{projection}_proj.weight"] = torch.randn(hidden, hidden) * 0.02
        weights[f"{name}mlp.router.weight"] = torch.randn(experts, hidden)
        for part, (rows, cols) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
            weights[f"{name}mlp.experts.{part}_blocks"] = torch.randint(0, 256, (experts, rows, cols // 32, 16)).byte()
            weights[f"{name}mlp.experts.{part}_scales"] = torch.randint(112, 128, (experts, rows, cols // 32)).byte()
    floats = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights.items()}
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
