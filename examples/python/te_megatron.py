"""A transformer layer as Megatron-Core makes it of TransformerEngine's modules, in one process.

    python -m nvfp4.te examples/python/te_megatron.py [--steps 20] [--recipe NVFP4BlockScaling]

The classes below derive from TransformerEngine's, with the arguments that Megatron passes: a norm
and a linear layer that is split by columns, core attention, and a linear layer that is split by
rows, whose biases are returned and added later. The program knows TransformerEngine alone; ``nvfp4.te``
stands in for it, so it runs on a CPU too.
"""

import argparse
import importlib.metadata

import torch
import transformer_engine as te
import transformer_engine.pytorch
from transformer_engine.common import recipe
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

HIDDEN, FFN, HEADS = 64, 256, 4
TRACKER = CudaRNGStatesTracker()


def settings(bias: bool = True) -> dict:
    """What Megatron passes to every linear layer."""
    return dict(
        sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
        get_rng_state_tracker=lambda: TRACKER, init_method=lambda w: torch.nn.init.normal_(w, std=0.02),
        bias=bias, return_bias=True, params_dtype=torch.float32,
    )  # fmt: skip


class LayerNormColumnParallelLinear(te.pytorch.LayerNormLinear):
    """A norm, and a linear layer whose outputs are split."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(
            in_features,
            out_features,
            eps=1e-5,
            normalization="RMSNorm",
            parallel_mode="column",
            **settings(),
        )


class RowParallelLinear(te.pytorch.Linear):
    """A linear layer whose inputs are split."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, parallel_mode="row", **settings())


class TransformerLayer(torch.nn.Module):
    """Attention and a gated MLP, each beside what goes past it."""

    def __init__(self, number: int):
        super().__init__()
        self.qkv = LayerNormColumnParallelLinear(HIDDEN, 3 * HIDDEN)
        self.core_attention = te.pytorch.DotProductAttention(
            HEADS, HIDDEN // HEADS, attention_dropout=0.0, qkv_format="sbhd",
            attn_mask_type="causal", layer_number=number, get_rng_state_tracker=lambda: TRACKER,
        )  # fmt: skip
        self.proj = RowParallelLinear(HIDDEN, HIDDEN)
        self.fc1 = LayerNormColumnParallelLinear(HIDDEN, 2 * FFN)
        self.fc2 = RowParallelLinear(FFN, HIDDEN)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:
        qkv, bias = self.qkv(x, is_first_microbatch=is_first_microbatch)
        q, k, v = (qkv + bias).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        y, bias = self.proj(self.core_attention(q, k, v), is_first_microbatch=is_first_microbatch)
        x = x + y + bias
        y, bias = self.fc1(x, is_first_microbatch=is_first_microbatch)
        gate, up = (y + bias).chunk(2, -1)
        y, bias = self.fc2(
            torch.nn.functional.silu(gate) * up, is_first_microbatch=is_first_microbatch
        )
        return x + y + bias


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--recipe", default="NVFP4BlockScaling", help="a class of transformer_engine.common.recipe"
    )
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    TRACKER.add("model-parallel-rng", 1234)
    layers = torch.nn.ModuleList(TransformerLayer(number) for number in (1, 2)).to(device)
    optimizer = te.pytorch.optimizers.FusedAdam(layers.parameters(), lr=1e-2)
    chosen = getattr(recipe, asked.recipe)()
    print(
        f"transformer_engine {importlib.metadata.version('transformer-engine')}, {type(chosen).__name__}"
    )
    inputs = torch.randn(32, 4, HIDDEN, device=device)
    target = torch.roll(inputs, 1, 0)
    for step in range(asked.steps):
        for batch in range(2):  # two micro-batches of a step
            x = inputs[:, 2 * batch : 2 * batch + 2]
            with te.pytorch.fp8_autocast(enabled=True, fp8_recipe=chosen):
                assert FP8GlobalStateManager.is_fp8_enabled()
                for layer in layers:
                    x = te.pytorch.checkpoint(layer, x, batch == 0, use_reentrant=False)
            loss = torch.nn.functional.mse_loss(x, target[:, 2 * batch : 2 * batch + 2])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, asked.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
