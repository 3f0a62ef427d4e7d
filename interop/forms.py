"""Weights in every form that a checkpoint may have, decoded here in binary64, and models of them in transformers."""

import json
import shutil
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)


def tensors(folder):
    """All tensors of a checkpoint."""
    return {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}


def nibbles(packed):
    """The values of codes, two in a byte, the low nibble first."""
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def powers(exponents):
    """E8M0."""
    return torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double() - 127)


def spread(scales, shape):
    """A scale for each element of a matrix: of all, of its row, of its square of 128 or of its 32 of a row."""
    rows, cols = shape
    scales = powers(scales) if scales.dtype == torch.uint8 else scales.double()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, cols)
    scales = scales.reshape(scales.shape[0], -1) if scales.ndim != 4 else scales.reshape(scales.shape[0], scales.shape[2])
    if scales.shape[0] != rows:
        return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return scales.repeat_interleave(-(-cols // scales.shape[1]), 1)[:, :cols]


def decoded(stored):
    """Every weight in binary64, and all else that is not a scale."""
    out = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if name.endswith("_blocks"):
            values = nibbles(tensor) * powers(stored[name[: -len("_blocks")] + "_scales"])[..., None]
            out[name[: -len("_blocks")]] = values.flatten(-2).transpose(-1, -2)
        elif f"{name}_weight_scale" in stored:  # experts in one tensor, inputs before outputs, codes along inputs
            codes = nibbles(tensor.transpose(-1, -2)).transpose(-1, -2)
            scales = stored[f"{name}_weight_scale"].double() * stored[f"{name}_weight_scale_2"].double().reshape(-1, 1, 1)
            out[name] = codes * scales.repeat_interleave(16, 1)
        elif last == "weight" and f"{module}.weight_scale_2" in stored:
            scales = stored[f"{module}.weight_scale"].double() * stored[f"{module}.weight_scale_2"].double()
            out[name] = nibbles(tensor) * scales.repeat_interleave(16, 1)
        elif last == "weight_packed":
            scales = stored[f"{module}.weight_scale"].double() / stored[f"{module}.weight_global_scale"].double()
            out[f"{module}.weight"] = nibbles(tensor) * scales.repeat_interleave(16, 1)
        elif tensor.dtype == torch.float8_e4m3fn and last == "weight":
            scales = stored.get(f"{module}.weight_scale", stored.get(f"{module}.weight_scale_inv"))
            out[name] = tensor.double() * spread(scales, tensor.shape)
        elif "scale" not in last:
            out[name] = tensor.double()
    return {name: tensor.contiguous() for name, tensor in out.items()}


def plain(folder, target):
    """Writes the decoded weights of a checkpoint as one that transformers reads."""
    target.mkdir(exist_ok=True)
    save_file(decoded(tensors(folder)), target / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(folder, dtype):
    """The model of a plain checkpoint."""
    return tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def scaled(tensor, form):
    """A matrix in E4M3 with scales: its values, and the scales as a file has them."""
    rows, cols = tensor.shape
    if form == "tensor":
        scales = tensor.abs().max().reshape(()) / 448
    elif form == "channel":
        scales = tensor.abs().amax(1, keepdim=True) / 448
    elif form == "mx":
        scales = torch.frexp(tensor.abs().unflatten(1, (-1, 32)).amax(2)).exponent.clamp(min=-100) - 8 + 127
        scales = scales.to(torch.uint8)
    else:
        tall, wide = -(-rows // 128), -(-cols // 128)
        padded = torch.zeros(tall * 128, wide * 128)
        padded[:rows, :cols] = tensor.abs()
        scales = padded.view(tall, 128, wide, 128).amax((1, 3)) / 448
    values = (tensor.double() / spread(scales, tensor.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales


def in_fp8(folder, target, form):
    """A checkpoint with the matrices of its layers in FP8."""
    out = {}
    for name, tensor in tensors(folder).items():
        if tensor.ndim == 2 and ".layers." in name and ".gate.weight" not in name:
            values, scales = scaled(tensor.float(), form)
            out[name] = values
            out[name.replace(".weight", ".weight_scale_inv" if form == "block" else ".weight_scale")] = scales.contiguous()
        else:
            out[name] = tensor
    target.mkdir(exist_ok=True)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    modelopt = {"quant_method": "modelopt", "quant_algo": "MXFP8" if form == "mx" else "FP8"}
    config["quantization_config"] = modelopt if form != "block" else {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))
    return target


def in_mxfp4(folder, target):
    """A GPT-OSS with its experts in MXFP4, of random codes."""
    out = {}
    for name, tensor in tensors(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            out[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16)).byte()
            out[f"{name}_scales"] = torch.randint(121, 125, (experts, outputs, inputs // 32)).byte()
        else:
            out[name] = tensor
    target.mkdir(exist_ok=True)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def stacked(folder, target, inputs_first):
    """A checkpoint with the experts of a layer in one tensor."""
    found = tensors(folder)
    out = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in found if ".experts." in name}
    for layer in layers:
        count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in found if name.startswith(layer + ".experts."))

        def part(i, names):
            return next(found[key] for key in (f"{layer}.experts.{i}.{n}.weight" for n in names) if key in found)

        both = [torch.cat([part(i, ("gate_proj", "w1")), part(i, ("up_proj", "w3"))]) for i in range(count)]
        down = [part(i, ("down_proj", "w2")) for i in range(count)]
        for name, matrices in (("gate_up_proj", both), ("down_proj", down)):
            matrices = [m.T if inputs_first else m for m in matrices]
            out[f"{layer}.experts.{name}"] = torch.stack(matrices).contiguous()
    target.mkdir(exist_ok=True)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", target)
    return target
