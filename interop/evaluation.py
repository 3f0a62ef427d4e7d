"""Holds the forward pass of `nvfp4-model` against transformers: small models of every family, whose logits in binary32 may be
no further from transformers' in binary64 than twice transformers' own in binary32, and what `nvfp4 eval` prints against a
short script. `python interop/evaluation.py FOLDER [CHECK …]` runs all or some; the example `logits` and the program `nvfp4`
must be built."""

import json, os, shutil, subprocess, sys
from pathlib import Path

import numpy, torch
import transformers as tf
from safetensors.torch import load_file, save_file

import forms, four_bits

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


def logits(where, rows):
    """Ours, in binary32."""
    (where / "tokens.json").write_text(json.dumps(rows))
    subprocess.run([BUILT / "examples/logits", where, where / "tokens.json", where / "logits.bin"], check=True)
    return torch.from_numpy(numpy.fromfile(where / "logits.bin", "<f4")).view(len(rows), len(rows[0]), -1).double()


def is_close(name, ours, single, double):
    """Whether ours are no further from binary64 than twice transformers in binary32."""
    theirs, own = (single - double).abs(), (ours - double).abs()
    good = own.max() <= 2 * theirs.max() and own.square().mean() <= 4 * theirs.square().mean()
    print(f"{'ok' if good else 'FAILED':7} {name:28} largest {own.max():.2e} (transformers {theirs.max():.2e}), "
          f"rms {own.square().mean().sqrt():.2e} ({theirs.square().mean().sqrt():.2e})")
    return bool(good)


def families_agree(folder):
    """Plain models of every family."""
    failed = 0
    for name, config in families():
        made, where = model(config), folder / name
        made.save_pretrained(where)
        rows = torch.randint(3, 320, (3, 60)).tolist()
        ours = logits(where, rows)
        with torch.no_grad():
            single = made(torch.tensor(rows)).logits.double()
            double = made.double()(torch.tensor(rows)).logits
        failed += not is_close(name, ours, single, double)
    return failed


