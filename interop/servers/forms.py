"""The forms that `nvfp4 convert` writes, and one conversion with its control: the same checkpoint, decoded to BF16."""

import os
import subprocess

# Column of the table: options of `convert`.
FORMS = {
    "ModelOpt W4A16": [],
    "ModelOpt W4A4": ["--acts", "const"],
    "compressed-tensors W4A16": ["--to", "compressed-tensors"],
    "compressed-tensors W4A4": ["--to", "compressed-tensors", "--acts", "const"],
    "ModelOpt mlp+fp8": ["--preset", "mlp+fp8"],
    "ModelOpt experts+fp8": ["--preset", "experts+fp8"],
    "compressed-tensors mlp+fp8": ["--to", "compressed-tensors", "--preset", "mlp+fp8"],
    "compressed-tensors experts+fp8": ["--to", "compressed-tensors", "--preset", "experts+fp8"],
}


class Refused(Exception):
    """`nvfp4` refused, with a reason."""


def nvfp4(*arguments):
    """Runs the command. 3 is a refusal; 1 is a problem that it found in its own result."""
    done = subprocess.run([os.environ["NVFP4_BINARY"], *map(str, arguments)], capture_output=True, text=True)
    said = done.stderr.strip()
    if done.returncode == 3:
        raise Refused(said.splitlines()[0].removeprefix("error: "))
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    if done.returncode == 1 and arguments[0] == "verify":
        raise Refused("`verify`: " + problems[0].removeprefix("problem").strip().split(": ", 1)[1])
    assert done.returncode == 0, f"nvfp4 {arguments[0]}: {' '.join(problems) or said}"


def converted(source, root, form):
    """A checkpoint in one form, and the same decoded."""
    packed, plain = root / "packed", root / "plain"
    nvfp4("convert", source, packed, "-q", "--force", *FORMS[form])
    nvfp4("dequant", packed, plain, "--force")
    return packed, plain
