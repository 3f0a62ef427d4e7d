"""Holds the forward pass of `nvfp4-model` against transformers: small models of every family, whose logits in binary32 may be
no further from transformers' in binary64 than twice transformers' own in binary32, and what `nvfp4 eval` prints against a
short script. `python interop/evaluation.py FOLDER`, with the example `logits` and the program `nvfp4` built before."""

import json, os, subprocess, sys
from pathlib import Path

import numpy, torch
import transformers as tf

BUILT = Path(os.environ.get("NVFP4_BUILT", "target/debug"))
SMALL = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)


def families():
    """A name, and the configuration of a small model."""
    yield "llama", tf.LlamaConfig(**SMALL)
    yield "llama-biases-tied", tf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    yield "llama-llama3", tf.LlamaConfig(**SMALL, rope_parameters=LLAMA3)
    yield "llama-linear", tf.LlamaConfig(**SMALL, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    yield "llama-yarn", tf.LlamaConfig(**SMALL, rope_parameters=YARN)
    yield "mistral", tf.MistralConfig(**SMALL, sliding_window=16, head_dim=32)
    yield "qwen2", tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    yield "qwen3", tf.Qwen3Config(**SMALL, head_dim=32)
    moe = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48)
    yield "qwen3-moe", tf.Qwen3MoeConfig(**SMALL, head_dim=32, norm_topk_prob=True, **moe)
    yield "qwen3-moe-mixed", tf.Qwen3MoeConfig(**SMALL, head_dim=32, mlp_only_layers=[1], **moe)
    yield "mixtral", tf.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2)
    yield "phi3", tf.Phi3Config(**SMALL, sliding_window=24)
    partial = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    yield "phi3-partial", tf.Phi3Config(**SMALL, rope_parameters=partial)
    factors = dict(short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)])
    long = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32, factor=8.0, **factors)
    yield "phi3-longrope", tf.Phi3Config(**SMALL, rope_parameters=long, original_max_position_embeddings=32)
    yield "gemma2", tf.Gemma2Config(**SMALL, head_dim=32, sliding_window=16, query_pre_attn_scalar=40,
                                    attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    yield "gemma3", tf.Gemma3TextConfig(**SMALL | dict(num_hidden_layers=7), head_dim=32, sliding_window=16)
    oss = dict(rope_type="yarn", rope_theta=1.5e5, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
               original_max_position_embeddings=64)
    yield "gpt-oss", tf.GptOssConfig(**SMALL, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
                                     rope_parameters=oss)


def model(config, seed=0):
    """A model of generated weights. Norms and biases are not what they begin as, so that a forgotten one shows."""
    torch.manual_seed(seed)
    made = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = 0.15 if parameter.ndim > 1 else 0.3
            centre = 1.0 if parameter.ndim == 1 and "norm" in name and "gemma" not in config.model_type else 0.0
            parameter.copy_(centre + spread * torch.randn_like(parameter))
    return made


def families_agree(folder):
    """No further from binary64 than twice transformers in binary32."""
    failed = 0
    for name, config in families():
        made, where = model(config), folder / name
        made.save_pretrained(where)
        rows = torch.randint(3, 320, (3, 60)).tolist()
        (where / "tokens.json").write_text(json.dumps(rows))
        subprocess.run([BUILT / "examples/logits", where, where / "tokens.json", where / "logits.bin"], check=True)
        ours = torch.from_numpy(numpy.fromfile(where / "logits.bin", "<f4")).view(3, 60, -1).double()
        with torch.no_grad():
            single = made(torch.tensor(rows)).logits.double()
            double = made.double()(torch.tensor(rows)).logits
        theirs, own = (single - double).abs(), (ours - double).abs()
        good = own.max() <= 2 * theirs.max() and own.square().mean() <= 4 * theirs.square().mean()
        failed += not good
        print(f"{'ok' if good else 'FAILED':7} {name:20} largest {own.max():.2e} (transformers {theirs.max():.2e}), "
              f"rms {own.square().mean().sqrt():.2e} ({theirs.square().mean().sqrt():.2e})")
    return failed


def evaluation_agrees(folder):
    """Perplexity and divergence of a model from another one of the same shape, to 5 digits, against torch in binary64."""
    first, second = model(tf.LlamaConfig(**SMALL)), model(tf.LlamaConfig(**SMALL))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    words = {f"w{i}": i for i in range(320)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    tokens = torch.randint(3, 320, (4, 60))
    for name, made in (("first", first), ("second", second)):
        made.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "text.txt").write_text(" ".join(f"w{token}" for token in tokens.flatten()))
    words = [BUILT / "nvfp4", "eval", folder / "first", folder / "second", "--text", folder / "text.txt", "--context", "60"]
    found = json.loads(subprocess.run([*words, "--json", "-q"], check=True, capture_output=True).stdout)
    with torch.no_grad():
        p, q = ((m.double()(tokens).logits[:, :-1]).log_softmax(-1) for m in (first, second))
    losses = [-l.gather(-1, tokens[:, 1:, None]).mean() for l in (p, q)]
    served = found["runs"][1]
    pairs = {"perplexity of the first": (found["runs"][0]["perplexity"]["mean"], losses[0].exp()),
             "perplexity of the second": (served["perplexity"]["mean"], losses[1].exp()),
             "KL divergence": (served["compared"]["divergence"]["mean"]["mean"], (p.exp() * (p - q)).sum(-1).mean()),
             "same top token": (served["compared"]["agreement"]["mean"], (p.argmax(-1) == q.argmax(-1)).double().mean())}
    failed = 0
    for name, (ours, theirs) in pairs.items():
        good = abs(ours / theirs.item() - 1) < 5e-6
        failed += not good
        print(f"{'ok' if good else 'FAILED':7} {name:25} {ours:.8f} (torch {theirs.item():.8f})")
    return failed


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    sys.exit(1 if families_agree(target) + evaluation_agrees(target) else 0)
