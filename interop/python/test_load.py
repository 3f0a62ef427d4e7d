"""Quantized checkpoints into models of torch."""

import json
from pathlib import Path

import pytest
import torch

import nvfp4
import nvfp4.torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.lm_head = torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(self.first(x)))


def written(folder: Path, dialect: str, model, activations: bool):
    """A checkpoint as the other tools write it."""
    from safetensors.torch import save_file

    profile, unit, given = {"modelopt": ("modelopt", "weight_scale_2", "input_scale"),
                            "compressed-tensors": ("llm-compressor", "weight_global_scale", "input_global_scale")}[dialect]  # fmt: skip
    q = nvfp4.Quantizer(profile=profile)(model.first.weight.detach())
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "first.weight"}
    tensors["first.weight" if dialect == "modelopt" else "first.weight_packed"] = q.codes.clone()
    tensors["first.weight_scale"] = q.scales.clone().view(torch.float8_e4m3fn)
    tensors[f"first.{unit}"] = q.row.global_scale.clone().reshape([] if dialect == "modelopt" else [1])
    if activations:
        amax = 4.0
        tensors[f"first.{given}"] = torch.tensor(amax / 2688) if dialect == "modelopt" else torch.tensor([2688 / amax])
    half = len(tensors) // 2
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for file, of in parts.items():
        save_file({name: tensors[name] for name in of}, folder / file)
    index = {"weight_map": {name: file for file, of in parts.items() for name in of}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return q


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("activations", [True, False])
def test_checkpoints_load(tmp_path, dialect, activations):
    source, model, x = Small(), Small(), torch.randn(16, 64)
    q = written(tmp_path, dialect, source, activations)
    report = nvfp4.torch.load(tmp_path, model)
    assert report.quantized == ["first"] and report.missing == [] and "lm_head.weight" in report.copied
    assert torch.equal(model.lm_head.weight, source.lm_head.weight) and torch.equal(model.first.bias, source.first.bias)
    assert torch.equal(model.first.weight.dequantize(), q.dequantize("float32")) and not model.first.weight.requires_grad
    y = model.first(x)
    left = nvfp4.Quantizer().quantize(x, amax=4.0) if activations else x
    assert torch.equal(y, nvfp4.matmul(left, q, bias=source.first.bias.detach()))
    plain = Small()
    nvfp4.torch.load(tmp_path, plain, activations="none")
    assert torch.equal(plain.first(x), nvfp4.matmul(x, q, bias=source.first.bias.detach()))


def test_our_own_files_load(tmp_path):
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)), torch.randn(16, 64)
    q = nvfp4.Quantizer()(torch.randn(32, 64))
    nvfp4.save(tmp_path / "codes.safetensors", {"0.weight": q})
    nvfp4.torch.load(tmp_path / "codes.safetensors", model)
    assert torch.equal(model(x), nvfp4.matmul(x, q))


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    written(tmp_path, "modelopt", Small(), False)
    with pytest.raises(ValueError, match="no codes for any"):
        nvfp4.torch.load(tmp_path, torch.nn.Sequential(torch.nn.Linear(64, 128)))
    wide = Small()
    wide.first = torch.nn.Linear(128, 128)
    with pytest.raises(ValueError, match=r"first: the model's weight is \(128, 128\), the checkpoint's \(128, 64\)"):
        nvfp4.torch.load(tmp_path, wide)
    more = Small()
    more.extra = torch.nn.LayerNorm(4)
    with pytest.raises(ValueError, match="lacks extra.weight, extra.bias"):
        nvfp4.torch.load(tmp_path, more)
    assert nvfp4.torch.load(tmp_path, more, strict=False).missing == ["extra.weight", "extra.bias"]


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("weight_scale", lambda t: t.view(torch.uint8).t(), r"first.weight: expected scales \(128, 4\) of E4M3, got \(4, 128\)"),
        ("weight_scale", lambda t: t.reshape(-1), r"first.weight: expected scales .* got \(512,\)"),
        ("weight_scale", lambda t: t.view(torch.float8_e5m2), "first.weight: expected scales .* of torch.float8_e5m2"),
        ("weight", lambda t: t[None], r"first.weight: expected a matrix of codes of uint8, got \(1, 128, 32\)"),
        ("weight_scale_2", lambda t: t.expand(128), "first.weight: expected one scale"),
        ("weight_scale_2", lambda t: t * float("nan"), "first.weight: expected one scale"),
        ("weight_scale_2", None, "first: weight_scale is neither of NVFP4 nor of FP8"),
        ("input_scale", lambda t: t * 0, "first.input_scale: expected a positive number"),
    ],
)
def test_codes_that_do_not_fit_are_refused(tmp_path, name, change, message):
    from safetensors.torch import load_file, save_file

    written(tmp_path, "modelopt", Small(), True)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        found = tensors.pop(f"first.{name}", None)
        if found is not None and change is not None:
            tensors[f"first.{name}"] = change(found).contiguous()
        save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        nvfp4.torch.load(tmp_path, Small())


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("preset", ["mlp+fp8", "all"])
def test_what_convert_writes_loads_as_transformers_loads_it(tmp_path, to, preset):
    """Layers of FP8 are decoded, not copied as if their codes were values."""
    import nvfp4.transformers  # noqa: F401
    import transformers as tf

    config = tf.LlamaConfig(vocab_size=160, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    source = tf.LlamaForCausalLM(config)
    source.save_pretrained(tmp_path / "source")
    nvfp4.convert(str(tmp_path / "source"), str(tmp_path / "made"), to=to, preset=preset, acts=1.0)
    expected = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    model, tokens = tf.LlamaForCausalLM(config).eval(), torch.randint(160, (2, 16))
    if preset == "all":
        report = nvfp4.torch.load(tmp_path / "made", model)
        assert len(report.quantized) == 14 and report.decoded == []
    else:
        with pytest.warns(UserWarning, match="8 layers of FP8 .* are decoded"):
            report = nvfp4.torch.load(tmp_path / "made", model)
        assert len(report.quantized) == 6 and len(report.decoded) == 8 and "decoded 8 of FP8" in repr(report)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


class Embedded(Small):
    """Layers that codes can be for, and some that they cannot."""

    def __init__(self):
        super().__init__()
        self.table, self.experts, self.counted = torch.nn.Embedding(128, 64), torch.nn.Parameter(torch.zeros(2, 4, 8)), torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"first.pre_quant_scale": torch.ones(64)}, "first: pre_quant_scale beside its codes is not known"),
        ({"lm_head.weight": torch.zeros(32, 128).to(torch.float8_e4m3fn)}, "lm_head: the checkpoint lacks weight_scale"),
        ({"table.weight": torch.zeros(128, 64).to(torch.float8_e4m3fn), "table.weight_scale": torch.ones(())}, "table: expected a torch.nn.Linear for these codes, got Embedding"),
        ({"experts": torch.zeros(2, 4, 8).to(torch.float8_e4m3fn)}, "experts: codes without their scales"),
        ({"experts": torch.zeros(2, 4, 8, dtype=torch.uint8)}, "experts: codes without their scales"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(tmp_path, changes, message):
    from safetensors.torch import load_file, save_file

    written(tmp_path, "modelopt", Embedded(), False)
    assert "counted.num_batches_tracked" in nvfp4.torch.load(tmp_path, Embedded()).copied
    tensors = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()} | changes
    folder = tmp_path / "changed"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        nvfp4.torch.load(folder, Embedded())


