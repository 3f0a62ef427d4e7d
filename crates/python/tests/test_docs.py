"""The guide's examples that need numpy alone run."""

import pathlib
import re

GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "python.md"


def test_the_guides_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    plain = [block for block in blocks if "torch" not in block and "te." not in block]
    assert len(plain) == 2
    names = {}
    for block in plain:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert names["y"].shape == (64, 64)
