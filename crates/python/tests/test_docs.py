"""Examples that need numpy alone run: the guide's, and that of the package's page."""

import pathlib
import re

import nvfp4
from test_command import checkpoint  # noqa: F401  (a fixture)

ROOT = pathlib.Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "python.md"


def test_the_guides_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    plain = [block for block in blocks if not any(word in block for word in ("torch", "te.", "convert("))]
    assert len(plain) == 2
    first, second = {}, {}
    exec(compile(plain[0], str(GUIDE), "exec"), first)
    exec(compile(plain[1], str(GUIDE), "exec"), second)
    assert first["y"].shape == (64, 64) and second["generator"].consumed > 0


def test_the_guides_conversion_runs(checkpoint, monkeypatch):  # noqa: F811
    checkpoint.rename(checkpoint.parent / "Qwen3-8B")
    monkeypatch.chdir(checkpoint.parent)
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "convert(" in block)
    names = {}
    exec(compile(block, str(GUIDE), "exec"), names)
    assert list(names["done"]["relative_error"]) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert nvfp4.verify("Qwen3-8B-NVFP4") == []


def test_the_packages_example_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "crates" / "python" / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert (names["q"].codes.shape, names["q"].scales.shape, names["q"].amax.shape) == ((64, 64), (64, 8), (1,))


def test_every_link_of_the_documents_leads_somewhere():
    def anchors(page):
        headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    pages = [path for pattern in ("*.md", "docs/*.md", "crates/*/README.md", "interop/**/*.md") for path in ROOT.glob(pattern)]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [(page, link) for page, link in links if not link.startswith("http")]
    assert inside
    for page, link in inside:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_every_document_is_in_their_list_and_every_figure_has_its_source():
    docs = ROOT / "docs"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (docs / "README.md").read_text()))
    assert listed == {page.name for page in docs.glob("*.md")} - {"README.md"}
    for page in (ROOT / "README.md", docs / "README.md"):
        named = re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text())
        assert len(named) >= 4
        for figure in named:
            name, _, theme = pathlib.Path(figure).stem.rpartition("-")
            assert (page.parent / figure).exists() and theme in ("light", "dark")
            source = docs / "study" if name.startswith("study-") else docs / "figures" / f"{name}.json"
            assert source.exists(), figure
