"""A decoder of Llama's shape, with the names of its parameters in Hugging Face folders."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import nvfp4.torch

EPSILON = 1e-5
BASE = 10000.0  # of rotary embeddings


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Tokens are bytes, and one that ends a text."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    context: int

    vocabulary = 256 + 16  # a multiple of 16, as rows of a quantized matrix
    end = 256


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.size = shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x, angles):
        # As many heads as the layers give: a worker of a tensor-parallel group has a part of them.
        heads = lambda y: y.unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotated(q, angles), rotated(k, angles)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x):
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, EPSILON)

    def forward(self, x, angles):
        x = x + self.self_attn(rounded(self.input_layernorm(x)), angles)
        return x + self.mlp(rounded(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, EPSILON)
        self.size = shape.width // shape.heads

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        steps = torch.arange(0, self.size, 2, device=tokens.device, dtype=torch.float32)
        angles = torch.outer(places, BASE ** (-steps / self.size)).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)


class Llama(nn.Module):
    """Gives the logits of the next token."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, tokens):
        return self.lm_head(self.model(tokens))


def rounded(x):
    """In the type of autocast's products: once for all that read it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def gated(gate, x):
    return functional.silu(gate) * x


def rotated(x, angles):
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x * angles.cos() + turned * angles.sin()).to(x.dtype)


def split_over(model: Llama, mesh, tokens: bool = False) -> None:
    """Tensor parallelism: each worker has a part of the heads and of the hidden units. With
    `tokens` also a part of the tokens between these layers, which quantized layers gather as codes.
    """
    spread = Shard(1) if tokens else Replicate()
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    columns += ["mlp.gate_proj", "mlp.up_proj"]
    for layer in model.model.layers:
        colwise = lambda: nvfp4.torch.ColwiseParallel(input_layouts=spread)
        rowwise = lambda: nvfp4.torch.RowwiseParallel(output_layouts=spread)
        plan = {name: colwise() for name in columns}
        plan |= {name: rowwise() for name in ["self_attn.o_proj", "mlp.down_proj"]}
        if tokens:
            plan |= {name: SequenceParallel() for name in ["input_layernorm", "post_attention_layernorm"]}
        parallelize_module(layer, mesh, plan)
    if tokens:
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=spread),
            "model.norm": SequenceParallel(),
            "lm_head": PrepareModuleInput(
                input_layouts=spread, desired_input_layouts=Replicate(), use_local_output=True
            ),
        }
        parallelize_module(model, mesh, ends)


def save(folder: Path, shape: Shape, weights: dict) -> None:
    """Writes a folder that transformers and the servers of Llama models load."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": EPSILON,
        "rope_theta": BASE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": shape.end,
        "torch_dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer(shape))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "model_max_length": shape.context,
    }
    write_json(folder / "tokenizer_config.json", settings)


def tokenizer(shape: Shape) -> dict:
    """A tokenizer whose tokens are bytes: a byte-level BPE without merges."""
    # Bytes that have no printable character are named by the characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    kinds = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": shape.end, "content": "<end>", **kinds}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
