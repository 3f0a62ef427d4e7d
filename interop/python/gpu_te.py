"""Graphs of TransformerEngine's modules beside calls without graphs, bit for bit: on a GPU by
``gpu.py``, and by ``test_te_graphs.py`` on the CPU, with graphs that repeat torch's operations.
"""

import copy
from collections import Counter

import torch

import nvfp4.te as te

TOKENS, BATCH, HIDDEN = 16, 2, 64
RECIPES = {
    "high precision": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "delayed attention": te.DelayedScaling(amax_history_len=2, fp8_dpa=True),
    "current": te.Float8CurrentScaling(),
    "current attention": te.Float8CurrentScaling(fp8_dpa=True),
    "blocks": te.Float8BlockScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "mxfp8 attention": te.MXFP8BlockScaling(fp8_dpa=True),
    "nvfp4": te.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


class Experts(torch.nn.Module):
    """Two experts with half of the tokens each."""

    def __init__(self):
        super().__init__()
        self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN)

    def forward(self, x, **kwargs):
        tokens = x.flatten(0, 1)
        splits = [tokens.shape[0] // 2] * 2
        return self.experts(tokens, splits, **kwargs).reshape(x.shape)


MODULES = {
    "linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "experts": Experts,
    "mlp": lambda: te.LayerNormMLP(HIDDEN, HIDDEN),
    "mlp again": lambda: te.LayerNormMLP(HIDDEN, HIDDEN, checkpoint=True),
    "attention": lambda: te.MultiheadAttention(
        HIDDEN, 2, attention_dropout=0.0, fuse_qkv_params=True
    ),
    "layer": lambda: te.TransformerLayer(
        HIDDEN, HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True
    ),
}
# Modules, the recipe of their regions, and whether their weights are codes alone.
CASES = [(module, recipe, False) for module in ("linear", "mlp") for recipe in RECIPES]
CASES += [(module, "delayed", False) for module in ("experts", "mlp again")]
CASES += [("mlp again", "nvfp4", False), ("experts", "current", True)]
CASES += [
    (module, recipe, False)
    for module in ("attention", "layer")
    for recipe in ("high precision", "delayed attention", "current attention", "mxfp8 attention")
]
CASES += [
    (module, recipe, True)
    for module in ("linear", "mlp")
    for recipe in ("delayed", "current", "mxfp8", "blocks", "nvfp4")
]


def tokens(device, **kwargs):
    return torch.randn(TOKENS, BATCH, HIDDEN, **kwargs).to(device)


def steps(case, device, graphed, **kwargs):
    """Three steps of two micro-batches each: outputs, gradients of inputs, parameters."""
    module, recipe, coded = case
    recipe = copy.deepcopy(RECIPES[recipe])
    torch.manual_seed(7)
    with te.quantized_model_init(enabled=coded, recipe=recipe):
        model = MODULES[module]().to(device)
    enabled, seen = recipe is not None, []
    if graphed:
        sample = torch.ones(TOKENS, BATCH, HIDDEN, device=device, requires_grad=True)
        model = te.make_graphed_callables(
            model, (sample,), enabled=enabled, recipe=recipe, **kwargs
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for first in (True, False):
            x, dy = tokens(device).requires_grad_(), tokens(device)
            with te.autocast(enabled=enabled, recipe=recipe):
                y = model(x, is_first_microbatch=first)
            y.backward(dy)
            seen += [y.detach().clone(), x.grad.clone()]
        optimizer.step()
    seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen, model


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def checks(check):
    """What a GPU shows: each graph has the bits of the calls that it stands for."""
    for case in CASES:
        plain, _ = steps(case, "cuda", False)
        made, model = steps(case, "cuda", True, cache_quantized_params=case[1] != "high precision")
        check(f"a graph of te's {case[0]}, {case[1]}{', of codes' * case[2]}", same(plain, made))
        model.reset()
    layers = torch.nn.ModuleList(te.Linear(HIDDEN, HIDDEN).cuda() for _ in range(2))
    check("graphs in the order of a pipeline", pipeline(layers, "cuda"))


def pipeline(layers, device):
    """Whether two layers and three micro-batches in a pipeline's order give what calls give."""
    order = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
    batches = [(tokens(device), tokens(device)) for _ in range(6)]
    samples = tuple((tokens(device).requires_grad_(),) for _ in range(6))

    def run(calls):
        layers.zero_grad()
        given, outputs, seen, count = {}, {}, {}, Counter()
        for chunk in order:
            at = (abs(chunk) - 1) * 3 + count[chunk]
            count[chunk] += 1
            if chunk > 0:
                given[at] = batches[at][0].clone().requires_grad_()
                outputs[at] = calls[at](given[at])
            else:
                outputs[at].backward(batches[at][1])
                seen[at] = [outputs[at].detach().clone(), given[at].grad.clone()]
        gradients = [parameter.grad.clone() for parameter in layers.parameters()]
        return gradients + [tensor for at in sorted(seen) for tensor in seen[at]]

    expected = run([layers[at // 3] for at in range(6)])
    graphs = te.make_graphed_callables(tuple(layers), samples, _order=order)
    found = run(graphs)
    for graph in graphs:
        graph.reset()
    return same(expected, found)
