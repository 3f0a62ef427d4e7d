"""A checkpoint in NVFP4 beside bf16 in transformers' ``generate``: tokens a second, and memory.

    python bench_generate.py                        # a model of Llama's shape with random weights
    python bench_generate.py --model FOLDER         # a checkpoint that is here, in bf16
    python bench_generate.py --batches 1 16 --acts 1
    python bench_generate.py --static               # on a GPU transformers compiles the step of a token

The model is converted first. Its weights are codes in memory; with `--acts` its activations are in 4
bits too. Random weights say nothing about text: the tokens only show that both models run.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

import nvfp4
import nvfp4.transformers  # noqa: F401  (from_pretrained loads NVFP4)


def saved(args, folder):
    """A checkpoint of random weights."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=args.width, intermediate_size=args.width * 7 // 2, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128, num_key_value_heads=max(1, args.width // 512), head_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def seconds(args, model, batch):
    """Seconds for the tokens of a batch."""
    prompt = torch.randint(3, 1000, (batch, args.prompt), device=args.device)
    given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if args.static:
        given["cache_implementation"] = "static"
    begin = time.perf_counter()
    text = model.generate(prompt, max_new_tokens=args.tokens, **given)
    taken = time.perf_counter() - begin
    assert text.shape == (batch, args.prompt + args.tokens), text.shape
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--acts", type=float, metavar="SCALE", help="activations in 4 bits, with this scale")
    parser.add_argument("--static", action="store_true", help="keys and values in memory of a fixed size")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = args.model or saved(args, Path(folder, "bf16"))
        begin = time.perf_counter()
        nvfp4.convert(source, Path(folder, "nvfp4"), acts=args.acts, device=args.device)
        print(f"converted in {time.perf_counter() - begin:.1f} s")
        models = {}
        for name, of in (("bf16", source), ("NVFP4", Path(folder, "nvfp4"))):
            model = transformers.AutoModelForCausalLM.from_pretrained(of, dtype=torch.bfloat16)
            models[name] = model.to(args.device).eval()
        print("| weights | GB |" + "".join(f" {batch} text{'s' * (batch > 1)}: tokens/s |" for batch in args.batches))
        print("|---|---|" + "---|" * len(args.batches))
        speeds = {name: [] for name in models}
        for batch in args.batches:
            times = {name: [] for name in models}
            for _ in range(args.rounds + 1):  # in turns; the first round is the warm-up
                for name, model in models.items():
                    times[name].append(seconds(args, model, batch))
            for name, each in times.items():
                speeds[name].append(batch * args.tokens / statistics.median(each[1:]))
        for name, model in models.items():
            size = sum(of.nbytes for of in [*model.parameters(), *model.buffers()]) / 1e9
            print(f"| {name} | {size:.2f} |" + "".join(f" {speed:.0f} |" for speed in speeds[name]))


if __name__ == "__main__":
    main()
