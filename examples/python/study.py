"""What recipes cost: trains one model by many recipes from many seeds, and sums up the losses.

    python study.py run --text DIR --suffix .py --results FOLDER --minutes 25
    python study.py run --text DIR --suffix .py --results FOLDER --only nvfp4 --seeds 2
    python study.py speed --text DIR --suffix .py --results FOLDER
    python study.py table --results FOLDER
    python study.py list

`run` trains with pretrain.py what FOLDER does not have yet, a seed after the other, and leaves a
JSON file for each run: its command, commit, machine, settings and losses. It begins no run that
would not end within --minutes, so a study may be made in parts, on several machines, and by several
processes with seeds of their own; `speed` times each recipe, with nothing beside it; `table` sums
up what is there. All runs of a study have the same settings and the same text. From one seed, they
begin with the same weights and see the same batches.
"""

import argparse
import contextlib
import hashlib
import io
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "crates/cli/recipes"
BASELINE = "bf16"
# 40 M parameters, 13.1 M tokens.
SETTINGS = {
    "layers": 8,
    "width": 640,
    "heads": 10,
    "context": 512,
    "batch": 32,
    "steps": 800,
    "rate": 1e-3,
    "warmup": 100,
}
# Points of a curve: each is the mean loss of training since the one before.
POINTS = 50
# How often, and in how many batches, what is held out is looked at.
EVALUATIONS, EVALUATED = 6, 16
# Saturated blocks are counted in one of so many steps.
BLOCKS_EVERY = 50
# Steps that are timed, after as many that are not.
TIMED = 30


def blocks_in_bf16(name, blocks):
    """The preset with some blocks in high precision."""
    rules = "".join(
        f'[[rule]]\npath = "model.layers.{block}.**"\nspec = "high-precision"\n\n'
        for block in sorted(blocks)
    )
    return f'name = "{name}"\n\n{rules}[default]\npreset = "nvfp4"\n'


def recipes(layers):
    """Presets, files and rules by name."""
    row_4over6 = (
        'name = "nvfp4-row-scaled-4over6"\n\n[default]\npreset = "nvfp4"\n\n'
        '[nvfp4]\nactivations = "row-scaled"\nfour-over-six = "all"\n'
    )
    return {
        BASELINE: None,
        "nvfp4": "nvfp4",
        "nvfp4-no-hadamard": RECIPES / "nvfp4-no-hadamard.toml",
        "nvfp4-no-stochastic": RECIPES / "nvfp4-no-stochastic.toml",
        "nvfp4-1d-weights": RECIPES / "nvfp4-1d-weights.toml",
        "nvfp4-4over6-weights": RECIPES / "nvfp4-4over6-weights.toml",
        "nvfp4-4over6-activations": RECIPES / "nvfp4-4over6-activations.toml",
        "nvfp4_4over6": "nvfp4_4over6",
        "nvfp4_row_scaled": "nvfp4_row_scaled",
        "nvfp4-row-scaled-4over6": row_4over6,
        "nvfp4-last-two-bf16": blocks_in_bf16("nvfp4-last-two-bf16", {layers - 2, layers - 1}),
        "nvfp4-first-last-bf16": blocks_in_bf16("nvfp4-first-last-bf16", {0, layers - 1}),
        "mxfp8": "mxfp8",
        "current_scaling": "current_scaling",
    }


def parsed(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is missing")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--minutes", type=float, help="begin no run that would end later")
    speed = commands.add_parser("speed", help="time each recipe")
    speed.add_argument("--rounds", type=int, default=2, help="how often, in turns")
    for command in (run, speed):
        add = command.add_argument
        add("--text", nargs="+", required=True, type=Path, metavar="PATH", help="files or folders")
        add("--suffix", default="", help="which files of folders are read")
        add("--only", nargs="+", metavar="NAME", help="these recipes; all, if not given")
        add("--commit", help="of the code, where git does not say")
        add("--device", choices=["cpu", "cuda"], default="cuda")
        for name, value in SETTINGS.items():
            add(f"--{name}", type=type(value), default=value)
    table = commands.add_parser("table", help="sum up what is there, in Markdown")
    for command in (run, speed, table):
        command.add_argument("--results", required=True, type=Path, metavar="FOLDER")
    commands.add_parser("list", help="names of recipes")
    args = parser.parse_args(argv)
    if args.command in ("run", "speed"):
        unknown = sorted(set(args.only or []) - set(recipes(args.layers)))
        if unknown:
            known = ", ".join(recipes(args.layers))
            parser.error(f"--only: there is no {', '.join(unknown)}; there are {known}")
        if args.layers < 2:
            parser.error("--layers: some recipes leave two blocks as they are, expected 2 or more")
    return args


