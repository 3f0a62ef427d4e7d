"""The table of families and servers in docs/checkpoints.md: `table.py RESULTS.json …` prints it.

`+` is a model that was loaded: every parameter filled, with our values. A letter is a reason below the table. A cell without a result
is an error: nothing is in the table that was not run.
"""

import json
import string
import sys
import textwrap
from pathlib import Path

WORDS = {"refused": "refused", "source": "not loaded, nor is the source", "problem": "not loaded"}


def reasons(results):
    """A letter for each thing that is said, without the name of the model in it."""
    letters = {}
    for cells in results.values():
        for state, text in cells.values():
            if state != "ok":
                key = f"{WORDS[state]}: {text}"
                letters.setdefault(key, (string.ascii_lowercase + string.ascii_uppercase)[len(letters)])
    return letters


def general(text):
    """A reason that names the architecture is the same for all architectures."""
    first, _, rest = text.partition(" ")
    return f"it {rest}" if first.endswith(("ForCausalLM", "Generation", "Classification", "BertModel")) else text


def main():
    results = {}
    for path in sys.argv[1:]:
        for family, cells in json.loads(Path(path).read_text()).items():
            row = results.setdefault(family, {})
            row.update({column: (state, general(text)) for column, (state, text) in cells.items()})
    columns = list(dict.fromkeys(column for cells in results.values() for column in cells))
    missing = [f"{family}: {column}" for family, cells in results.items() for column in columns if column not in cells]
    assert not missing, f"not run: {missing}"
    letters = reasons(results)
    print(f"| family | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for family, cells in results.items():
        marks = ["+" if cells[c][0] == "ok" else letters[f"{WORDS[cells[c][0]]}: {cells[c][1]}"] for c in columns]
        print(f"| {family} | {' | '.join(marks)} |")
    print()
    for text, letter in letters.items():
        print(textwrap.fill(f"- {letter}: {text}", 100, subsequent_indent="  ", break_on_hyphens=False))


if __name__ == "__main__":
    main()
