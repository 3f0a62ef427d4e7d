"""Tests in Python that are skipped, as `src/lib.rs` beside this file has it for those in Rust.

A reason to skip begins with what is missing, in a word of that file: `pytest.skip("gpu: there is none")`. Where `NVFP4_REQUIRE` lists the
word the test fails; otherwise a line goes to the file that `NVFP4_SKIPPED` names. Used with `pytest -p pytest_skips`.
"""

import os
import pathlib
import re

import pytest

WORDS = re.findall(r'Need::\w+ => "(.+)"', (pathlib.Path(__file__).parent / "src/lib.rs").read_text())


def problem(reason):
    """Why a test may not be skipped for this reason, or None."""
    word = reason.partition(":")[0]
    if word not in WORDS:
        return f"'{reason}' does not begin with what is missing, as in 'gpu: there is none'; there are {', '.join(WORDS)}"
    if word in os.environ.get("NVFP4_REQUIRE", "").replace(" ", "").split(","):
        return f"NVFP4_REQUIRE lists {word}, which is missing: {reason}"
    return None


def noted(report):
    """The report of a test or a file: a failure if it was skipped and may not be."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if why := problem(reason):
        report.outcome, report.longrepr = "failed", why
    elif file := os.environ.get("NVFP4_SKIPPED"):
        word, _, rest = reason.replace("\n", " ").partition(":")
        with open(file, "a") as lines:
            lines.write(f"{word}\t{report.nodeid}\t{rest.strip()}\n")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return noted((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return noted((yield))
