"""NVFP4 checkpoints in transformers: loaded as they are, packed in memory, with the products of their codes."""

import importlib
import json
import shutil

import pytest
import torch
import transformers as tf

import nvfp4
import nvfp4.torch
import nvfp4.transformers
from nvfp4.transformers._experts import Experts

SMALL = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
FAMILIES = {
    "llama": tf.LlamaConfig(**SMALL),
    "llama-biases-tied": tf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": tf.MistralConfig(**SMALL, sliding_window=16, head_dim=32),
    "qwen2": tf.Qwen2Config(**SMALL),
    "qwen3": tf.Qwen3Config(**SMALL, head_dim=32),
    "phi3": tf.Phi3Config(**SMALL),
    "gemma2": tf.Gemma2Config(**SMALL, head_dim=32, sliding_window=16),
    "gemma3": tf.Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=16),
    "qwen3-moe": tf.Qwen3MoeConfig(**SMALL, head_dim=32, norm_topk_prob=True, **MOE),
    "qwen3-moe-mixed": tf.Qwen3MoeConfig(**SMALL, head_dim=32, mlp_only_layers=[1], **MOE),
    "qwen2-moe": tf.Qwen2MoeConfig(**SMALL, shared_expert_intermediate_size=32, **MOE),
    "granite-moe": tf.GraniteMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": tf.DeepseekV3Config(**SMALL | dict(num_key_value_heads=4), q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
                                       qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1, n_group=1, topk_group=1,
                                       n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "mixtral": tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": tf.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": tf.GptOssConfig(**SMALL, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}  # fmt: skip
LLAMA4 = tf.Llama4TextConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96, head_dim=16, moe_layers=[1])
TOKENS = torch.randint(3, 160, (2, 24), generator=torch.Generator().manual_seed(1))


def made(name):
    """A model of generated weights. Norms and biases are not what they begin as, so that a forgotten one shows."""
    torch.manual_seed(0)
    config = FAMILIES[name] if isinstance(name, str) else name
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and "norm" in path and "gemma" not in config.model_type else 0.0
            parameter.copy_(centre + (0.15 if parameter.ndim > 1 else 0.3) * torch.randn_like(parameter))
    return model.eval()


def loaded(folder, **given):
    given = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager", **given}
    return tf.AutoModelForCausalLM.from_pretrained(folder, **given)


def layers(model):
    """Layers with codes, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in found.items() if isinstance(module.weight, nvfp4.torch.QuantizedTensor)}


@torch.no_grad()
def decoded(model, ours):
    """The model with the values of the codes of another in the place of its weights."""
    for name, layer in layers(ours).items():
        if ".experts." not in name or isinstance(model.get_submodule(name.rpartition(".experts.")[0] + ".experts"), torch.nn.ModuleList):
            model.get_submodule(name).weight.copy_(layer.weight.dequantize())
    for name, experts in ours.named_modules():
        if isinstance(experts, Experts):
            theirs = model.get_submodule(name)
            for number in range(experts.num_experts):
                *before, down = (getattr(experts._modules[str(number)], last).weight.dequantize() for last in experts.lasts)
                for matrix, value in ((theirs.gate_up_proj, torch.cat(before)), (theirs.down_proj, down)):
                    matrix[number].copy_(value.t() if theirs.is_transposed else value)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a family in a form, made once."""
    kept = {}

    def of(name, to="modelopt", activations=False):
        if (name, to, activations) not in kept:
            folder = tmp_path_factory.mktemp(f"{name}-{to}-{activations}")
            plain = kept.get(name)
            if plain is None:
                plain = kept[name] = folder / "plain"
                made(name).save_pretrained(plain)
            acts = None
            if activations:
                stats = nvfp4.calibrate(made(name), [TOKENS])
                acts = {key.removesuffix(".input_amax"): value.item() for key, value in stats.items() if key.endswith(".input_amax")}
            nvfp4.convert(str(plain), str(folder / "codes"), to=to, acts=acts)
            kept[name, to, activations] = folder / "codes"
        return kept[name, to, activations]

    return of


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_decoded_weights(checkpoints, name):
    """In float32 no further from float64 than twice transformers itself with the decoded weights."""
    model = loaded(checkpoints(name))
    assert layers(model) and not any(layer.weight.requires_grad for layer in layers(model).values())
    reference = decoded(made(name), model)
    with torch.no_grad():
        ours, theirs = model(TOKENS).logits.double(), reference(TOKENS).logits.double()
        exact = reference.double()(TOKENS).logits
    own, other = (ours - exact).abs(), (theirs - exact).abs()
    assert own.max() <= 2 * other.max() and own.square().mean() <= 4 * other.square().mean()


