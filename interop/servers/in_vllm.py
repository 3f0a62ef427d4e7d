"""Every family in every form, loaded by vLLM: `in_vllm.py RESULTS.json [FAMILY …]`. The source itself is the control."""

import json
import sys
import tempfile
from pathlib import Path

import loader
from families import EVERY, make
from forms import FORMS, Refused, converted
from values import compare


def said(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}" if str(error).strip() else type(error).__name__


def cell(source, root, form):
    """What became of one model in one form: a word, and what there is to say."""
    try:
        packed, plain = converted(source, root, form)
    except Refused as refusal:
        return "refused", str(refusal)
    except AssertionError as problem:
        return "problem", str(problem)
    try:
        expected = loader.load(plain)
    except Exception as error:
        return "source", said(error)
    try:
        problems, count = compare(loader.load(packed), expected, activations="W4A4" in form)
    except Exception as error:
        return "problem", said(error)
    if problems:
        return "problem", f"{problems[0]}, and {len(problems) - 1} more" if len(problems) > 1 else problems[0]
    return "ok", f"{count} matrices"


def row(family, root):
    source = root / family
    make(family, source)
    try:
        empty = [name for name, parameter in loader.load(source).items() if loader.unfilled(parameter)]
        control = ("source", f"not filled: {empty[0]}") if empty else ("ok", "")
    except Exception as error:
        control = ("source", said(error))
    cells = {}
    for form in FORMS:
        state, text = cell(source, root, form)
        # What vLLM does not load unquantized says nothing about our files.
        cells[f"vLLM, {form}"] = control if control[0] != "ok" and state != "refused" else (state, text)
    return cells


def main():
    loader.begin()
    path, names = Path(sys.argv[1]), sys.argv[2:] or EVERY
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="nvfp4-servers-") as root:
            results[name] = row(name, Path(root))
        print(name, *(f"| {state} {text if state != 'ok' else ''}" for state, text in results[name].values()), file=sys.stderr, flush=True)
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