def converted(source, target, *options):
    """What `nvfp4 convert` makes."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([BUILT / "nvfp4", "convert", source, target, "-q", "--json", *options], check=True, stdout=subprocess.DEVNULL)
    return target


def made_in_forms(folder):
    """A name, and the folder of a small model, in every form of weights."""
    wide = SMALL | dict(hidden_size=128, intermediate_size=256)
    moe = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, head_dim=32, norm_topk_prob=True)
    configs = {"llama": tf.LlamaConfig(**wide), "moe": tf.Qwen3MoeConfig(**wide, **moe),
               "oss": tf.GptOssConfig(**wide, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)}
    plain = {}
    for name, config in configs.items():
        plain[name] = folder / f"form-{name}"
        model(config).to(torch.bfloat16).save_pretrained(plain[name])
    for name in ("llama", "moe"):
        for target in ("modelopt", "compressed-tensors"):
            yield f"{name} NVFP4 {target}", converted(plain[name], folder / f"form-{name}-{target}", "--to", target)
            preset = "mlp+fp8" if name == "llama" else "experts+fp8"
            mixed = converted(plain[name], folder / f"form-{name}-mixed-{target}", "--to", target, "--preset", preset)
            yield f"{name} {preset} {target}", mixed
        for form in ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8"):
            # Blocks of 128 fit neither the few keys nor, in ModelOpt's format, experts.
            path = "*" if form != "fp8-block" else {"llama": "*.mlp.*", "moe": "*.o_proj"}[name]
            rules = folder / f"{form}.toml"
            rules.write_text(f'[[rule]]\npath = "{path}"\nform = "{form}"\n[default]\nform = "keep"\n')
            to = "compressed-tensors" if form == "fp8-channel" else "modelopt"
            yield f"{name} {form}", converted(plain[name], folder / f"form-{name}-{form}", "--rules", rules, "--to", to)
    for form in ("tensor", "channel", "block", "mx"):
        yield f"llama FP8 {form}", forms.in_fp8(plain["llama"], folder / f"form-llama-{form}", form)
    mxfp4 = forms.in_mxfp4(plain["oss"], folder / "form-oss-mxfp4")
    yield "gpt-oss MXFP4", mxfp4
    yield "gpt-oss NVFP4", converted(mxfp4, folder / "form-oss-nvfp4")


def forms_agree(folder):
    """Weights in every form, against transformers with what they decode to."""
    failed = 0
    for name, where in made_in_forms(folder):
        rows = torch.randint(3, 320, (3, 40)).tolist()
        plain = forms.plain(where, folder / "plain")
        with torch.no_grad():
            single, double = (forms.load(plain, t)(torch.tensor(rows)).logits.double() for t in (torch.float32, torch.float64))
        failed += not is_close(name, logits(where, rows), single, double)
    return failed


def keys_and_values_agree(folder):
    """Keys and values in FP8, with the scale 1 and with others, against transformers with attention that rounds them so. Rows
    are taken in which none is so near to the middle of two FP8 numbers that noise of binary32 rounds it elsewhere."""
    scales, unclear = {}, []

    def attention(module, query, key, value, mask, **options):
        def rounded(x, scale):
            fp8, noise = lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype), 4e-6 * x.square().mean().sqrt()
            unclear.append(not torch.equal(fp8(x - noise), fp8(x + noise)))
            return fp8(x) * scale

        k, v = scales.get(module.layer_idx, (1.0, 1.0))
        eager = tf.models.llama.modeling_llama.eager_attention_forward
        return eager(module, query, rounded(key, k), rounded(value, v), mask, **options)

    tf.AttentionInterface.register("rounded", attention)
    tf.AttentionMaskInterface.register("rounded", tf.masking_utils.eager_mask)
    failed, plain = 0, folder / "keys"
    model(tf.LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained(plain)
    for target in ("modelopt", "compressed-tensors"):
        where = converted(plain, folder / f"keys-{target}", "--to", target, "--preset", "fp8", "--kv", "fp8-cast")
        for kind in ("1", "stored"):
            stored = forms.tensors(where)
            for key in stored if kind == "stored" else ():
                if key.endswith(("k_scale", "v_scale")):
                    stored[key] = torch.full_like(stored[key], 0.25 if "k_" in key else 0.375)
                    scales[int(key.split(".")[2])] = (0.25, 0.375)
            save_file(stored, where / "model.safetensors", {"format": "pt"})
            decoded = forms.plain(where, folder / "plain")
            single, double = (forms.load(decoded, dtype) for dtype in (torch.float32, torch.float64))
            for made in (single, double):
                made.set_attn_implementation("rounded")
            for _ in range(1000):
                rows = torch.randint(3, 320, (1, 12))
                unclear.clear()
                with torch.no_grad():
                    expected, theirs = double(rows).logits, single(rows).logits.double()
                if not any(unclear):
                    break
            failed += any(unclear) or not is_close(f"{target}, FP8 KV, {kind}", logits(where, rows.tolist()), theirs, expected)
        scales.clear()
    return failed


def experts_in_one_tensor_agree(folder):
    """Experts in one tensor, of either order, give what they give apart, to the bit."""
    failed = 0
    configs = {"mixtral": tf.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
               "qwen3-moe": tf.Qwen3MoeConfig(**SMALL, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)}
    for name, config in configs.items():
        apart = folder / f"apart-{name}"
        model(config).save_pretrained(apart)
        rows = torch.randint(3, 320, (3, 40)).tolist()
        expected = logits(apart, rows)
        for order in ("outputs", "inputs"):
            good = torch.equal(expected, logits(forms.stacked(apart, folder / f"stacked-{name}-{order}", order == "inputs"), rows))
            failed += not good
            print(f"{'ok' if good else 'FAILED':7} {name}, experts in one tensor, {order} first")
    return failed


def four_bits_agree(folder):
    """Every layer with activations in 4 bits gives the bits of the same rule in torch, for scales that nothing made round."""
    wide = SMALL | dict(hidden_size=128, intermediate_size=256)
    moe = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, head_dim=32)
    failed = 0
    for name, config in (("llama", tf.LlamaConfig(**wide)), ("moe", tf.Qwen3MoeConfig(**wide, **moe))):
        for target in ("modelopt", "compressed-tensors"):
            plain, where = folder / f"four-{name}", folder / f"four-{name}-{target}"
            model(config).save_pretrained(plain)
            converted(plain, where, "--to", target, "--acts", "const")
            stored = forms.tensors(where)
            # Some inputs saturate, some blocks vanish, and no scale is an amax over 2688.
            for key in stored:
                if key.endswith(("input_scale", "input_global_scale")):
                    scale = torch.rand(()) * 10.0 ** torch.randint(-4, 1, ())
                    stored[key] = (1 / scale if "global" in key else scale).reshape(stored[key].shape)
            save_file(stored, where / "model.safetensors", {"format": "pt"})
            (where / "tokens.json").write_text(json.dumps(torch.randint(3, 320, (3, 40)).tolist()))
            subprocess.run([BUILT / "examples/layers", where, where / "tokens.json", where / "layers.safetensors.dump"], check=True)
            seen = load_file(where / "layers.safetensors.dump")
            modules = [key[: -len(".input")] for key in seen if key.endswith(".input")]
            wrong = [m for m in modules if not torch.equal(four_bits.product(seen[f"{m}.input"], stored, m), seen[f"{m}.output"])]
            good = modules and not wrong
            failed += not good
            print(f"{'ok' if good else 'FAILED':7} {name} W4A4 {target}: {len(modules)} layers, {len(wrong)} differ {wrong[:3]}")
    return failed


def tokenizer(folder):
    """A tokenizer of words that are called by their tokens."""
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(320)}, "unk_token": "w0"}
    made = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(made))


def text(path, tokens):
    """A text of these tokens."""
    path.write_text(" ".join(f"w{token}" for token in tokens.flatten()))


def calibration_agrees(folder):
    """Amaxes of inputs, and scales of keys and values, against ModelOpt's `max` calibration on the same tokens: to the bit for
    the same inputs; and for the same tokens, as near as the inputs of the two programs are."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.calib import MaxCalibrator
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

    failed = 0
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        made, where = model(tf.LlamaConfig(**SMALL)).to(dtype), folder / f"calibrated-{dtype}".replace("torch.", "")
        made.save_pretrained(where)
        tokenizer(where)
        tokens = torch.randint(3, 320, (4, 60))
        text(where / "text.txt", tokens)
        (where / "tokens.json").write_text(json.dumps(tokens.tolist()))
        stats = where / "stats.safetensors.found.safetensors"
        subprocess.run([BUILT / "nvfp4", "calibrate", where, "--text", where / "text.txt", "--context", "60", "-o", stats, "-q",
                        "--json"], check=True, stdout=subprocess.DEVNULL)
        ours = load_file(stats)
        stats.unlink()
        config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
        config["quant_cfg"] = update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])["quant_cfg"]
        mtq.quantize(made, config, lambda quantized: quantized(tokens))
        theirs = {}
        for name, module in made.named_modules():
            if ".layers." in name and hasattr(module, "input_quantizer") and module.input_quantizer.amax is not None:
                theirs[f"{name}.input_amax"] = module.input_quantizer.amax.float()
            for letter in "kv":
                if hasattr(module, f"{letter}_bmm_quantizer"):
                    theirs[f"{name}.{letter}_scale"] = getattr(module, f"{letter}_bmm_quantizer").amax.float() / 448
        away = max(abs(ours[name].item() / theirs[name].item() - 1) for name in theirs)
        good = len(theirs) == 3 * 9 and away <= bound
        print(f"{'ok' if good else 'FAILED':7} calibration, {dtype}: {len(theirs)} numbers, at most {away:.1e} from ModelOpt's")
        subprocess.run([BUILT / "examples/layers", where, where / "tokens.json", where / "layers.dump"], check=True)
        seen, equal = load_file(where / "layers.dump"), 0
        for name in seen:
            if name.endswith(".input"):
                calibrator = MaxCalibrator(8, None, False)
                calibrator.collect(seen[name])
                equal += torch.equal(calibrator.compute_amax().reshape(1), ours[f"{name}_amax"])
        same = equal == 3 * 7
        print(f"{'ok' if same else 'FAILED':7} calibration, {dtype}: {equal} amaxes of the same inputs are ModelOpt's, to the bit")
        failed += (not good) + (not same)
    return failed


def evaluation_agrees(folder):
    """Perplexity and divergence of a model from another one of the same shape, to 5 digits, against torch in binary64."""
    first, second = model(tf.LlamaConfig(**SMALL)), model(tf.LlamaConfig(**SMALL))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    tokens = torch.randint(3, 320, (4, 60))
    for name, made in (("first", first), ("second", second)):
        made.save_pretrained(folder / name)
        tokenizer(folder / name)
    text(folder / "text.txt", tokens)
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


CHECKS = [families_agree, forms_agree, keys_and_values_agree, experts_in_one_tensor_agree,
          four_bits_agree, calibration_agrees, evaluation_agrees]

if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    asked = [check for check in CHECKS if not sys.argv[2:] or check.__name__ in sys.argv[2:]]
    sys.exit(1 if sum(check(target) for check in asked) else 0)