def main(argv=None):
    args = parsed(argv)
    if args.command == "list":
        print("\n".join(recipes(SETTINGS["layers"])))
    elif args.command == "table":
        print("\n".join(table(read(args.results), speeds(args.results)["tokens_a_second"])))
    else:
        sys.path.insert(0, str(HERE))
        args.results.mkdir(parents=True, exist_ok=True)
        {"run": train, "speed": time_all}[args.command](args)


def read(folder):
    """The runs of a study."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-[0-9]*.json"))]
    for run in runs[1:]:
        for what in ("settings", "text"):
            if run[what] != runs[0][what]:
                raise SystemExit(
                    f"{folder}: {run['recipe']} with seed {run['seed']} has other {what} than "
                    f"{runs[0]['recipe']} with seed {runs[0]['seed']}: a study has one of each"
                )
    return runs


def settings_of(args):
    return {name: getattr(args, name) for name in SETTINGS}


def speeds(folder):
    """Tokens a second by recipe, where they were measured."""
    file = folder / "speed.json"
    return json.loads(file.read_text()) if file.exists() else {"tokens_a_second": {}}


def train(args):
    begin, longest = time.monotonic(), 0.0
    settings = settings_of(args)
    text = fingerprint(args)
    for run in read(args.results):
        if run["settings"] != settings or run["text"] != text:
            raise SystemExit(f"{args.results} has runs of other settings or text: take a new folder")
    wanted = recipes(args.layers)
    for seed in args.seeds:
        for name in args.only or wanted:
            file = args.results / f"{name}-{seed}.json"
            if file.exists():
                continue
            if args.minutes and time.monotonic() - begin + longest > 60 * args.minutes:
                print(f"{name} with seed {seed} and what follows is left: it would take too long")
                return
            since = time.monotonic()
            result = once(args, name, wanted[name], seed, settings, text)
            longest = max(longest, time.monotonic() - since)
            write(file, result)
            print(f"{name}, seed {seed}: held out {result['held_out'][-1][1]:.4f}", flush=True)


def write(file, result):
    """JSON with a line for each entry."""
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def once(args, name, recipe, seed, settings, text):
    """One run, and what makes it again."""
    every = max(1, settings["steps"] // EVALUATIONS)
    words = ["--evaluate-every", str(every), "--blocks-every", str(BLOCKS_EVERY)]
    words += ["--evaluate-batches", str(EVALUATED)]
    lines, rules = pretrained(args, name, recipe, seed, settings, words)
    means, stride = [], max(1, len(lines) // POINTS)
    for at in range(0, len(lines), stride):
        part = lines[at : at + stride]
        means.append([part[-1]["tokens"], statistics.fmean(line["loss"] for line in part)])
    counted = [line["saturated"] for line in lines if "saturated" in line]
    return {
        "recipe": name,
        "rules": rules,
        "seed": seed,
        **origin(args, "run", ["--only", name, "--seeds", str(seed)], settings),
        "settings": settings,
        "text": text,
        "held_out": [[line["tokens"], line["held_out"]] for line in lines if "held_out" in line],
        "training": means,
        "saturated": statistics.fmean(counted) if counted else None,
    }


def time_all(args):
    """Times recipes in turns, and leaves a JSON file."""
    settings = settings_of(args)
    wanted = {name: recipe for name, recipe in recipes(args.layers).items() if name in (args.only or [name])}
    short, there = {**settings, "steps": 2 * TIMED}, speeds(args.results)
    words = ["--evaluate-every", str(TIMED), "--blocks-every", str(3 * TIMED)]
    only = ["--only", *args.only] if args.only else []
    made = {**origin(args, "speed", [*only, "--rounds", str(args.rounds)], settings), "settings": settings}
    if any(what in there and there[what] != made[what] for what in ("commit", "machine", "settings")):
        raise SystemExit(f"{args.results}/speed.json is of another commit, machine or settings: take a new folder")
    # Recipes that are not timed now keep what they have.
    found = {name: rates for name, rates in there["tokens_a_second"].items() if name not in wanted}
    for _ in range(args.rounds):
        for name, recipe in wanted.items():
            lines, _ = pretrained(args, name, recipe, 0, short, words)
            found.setdefault(name, []).append(round(lines[-1]["tokens_a_second"]))
            print(f"{name}: {found[name][-1]:,} tokens/s", flush=True)
            # After each, so that what was measured is there if the program is stopped.
            write(args.results / "speed.json", {**made, "tokens_a_second": found})


def pretrained(args, name, recipe, seed, settings, options):
    """What pretrain.py, in this process, says of each step, and the rules of the recipe."""
    import pretrain

    with tempfile.TemporaryDirectory() as folder:
        words = ["--text", *map(str, args.text), "--suffix", args.suffix, "--out", folder]
        words += ["--device", args.device, "--seed", str(seed), "--save-every", "0", *options]
        words += ["--compile"] if args.device == "cuda" else []
        for key, value in settings.items():
            words += [f"--{key}", str(value)]
        if isinstance(recipe, str) and "\n" in recipe:
            file = Path(folder) / f"{name}.toml"
            file.write_text(recipe)
            recipe = file
        if recipe is not None:
            words += ["--recipe", str(recipe)]
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain.main(words)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        rules = Path(recipe).read_text() if isinstance(recipe, Path) else recipe
    return [json.loads(line) for line in lines], rules


def origin(args, what, options, settings):
    """What makes a result again, and where it was made."""
    import torch

    again = ["python", "examples/python/study.py", what, "--text", "DIR", "--results", "FOLDER"]
    again += [*options, "--device", args.device]
    again += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    if args.suffix:
        again += ["--suffix", args.suffix]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    return {
        "command": shlex.join(again),
        "commit": args.commit or commit(),
        "machine": {"device": gpu, "torch": torch.__version__},
    }


def fingerprint(args):
    """How much text there is, and which."""
    from corpus import files

    digest, count = hashlib.sha256(), 0
    for root in args.text:
        if not root.exists():
            raise SystemExit(f"--text: there is no {root}")
        for path in files(root, args.suffix):
            data = path.read_bytes()
            digest.update(data)
            count += len(data)
    return {"bytes": count, "sha256": digest.hexdigest()}


def commit():
    """The commit of the code, with a plus if files of it were changed."""
    git = ["git", "-C", str(HERE)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("git does not say which commit this is: give --commit") from None
    return head.stdout.strip() + ("+" if changed else "")


def gaps(runs):
    """For each recipe its runs by seed, and what its loss is over that of bf16 from the same seed."""
    held = {(run["recipe"], run["seed"]): run["held_out"][-1][1] for run in runs}
    names = [name for name in recipes(SETTINGS["layers"]) if any(key[0] == name for key in held)]
    found = {}
    for name in names:
        seeds = sorted(seed for other, seed in held if other == name)
        over = [
            held[name, seed] / held[BASELINE, seed] - 1
            for seed in seeds
            if name != BASELINE and (BASELINE, seed) in held
        ]
        found[name] = ([run for run in runs if run["recipe"] == name], over)
    return found


def spread(numbers, form):
    """Their mean, and the smallest and the largest."""
    mean = form(statistics.fmean(numbers))
    return mean if len(numbers) == 1 else f"{mean} ({form(min(numbers))} to {form(max(numbers))})"


def table(runs, rates):
    if not runs:
        raise SystemExit("no runs yet: `study.py run` makes them")
    yield "| recipe | seeds | held-out loss, nats a byte | gap to bf16 | tokens a second, × bf16 |"
    yield "|---|---|---|---|---|"
    for name, (of, over) in gaps(runs).items():
        losses = spread([run["held_out"][-1][1] for run in of], "{:.4f}".format)
        gap = spread(over, "{:+.2%}".format).replace("%", " %") if over else "–"
        rate = "–"
        if name in rates:
            rate = f"{statistics.median(rates[name]):,.0f}"
            if BASELINE in rates:
                rate += f" ({statistics.median(rates[name]) / statistics.median(rates[BASELINE]):.2f})"
        yield f"| `{name}` | {len(of)} | {losses} | {gap} | {rate} |"


if __name__ == "__main__":
    main()