def outputs_of_layers(model):
    """Inputs and outputs of all layers with codes, in one pass."""
    seen, hooks = [], []
    for name, layer in layers(model).items():
        note = lambda module, args, y, name=name: seen.append((name, args[0].detach(), y.detach()))  # noqa: E731
        hooks.append(layer.register_forward_hook(note))
    with torch.no_grad():
        model(TOKENS)
    for hook in hooks:
        hook.remove()
    return seen


def quantized(weight):
    """A weight of codes as a tensor of this package."""
    from nvfp4.torch._blocks import parts_of

    parts = parts_of(weight.row, weight.spec, "row", weight.matrix)
    return nvfp4.QuantTensor.from_parts(weight.spec, list(weight.matrix), row=parts)


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "phi3", "qwen3-moe", "mixtral"])
def test_inputs_are_quantized_by_the_scales_of_the_checkpoint(checkpoints, name, to):
    """Every product of W4A4 has the bits of the rules, given its input."""
    model = loaded(checkpoints(name, to, activations=True))
    seen = outputs_of_layers(model)
    assert {layer for layer, *_ in seen} <= set(layers(model)) and len(seen) >= 8
    for layer, x, y in seen:
        module = model.get_submodule(layer)
        bias = None if module.bias is None else module.bias.detach()
        x = x.reshape(-1, x.shape[-1])
        left = nvfp4.Quantizer().quantize(x, amax=module.input_amax)
        expected = nvfp4.matmul(left, quantized(module.weight), bias=bias)
        assert torch.equal(y.reshape(expected.shape), expected), layer
    plain = loaded(checkpoints(name, to, activations=True), quantization_config=nvfp4.transformers.Config(activations="none"))
    assert not any(hasattr(layer, "input_amax") for layer in layers(plain).values()) and layers(plain).keys() == layers(model).keys()
    for layer, x, y in outputs_of_layers(plain)[:4]:
        module = plain.get_submodule(layer)
        assert torch.equal(y, torch.nn.functional.linear(x, module.weight, module.bias))


def test_a_model_without_its_head_is_loaded(checkpoints):
    """Names in the model lack the prefix that they have in the file."""
    base = tf.AutoModel.from_pretrained(checkpoints("mixtral"), dtype=torch.float32, attn_implementation="eager")
    whole = loaded(checkpoints("mixtral"))
    assert [f"model.{name}" for name in layers(base)] == list(layers(whole))
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, whole.model(TOKENS).last_hidden_state)


