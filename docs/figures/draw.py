"""The figures of README and docs, from the JSON files beside this file.

    python docs/figures/draw.py            # draws FIGURE-light.svg and FIGURE-dark.svg of each
    python docs/figures/draw.py measure    # makes formats.json anew, on this machine

`speed-h200.json` has results of `nvfp4 bench`, with the command and the machine of the run;
`formats.json` says what a value takes in each format, and what it loses; the runs of
`examples/python/study.py` are in `../study`.
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "study"
sys.path.insert(0, str(HERE.parents[1] / "examples/python"))
import study  # noqa: E402

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "ours": "#0b6e4f", "other": "#8c959f"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "ours": "#3fb98a", "other": "#6e7681"},
}
# Formats by the name in the figure: the spec that makes them.
FORMATS = {
    "FP8, one scale": "fp8",
    "FP8, 1×128": "fp8-block",
    "MXFP8": "mxfp8",
    "NVFP4, 16×16": "nvfp4(16x16)",
    "NVFP4": "nvfp4",
    "NVFP4, 4over6": "nvfp4(4over6-mse-strict-256)",
}
# Where the name stands beside the point, in points.
BESIDE = {"FP8, one scale": (-9, 9), "FP8, 1×128": (7, -3), "MXFP8": (7, -15)}
# Operations by the name in the figure: that of `nvfp4 bench`.
OPERATIONS = {
    "quantize, amax given": "quantize 1x16 amax-given",
    "quantize": "quantize 1x16",
    "quantize, row-scaled": "quantize 1x16 row-scaled",
    "quantize, 16×16": "quantize 16x16",
    "quantize, both directions": "quantize 1x16 both",
    "quantize, 4over6": "quantize 1x16 4over6-mse-strict",
    "quantize, stochastic": "quantize 1x16 stochastic",
    "decode to bf16": "dequantize bf16",
    "quantize to MXFP8": "quantize mxfp8",
    "quantize to FP8, 1×128": "quantize fp8-1x128",
}


def read(name):
    return json.loads((HERE / f"{name}.json").read_text())


def measure():
    """Bytes per value and relative error of standard normal numbers."""
    import numpy
    import nvfp4

    size = 4096
    x = numpy.random.default_rng(0).standard_normal((size, size), dtype=numpy.float32)
    rows = []
    for name, spec in FORMATS.items():
        q = nvfp4.Quantizer(spec=spec).quantize(x)
        stored = q.codes.nbytes + q.scales.nbytes
        error = numpy.linalg.norm(x - q.dequantize()) / numpy.linalg.norm(x)
        rows.append(
            {"name": name, "spec": spec, "bytes": stored / x.size, "error": round(float(error), 6)}
        )
    bits = x.view(numpy.uint32)
    bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(numpy.float32)
    error = numpy.linalg.norm(x - bf16) / numpy.linalg.norm(x)
    rows.append({"name": "bf16", "bytes": 2.0, "error": round(float(error), 6)})
    made = {
        "command": "python docs/figures/draw.py measure",
        "machine": platform.machine(),
        "data": f"{size} × {size} standard normal numbers, numpy's default_rng(0)",
        "rows": rows,
    }
    (HERE / "formats.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def formats(axes, theme):
    """What a value takes, beside what it loses."""
    rows = read("formats")["rows"]
    for row in rows:
        nvfp4, place = row["name"].startswith("NVFP4"), (row["bytes"], row["error"])
        axes.plot(*place, "o", color=theme["ours" if nvfp4 else "other"])
        # Formats of 8 bits lie close together.
        beside = BESIDE.get(row["name"], (7, -3))
        axes.annotate(
            row["name"], place, beside, textcoords="offset points", color=theme["text"], fontsize=9
        )
    axes.set(xlim=(0, 2.2), ylim=(0, 0.125), xlabel="bytes per value", ylabel="relative error")
    axes.grid(color=theme["grid"], linewidth=0.6)


def bars(axes, theme, names, values, label, end):
    """Horizontal bars beside the speed of a copy."""
    axes.barh(range(len(names)), values, color=theme["ours"], height=0.65)
    axes.axvline(1, color=theme["other"], linewidth=1.2)
    axes.text(1, -0.75, "a copy", color=theme["text"], fontsize=8, ha="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    for at, value in enumerate(values):
        axes.text(value, at, f" {value:.2f}", color=theme["text"], va="center", fontsize=8)
    axes.set(xlabel=label, xlim=(0, end))
    axes.grid(axis="x", color=theme["grid"], linewidth=0.6)


def speed_h200(axes, theme):
    """How close to the speed of a copy operations come on a GPU."""
    rows = {row["name"]: row["of_copy"] for row in read("speed-h200")["rows"]}
    found = {name: rows[operation] for name, operation in OPERATIONS.items() if operation in rows}
    bars(axes, theme, list(found), list(found.values()), "bytes per second, of a copy's, on an H200", 1.15)


def study_gap(axes, theme):
    """What each recipe's loss is over that of bf16: every seed, and their mean."""
    found = study.gaps(study.read(STUDY))
    gaps = {name: [100 * gap for gap in of] for name, (_, of) in found.items() if of}
    for at, of in enumerate(gaps.values()):
        axes.plot(of, [at] * len(of), "o", color=theme["other"], markersize=4)
        axes.plot(statistics.fmean(of), at, "|", color=theme["ours"], markersize=14, markeredgewidth=2.5)
    axes.axvline(0, color=theme["other"], linewidth=1.2)
    axes.set_yticks(range(len(gaps)), gaps)
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss over that of bf16, %: seeds, and their mean")
    axes.grid(axis="x", color=theme["grid"], linewidth=0.6)


def study_loss(axes, theme):
    """Losses over tokens, of bf16 and of one recipe."""
    runs = study.read(STUDY)
    for name, colour in (("nvfp4", theme["ours"]), (study.BASELINE, theme["other"])):
        of = [run for run in runs if run["recipe"] == name]
        for number, run in enumerate(of):
            label = None if number else f"{name}, {len(of)} seeds"
            for what, style in (("training", {"label": label}), ("held_out", {"linestyle": "", "marker": "."})):
                tokens, losses = zip(*run[what])
                axes.plot([count / 1e6 for count in tokens], losses, color=colour, linewidth=0.9, **style)
    axes.set(xlabel="million tokens; points are of held-out text", ylabel="loss, nats a byte", ylim=(0.7, 3))
    axes.grid(color=theme["grid"], linewidth=0.6)
    axes.legend(frameon=False, labelcolor=theme["text"])


FIGURES = {
    "formats": formats,
    "speed-h200": speed_h200,
    "study-gap": study_gap,
    "study-loss": study_loss,
}


def draw():
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    # The same bytes each time.
    matplotlib.rcParams.update({"svg.hashsalt": "nvfp4", "svg.fonttype": "none", "font.size": 9})
    for name, plot in FIGURES.items():
        for theme, colours in THEMES.items():
            figure = Figure((7, 3.4), layout="constrained")
            axes = figure.subplots()
            plot(axes, colours)
            axes.set_facecolor("none")
            axes.set_axisbelow(True)
            for side, spine in axes.spines.items():
                spine.set(color=colours["grid"], visible=side in ("left", "bottom"))
            axes.tick_params(colors=colours["text"], length=0)
            axes.xaxis.label.set_color(colours["text"])
            axes.yaxis.label.set_color(colours["text"])
            file = HERE / f"{name}-{theme}.svg"
            figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["draw", "measure"], default="draw")
    {"draw": draw, "measure": measure}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
