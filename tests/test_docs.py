"""The pages in docs/, and the pages that scripts/generate_docs.py derives from the code."""

from __future__ import annotations

import ast
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import load_script

import sdonnx
from sdonnx import errors
from sdonnx.cli.command_line import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")


GENERATOR = load_script("generate_docs")
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def _links(text: str) -> Iterator[str]:
    """Yield the relative targets of Markdown links, without anchors, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text):
        if (path := re.sub(r"#.*", "", target)) and not re.match(r"[a-z]+:", path):
            yield path


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_to_files(page: str) -> None:
    for link in _links((DOCS / page).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        assert not target.startswith(".."), f"{link} is no page of the site"
        assert (DOCS / target).is_file() or target in GENERATOR.GENERATED, link


@pytest.mark.parametrize("page", ROOT_PAGES)
def test_links_of_the_root_lead_to_files(page: str) -> None:
    for link in _links((ROOT / page).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        generated = target.removeprefix("docs/") in GENERATOR.GENERATED
        assert (ROOT / target).exists() or generated, link


def test_navigation_holds_every_page() -> None:
    listed = re.findall(r"(?:: |- )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    own = {page for page in PAGES if not page.startswith(("decisions/", "contributing/"))}
    assert own | set(GENERATOR.GENERATED) - {"decisions/index.md"} == set(listed)


def test_decisions_have_numbers_and_titles_of_their_own() -> None:
    decisions = GENERATOR.read_decisions()
    assert len({each.number for each in decisions}) == len(decisions)
    assert len({each.title for each in decisions}) == len(decisions)


@pytest.mark.parametrize(
    "text",
    [
        "# A title\n",
        "---\ndate: 2026-11-23\n---\n\n# A title\n",
        "---\ndate: 2026-11-23\nsubject: Tests\n---\n\nA title\n",
    ],
    ids=["no front matter", "no subject", "no heading"],
)
def test_a_malformed_decision_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "0001-a-title.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="0001-a-title"):
        GENERATOR.read_decision(path)


def test_index_of_decisions_links_every_record() -> None:
    index = GENERATOR.decision_index()
    assert all(f"]({each.file})" in index for each in GENERATOR.read_decisions())
    rows = [line for line in index.splitlines() if line.startswith("| ") and not line.startswith("| No.")]
    assert len(rows) == len(GENERATOR.read_decisions()) + index.count("| ---: |")


def _sources() -> Iterator[tuple[Path, str]]:
    for folder in ("sdonnx", "scripts", "lab", "examples", "tests", "fuzz", "kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".sh", ".h", ".cu", ".cuh") and path != Path(__file__):
                yield path, path.read_text(encoding="utf-8")


def test_code_refers_to_existing_pages() -> None:
    """diffusers and ONNX Runtime have pages in docs too."""
    named = {"docs/decisions/NNNN-title.md", *(f"docs/{name}" for name in GENERATOR.GENERATED)}
    pages = re.compile(r"\bdocs/(?!source/)[a-z][\w/-]+\.md\b")
    found = [(path, page) for path, text in _sources() for page in pages.findall(text)]
    assert len(found) > 20
    assert [each for each in found if each[1] not in named and not (ROOT / each[1]).is_file()] == []


def test_code_refers_to_existing_decisions() -> None:
    numbers = {f"{each.number:04d}" for each in GENERATOR.read_decisions()}
    found = [(path, number) for path, text in _sources() for number in re.findall(r"docs/decisions/(\d{4})", text)]
    assert found
    assert [each for each in found if each[1] not in numbers] == []


def test_environment_variables_are_documented() -> None:
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    names = {
        name
        for path, text in _sources()
        if path.parts[len(ROOT.parts)] in ("sdonnx", "scripts", "lab")
        for name in re.findall(r"\bSDONNX_[A-Z_]+\b", text)
    }
    assert "SDONNX_CACHE" in names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_api_reference_holds_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference" / "api").glob("*.md"))
    named = set(re.findall(r"^::: sdonnx\.(\w+)$", text, re.MULTILINE))
    assert "::: sdonnx.errors\n" in text
    assert set(sdonnx.__all__) - {"__version__"} - set(dir(errors)) <= named


def test_command_line_lists_every_command() -> None:
    page = GENERATOR.command_line()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## sdonnx {name}" for name in COMMANDS]
    for option in ("`--force_fp32_ops`", "`--disable_attention`", "`--require_certificate`", "`--height`"):
        assert option in page


def test_root_pages_link_within_the_site() -> None:
    assert "](contributing/index.md)" in GENERATOR.GENERATED["index.md"]()
    assert "](../explanation/architecture.md)" in GENERATOR.GENERATED["contributing/index.md"]()
    assert "](decisions/index.md)" in GENERATOR.GENERATED["index.md"]()
    assert "](how-to/examples.md)" in GENERATOR.GENERATED["index.md"]()
    assert "](benchmark.md#with-onediffs-options)" in GENERATOR.GENERATED["how-to/examples.md"]()


def test_contributing_lists_the_import_layers() -> None:
    tree = ast.parse((ROOT / "tests" / "test_packaging.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layers = re.search(r"## Import layers\n(.*?)\n## ", text, re.DOTALL)
    assert layers is not None
    listed = [set(re.findall(r"`(\w+)`", line)) for line in re.findall(r"^\d+\. (.*)", layers[1], re.MULTILINE)]
    assert listed == list(ast.literal_eval(values["LEVELS"]))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OrtDiffusionPipeline" in (tmp_path / "site" / "reference" / "api" / "pipeline.html").read_text("utf-8")