def test_weights_are_codes_in_memory(checkpoints):
    model = loaded(checkpoints("qwen3-moe"), dtype=torch.bfloat16)
    for layer in layers(model).values():
        rows, cols = layer.weight.shape
        # Codes and scales begin at whole multiples of some bytes; the scale of the tensor follows.
        most = rows * cols * 9 // 16 + 2 * nvfp4._nvfp4._block_alignment + 4
        assert layer.weight.dtype is torch.bfloat16 and layer.weight.nbytes <= most
        assert not dict(layer.named_buffers())
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts) and not list(experts.parameters(recurse=False))
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "mixtral", "gpt-oss"])
def test_models_generate(checkpoints, name):
    """With a cache and in batches, the tokens of passes over the whole text."""
    model = loaded(checkpoints(name))
    text = model.generate(TOKENS[:, :8], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert text.shape == (2, 14)
    with torch.no_grad():
        for at in range(8, 14):
            assert torch.equal(model(text[:, :at]).logits[:, -1].argmax(-1), text[:, at])


@pytest.mark.parametrize("name, activations", [("llama", False), ("llama", True), ("phi3", False)])
def test_generate_compiles_the_step_of_a_token(checkpoints, name, activations):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, settings = loaded(checkpoints(name, activations=activations)), tf.CompileConfig(backend="aot_eager", fullgraph=True)
    settings._compile_all_devices = True  # as on a GPU
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    eager = model.generate(TOKENS[:, :8], **given)
    assert model.hf_quantizer.is_compileable and not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(model.generate(TOKENS[:, :8], **given, compile_config=settings), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_experts_are_not_compiled_by_generate(checkpoints):
    assert not loaded(checkpoints("mixtral")).hf_quantizer.is_compileable


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "mixtral"])
def test_a_saved_model_is_its_checkpoint(checkpoints, tmp_path, name, to):
    from safetensors.torch import load_file

    folder = checkpoints(name, to, activations=True)
    model = loaded(folder)
    model.save_pretrained(tmp_path)
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path))
    before.pop("lm_head.weight", None)  # tied to the embedding
    after.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype is tensor.dtype and after[key].shape == tensor.shape, key
        assert torch.equal(after[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
    configs = [json.loads((where / "config.json").read_text())["quantization_config"] for where in (folder, tmp_path)]
    assert configs[0] == configs[1]
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_types_and_devices_change(checkpoints):
    folder = checkpoints("llama", activations=True)
    model, half = loaded(folder, dtype="auto"), loaded(folder, dtype=torch.float16)
    amaxes = [layer.input_amax.clone() for layer in layers(model).values()]
    assert model.dtype is torch.float32 and half.dtype is torch.float16
    model = model.to(torch.float16).to("cpu")
    assert model.dtype is torch.float16 and model.device.type == "cpu"
    for of in (model, half):  # scales of inputs keep their type
        assert all(torch.equal(layer.input_amax, amax) for layer, amax in zip(layers(of).values(), amaxes))
    for name, layer in layers(half).items():  # rotary embeddings are those that depend on the way
        x = torch.randn(3, layer.in_features, dtype=torch.float16)
        assert torch.equal(model.get_submodule(name)(x), layer(x)) and layer(x).dtype is torch.float16
    with torch.no_grad():
        assert model(TOKENS).logits.dtype is torch.float16


def test_a_checkpoint_that_says_nothing_is_loaded_if_asked(checkpoints, tmp_path):
    """As ModelOpt once wrote them: hf_quant_config.json alone speaks of quantization."""
    shutil.copytree(checkpoints("llama"), tmp_path / "old")
    config = json.loads((tmp_path / "old/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    model = loaded(tmp_path / "old", quantization_config=nvfp4.transformers.Config())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, loaded(checkpoints("llama"))(TOKENS).logits)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")


def test_fp8_beside_nvfp4_is_decoded(tmp_path, caplog):
    for to in ("modelopt", "compressed-tensors"):
        made("llama").save_pretrained(tmp_path / "plain")
        nvfp4.convert(str(tmp_path / "plain"), str(tmp_path / to), to=to, preset="mlp+fp8")
        with caplog.at_level("WARNING", "nvfp4"):
            model = loaded(tmp_path / to)
        assert "are decoded to torch.float32" in caplog.text
        eight = model.model.layers[0].self_attn.q_proj.weight
        plain = made("llama").model.layers[0].self_attn.q_proj.weight
        assert type(eight.data) is torch.Tensor and (eight - plain).abs().max() <= plain.abs().max() / 16
        assert len(layers(model)) == 6
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path / "again")


def test_other_checkpoints_go_their_own_way():
    from transformers.quantizers.auto import AutoQuantizationConfig
    from nvfp4.transformers._config import is_ours

    four = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    assert is_ours({"format": "nvfp4-pack-quantized", "config_groups": {"group_0": four}})
    eight = {"weights": {"num_bits": 8, "type": "float"}, "format": "float-quantized"}
    assert is_ours({"format": "mixed-precision", "config_groups": {"a": {**four, "format": "nvfp4-pack-quantized"}, "b": eight}})
    for theirs in (
        {"format": "float-quantized", "config_groups": {"group_0": eight}},
        {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}},
        {"format": "mxfp4-pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}},
        {"format": "nvfp4-pack-quantized"},
    ):
        assert not is_ours(theirs)
    other = AutoQuantizationConfig.from_dict({"quant_method": "mxfp4"})
    assert type(other).__name__ == "Mxfp4Config"


def changed(folder, target, change):
    """A copy of a checkpoint with its tensors changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    save_file(change(tensors), target / "model.safetensors")
    return target


def test_what_is_not_known_is_refused_by_name(checkpoints, tmp_path):
    name = "model.layers.0.mlp.down_proj"
    more = lambda last, value: lambda tensors: {**tensors, f"{name}.{last}": value}  # noqa: E731
    less = lambda last: lambda tensors: {key: t for key, t in tensors.items() if key != f"{name}.{last}"}  # noqa: E731
    for number, (change, message) in enumerate((
        (more("pre_quant_scale", torch.ones(96)), f"{name}: pre_quant_scale beside its codes is not known"),
        (less("weight_scale"), f"{name}: the checkpoint lacks weight_scale"),
        (less("weight_scale_2"), f"{name}: weight_scale is neither of NVFP4 nor of FP8"),
        (more("weight", torch.zeros(64, 32, dtype=torch.uint8)), rf"{name}: the model's weight is \(64, 96\), the checkpoint's \(64, 64\)"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            loaded(changed(checkpoints("llama"), tmp_path / str(number), change))
    with pytest.raises(ValueError, match="is this its checkpoint"):
        renamed = lambda tensors: {f"other.{key}": tensor for key, tensor in tensors.items()}  # noqa: E731
        loaded(changed(checkpoints("llama"), tmp_path / "other", renamed))
    made(LLAMA4).save_pretrained(tmp_path / "llama4")
    nvfp4.convert(str(tmp_path / "llama4"), str(tmp_path / "llama4-codes"))
    with pytest.raises(ValueError, match="model.layers.1.feed_forward.experts is a Llama4TextExperts, which has no '0'"):
        loaded(tmp_path / "llama4-codes")
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts: experts of MixtralExperts with matrices"):
        renamed = lambda tensors: {key.replace("w3", "w4"): tensor for key, tensor in tensors.items()}  # noqa: E731
        loaded(changed(checkpoints("mixtral"), tmp_path / "experts", renamed))


def test_splitting_and_decoding_are_refused(checkpoints):
    model = loaded(checkpoints("llama"))
    with pytest.raises(NotImplementedError, match="nvfp4 dequant"):
        model.dequantize()
    model.config.distributed_config = object()
    with pytest.raises(ValueError, match="parallelism would split weights"):
        model.hf_quantizer.update_parallel_plan(model, {})


def test_experts_in_one_tensor_of_codes(tmp_path):
    """As ModelOpt writes GPT-OSS: inputs before outputs, a scale for each expert."""
    from safetensors.torch import load_file, save_file

    model = made("gpt-oss")
    folder = tmp_path / "joined"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for last in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{layer}.mlp.experts.{last}"
            made_of = [nvfp4.Quantizer(profile="modelopt")(of.t().contiguous()) for of in tensors[key]]
            tensors[key] = torch.stack([q.codes.t() for q in made_of]).contiguous()
            tensors[f"{key}_weight_scale"] = torch.stack([q.scales.t() for q in made_of]).contiguous().view(torch.float8_e4m3fn)
            tensors[f"{key}_weight_scale_2"] = torch.stack([q.row.global_scale.reshape([]) for q in made_of])
            tensors[f"{key}_input_scale"] = torch.tensor(4 / 2688)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ours = loaded(folder, quantization_config=nvfp4.transformers.Config(activations="none"))
    assert len(layers(ours)) == 16 and ours.model.layers[1].mlp.experts.get_submodule("3.down_proj").bias is not None
    reference = decoded(model, ours)
    with torch.no_grad():
        got, theirs = ours(TOKENS).logits.double(), reference(TOKENS).logits.double()
        exact = reference.double()(TOKENS).logits
    assert (got - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    quantizing = loaded(folder)
    assert all(layer.input_amax.item() == pytest.approx(4) for layer in layers(quantizing).values())
    with pytest.raises(ValueError, match="not serializable"):
        quantizing.save_pretrained(tmp_path / "again")
    half = {key: tensor for key, tensor in tensors.items() if "down_proj" not in key or key.endswith("bias")}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="experts: codes of gate_up_proj alone"):
        loaded(folder)


class Adapted(torch.nn.Module):
    """A layer with an adapter of rank 4 beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def trained(model, steps=8):
    """Losses of a model whose adapters learn a text by heart."""
    optimizer = torch.optim.AdamW([of for of in model.parameters() if of.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name, activations", [("llama", False), ("llama", True), ("qwen3-moe", False)])
def test_adapters_learn_beside_codes(checkpoints, name, activations):
    model = loaded(checkpoints(name, activations=activations))
    model.requires_grad_(False)
    before = {path: layer.weight.row.clone() for path, layer in layers(model).items()}
    for path in before:
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(path)))
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.5
    for path, row in before.items():
        assert torch.equal(model.get_submodule(path).layer.weight.row, row)


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(ImportError, match="needs transformers 5.21 or newer: pip install .*; this is 5.17.0"):
        importlib.reload(nvfp4.transformers)
    monkeypatch.undo()
    importlib.reload(nvfp4.transformers)
