"""Commands and code in README.md and docs/ are accepted by the command line and by the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import sdonnx
from sdonnx import OrtDiffusionPipeline
from sdonnx.cli.command_line import COMMANDS, CommandParser

ROOT = Path(__file__).resolve().parent.parent
# Records of what was decided, of the past, and pages that quote commands as they were measured.
HISTORICAL = {"docs/lab/benchmarks.md", "CHANGELOG.md"}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *(ROOT / "docs").rglob("*.md"))
    if "decisions" not in path.parts
}
CURRENT = {page: text for page, text in PAGES.items() if page not in HISTORICAL}

# Names that stand for values in the guides.
PIPELINES = {"pipeline", "pipe", "base", "refiner"}

# A block of code; in a list it is indented.
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

# Options that pages mention of other programs: gunicorn and docker build.
FOREIGN_OPTIONS = {"--preload", "--target"}


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield the page and the content of each block of code in these languages."""
    for page, text in CURRENT.items():
        for _, language, content in _BLOCK.findall(text):
            if language in languages:
                yield page, dedent(content)


def commands() -> Iterator[tuple[str, str]]:
    """Yield the page and each line that runs `sdonnx`; of a diff, the lines that it adds."""
    for page, content in blocks("sh", "bash", "diff"):
        for line in content.replace("\\\n", " ").splitlines():
            for command in re.sub(r"^\+", "", line).split(" && "):
                command = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command)
                if command.startswith("sdonnx ") and "[-" not in command:  # options in brackets are a synopsis
                    yield page, command


def test_commands_are_found() -> None:
    pages = {page for page, _ in commands()}
    assert {"README.md", "docs/faq.md", "docs/tutorial/first-image.md", "docs/how-to/recipes.md"} - pages == {
        "docs/faq.md"
    }


def test_every_block_is_found() -> None:
    """A block in a form that `blocks` does not know would not be checked."""
    for page, text in CURRENT.items():
        assert 2 * len(_BLOCK.findall(text)) == len(re.findall("```", text)), page
    assert {"docs/lab/exporters.md", "docs/contributing/add-a-kernel.md"} <= {page for page, _ in blocks("sh", "bash")}


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_command_line_accepts(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    parser = CommandParser(prog=name)
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    try:
        parser.parse(arguments)
    except SystemExit:
        pytest.fail(f"{page}: {line}: {capsys.readouterr().err.strip()}")


def test_scripts_accept_their_options() -> None:
    found = 0
    for page, content in blocks("sh", "bash"):
        for script, rest in re.findall(r"\bpython3? ([\w/]+\.py)\b(.*)", content.replace("\\\n", " ")):
            source = (ROOT / script).read_text(encoding="utf-8")
            options = re.findall(r"(?<!\S)(--[\w-]+)", rest)
            assert [each for each in options if f'"{each}"' not in source] == [], f"{page}: {script}"
            found += len(options)
    assert found > 20


def test_options_in_text_exist() -> None:
    known = FOREIGN_OPTIONS.copy()
    for module, _ in COMMANDS.values():
        parser = CommandParser()
        importlib.import_module(module).add_arguments(parser)
        known |= parser._option_string_actions.keys()
    for folder in ("scripts", "lab", "examples", "tests", "sdonnx"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8")))
    known |= {name.replace("_", "-") for name in known}
    for page, text in CURRENT.items():
        assert set(re.findall(r"`(--[\w-]+)[`= ]", text)) - known == set(), page


@pytest.mark.parametrize("page", sorted(CURRENT))
def test_verbs_exist(page: str) -> None:
    for verb in re.findall(r"`sdonnx ([a-z]+)\b", CURRENT[page]):
        assert verb in COMMANDS, verb


@pytest.mark.parametrize("page", sorted(CURRENT))
def test_commands_are_spelled_sdonnx(page: str) -> None:
    """Only the generated reference names the aliases."""
    aliases = re.findall(r"python3? (?:-m sdonnx\S*|scripts/benchmark\.py)", CURRENT[page])
    assert aliases == []


@pytest.mark.parametrize(("page", "code"), list(blocks("python")))
def test_python_uses_names_that_exist(page: str, code: str) -> None:
    """Imports, methods of the pipeline, and names of arguments exist."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "sdonnx":
            assert {alias.name for alias in node.names} <= set(sdonnx.__all__), page
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sdonnx."):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], page
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sdonnx":
            assert node.attr in sdonnx.__all__, f"{page}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PIPELINES:
            assert _has(node.attr), f"{page}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and (signature := _signature(node.func)) is not None:
            if any(isinstance(each, ast.Starred) for each in node.args):
                continue
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            try:
                signature.bind(*node.args, **given)
            except TypeError as error:
                pytest.fail(f"{page}: {ast.unparse(node)}: {error}")


def _has(name: str) -> bool:
    """Return whether a pipeline has an attribute: of its class, or set when it is loaded."""
    if hasattr(OrtDiffusionPipeline, name):
        return True
    sources = map(inspect.getsource, OrtDiffusionPipeline.__mro__[:-1])
    return any(re.search(rf"^    +(?:self\.\w+, )*self\.{name}\b.*=|^    {name}: ", source, re.M) for source in sources)


def _signature(function: ast.expr) -> inspect.Signature | None:
    """Return the signature, without `self`, of what an expression of the guides calls, if it belongs to the package."""
    text = ast.unparse(function).removeprefix("sdonnx.")
    owner, _, method = text.rpartition(".")
    if text in PIPELINES:
        owner, method = text, "__call__"
    if owner in PIPELINES or owner == "OrtDiffusionPipeline":
        if not hasattr(OrtDiffusionPipeline, method):
            return None
        found = inspect.signature(getattr(OrtDiffusionPipeline, method))
        names = list(found.parameters)
        return found.replace(parameters=[found.parameters[name] for name in names if name != "self"])
    return inspect.signature(getattr(sdonnx, text)) if text in sdonnx.__all__ else None


def test_diffs_replace_with_code_that_exists() -> None:
    found = 0
    for page, content in blocks("diff"):
        added = [line[1:] for line in content.splitlines() if line.startswith("+") and not line.startswith("+sdonnx")]
        if added:
            test_python_uses_names_that_exist(page, "\n".join(added))
            found += 1
    assert found >= 4


def test_stilted_sentences_are_gone() -> None:
    """Phrases that readers stumbled over; see scripts/check_language.py for the words of docstrings."""
    phrases = (
        "is told besides", "that are one replay", "follow one another", "gives the graphs back", "may come from anyone",
        "leaves out again", "a kernel lies", "that lie", "draws what", "has a line with the reason",
        "that you can mend", "is not there is made", "of before", "likewise",
    )  # fmt: skip
    for page, text in CURRENT.items():
        assert [phrase for phrase in phrases if phrase in text] == [], page


def test_probes_of_the_guide_are_those_of_the_server() -> None:
    yaml = pytest.importorskip("yaml")
    ((_, content),) = [each for each in blocks("yaml") if each[0] == "docs/how-to/serve.md"]
    deployment = yaml.safe_load(content)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    source = (ROOT / "sdonnx" / "serve" / "http" / "application.py").read_text(encoding="utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert f'app.add_api_route("{get["path"]}"' in source
        assert get["port"] in ports
    assert json.dumps(deployment["spec"]["template"]["metadata"]["labels"]) == json.dumps(
        deployment["spec"]["selector"]["matchLabels"]
    )