ROWS, COLS = 32, 4096  # as many rows as blocks of 128 × 128
E8M0 = getattr(torch, "float8_e8m0fnu", None)


@pytest.mark.parametrize(
    "shape, dtype, tile",
    [
        ((), torch.float32, (ROWS, COLS)),
        ((1,), torch.bfloat16, (ROWS, COLS)),
        ((ROWS,), torch.float32, (1, COLS)),
        ((ROWS, 1), torch.bfloat16, (1, COLS)),
        ((1, COLS // 128), torch.float32, (128, 128)),
        ((1, 1, COLS // 128, 1), torch.bfloat16, (128, 128)),
        ((ROWS, COLS // 32), torch.uint8, (1, 32)),
        *([((1, COLS // 128), E8M0, (128, 128))] if E8M0 else []),
        ((COLS // 128, 1, 1), torch.float32, None),
        ((1, COLS), torch.float32, None),
        ((ROWS,), torch.uint8, None),
    ],
)
def test_fp8_is_decoded_by_the_shape_of_its_scales(tmp_path, shape, dtype, tile):
    from safetensors.torch import save_file

    # Powers of two, which every type of scales has; MXFP8's are bytes.
    exponents = torch.randint(-8, 8, shape)
    scale = (exponents + 127).to(torch.uint8) if dtype is torch.uint8 else torch.ldexp(torch.ones(shape), exponents).to(dtype)
    codes = torch.randn(ROWS, COLS).to(torch.float8_e4m3fn)
    save_file({"0.weight": codes, "0.weight_scale": scale}, tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(COLS, ROWS, bias=False))
    if tile is None:
        with pytest.raises(ValueError, match=f"0: FP8 of {ROWS} × {COLS} with scales of"):
            nvfp4.torch.load(tmp_path, model)
        return
    with pytest.warns(UserWarning, match=r"1 layers of FP8 \(0\) are decoded"):
        assert nvfp4.torch.load(tmp_path, model).decoded == ["0"]
    exponents = exponents.reshape(-(-ROWS // tile[0]), -(-COLS // tile[1]))
    for row, col in ((0, 0), (1, 31), (7, 200), (ROWS - 1, COLS - 1)):
        expected = codes[row, col].float() * 2.0 ** exponents[row // tile[0], col // tile[1]].item()
        assert model[0].weight[row, col] == expected, (row, col)


def test_an_index_names_files_of_its_folder(tmp_path):
    written(tmp_path, "modelopt", Small(), False)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in [
        ('{"weight_map": {"a": "../model-1.safetensors"}}', "files in its folder, got '../model-1"),
        (json.dumps({"weight_map": {"a": str(tmp_path / "model-1.safetensors")}}), "files in its folder"),
        ("{}", "index.json: expected JSON with a weight_map"),
        ("{", "index.json: expected JSON with a weight_map"),
    ]:
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            nvfp4.torch.load(tmp_path, Small())


def test_a_model_on_the_meta_device_is_filled(tmp_path):
    source, x = Small(), torch.randn(16, 64)
    written(tmp_path, "modelopt", source, True)
    model, expected = Small().half().to("meta"), Small().half()
    for of in (model, expected):
        nvfp4.torch.load(tmp_path, of)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float16)}
    assert torch.equal(model(x.half()), expected(x.half()))


def test_a_second_checkpoint_leaves_nothing_of_the_first(tmp_path):
    model, x = Small(), torch.randn(16, 64)
    for activations in (True, False):
        folder = tmp_path / str(activations)
        folder.mkdir()
        q = written(folder, "modelopt", Small(), activations)
        nvfp4.torch.load(folder, model)
    assert "first.input_amax" not in model.state_dict()
    assert torch.equal(model.first(x), nvfp4.matmul(x, q, bias=model.first.bias.detach()))
