"""MkDocs hook: generate the pages of the site that are derived from the code and from other files.

`mkdocs build` loads this file (`hooks` in mkdocs.yml). Generated pages exist only in the built site:

- the command-line reference, from the argparse parsers;
- the table of fusions, from the fusion records;
- the index of decisions, from the front matter of docs/decisions/*.md;
- README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md and examples/README.md, with their links rewritten.

`python scripts/generate_docs.py` prints the generated pages, each after a line with its path.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["GENERATED", "Decision", "main", "on_config", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"

_ROOT_PAGES = {
    "index.md": "README.md",
    "contributing/index.md": "CONTRIBUTING.md",
    "contributing/security-policy.md": "SECURITY.md",
    "contributing/changelog.md": "CHANGELOG.md",
    "how-to/examples.md": "examples/README.md",
}


_INDEX_INTRO = """# Decisions

Each record states one decision, the reason, the measurements behind it, and the alternatives that were rejected. The
pages under Explanation describe the design that results. Numbers are ids and follow no order of time or importance.

A new record is a file `docs/decisions/NNNN-title.md` with the next number; those of deleted records are not used again.
Its front matter holds `date` and `subject` (a heading of this page), its heading says in the imperative what was
decided, and its body has the paragraphs **Decision**, **Why** and, where they exist, **Measured** and **Alternatives**.
A decision that is replaced is deleted; the new record says what it replaces. The reason for a choice of one function is
in its docstring.
"""


_FUSIONS_INTRO = """# Fusions

Fusions run in a fixed order as stages. `sdonnx explain FOLDER` prints, for each stage, the rewrites and the
reason for each candidate that was not fused.

## Options

`sdonnx optimize` has an option for each fusion that can be disabled.
`optimize_folder(disabled=[...])` accepts the names without `--disable_`.
"""

_RULES_INTRO = """## Rules

The stages in their order, the fused operators that each emits, its rules, and the files that hold them. Rows without a
fusion are operators that another part of the optimizer emits.
"""


@dataclass(frozen=True)
class Decision:
    """The front matter of a record in docs/decisions.

    Attributes:
        file: name of the file, NNNN-title.md.
        number: its number.
        title: what was decided, as an imperative.
        date: day of the decision, YYYY-MM-DD.
        subject: heading of the index that lists the record.
    """

    file: str
    number: int
    title: str
    date: str
    subject: str


def read_decision(path: Path) -> Decision:
    """Return the front matter of a record.

    Raises:
        ValueError: the file name, the front matter or the heading does not have the form of a record.
    """
    match = re.match(r"---\n(.*?)\n---\n\n# ([^\n]*)\n", path.read_text(encoding="utf-8"), re.DOTALL)
    number = re.match(r"(\d{4})-[a-z0-9-]+\.md$", path.name)
    if match is None or number is None:
        raise ValueError(f"{path} has no front matter, no heading, or is not named NNNN-title.md")
    fields = dict(line.split(": ", 1) for line in match[1].splitlines())
    if not {"date", "subject"} <= fields.keys():
        raise ValueError(f"{path} needs date and subject: {fields}")
    return Decision(path.name, int(number[1]), match[2], fields["date"], fields["subject"])


def read_decisions() -> list[Decision]:
    """Return all records by number."""
    return [read_decision(path) for path in sorted(DECISIONS.glob("[0-9]*.md"))]


def decision_index() -> str:
    """Return the page that lists the records by subject."""
    records = read_decisions()
    lines = [_INDEX_INTRO]
    for subject in dict.fromkeys(record.subject for record in records):
        lines += [f"## {subject}", "", "| No. | Decision | Date |", "| ---: | --- | --- |"]
        for record in records:
            if record.subject == subject:
                link = f"[{record.title}]({record.file})"
                lines.append(f"| {record.number} | {link} | {record.date} |")
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """Return the reference of all commands and options."""
    from sdonnx.cli.command_line import COMMANDS

    lines = [
        "# Command line",
        "",
        "`sdonnx COMMAND` and `python -m sdonnx COMMAND` are the same. `python -m sdonnx.export` and",
        "`python -m sdonnx.optimize_pipeline` are the commands `export` and `optimize`; `python scripts/benchmark.py`",
        "is the command `benchmark`. Every option can be written with `-` or with `_` between words.",
        "",
        "| exit status | meaning |",
        "| --- | --- |",
        "| 0 | success |",
        "| 1 | a check failed (`doctor`, `verify`, `benchmark`) |",
        "| 2 | the input or an option cannot be used; one line says why and what to do |",
        "| 130 | interrupted by Ctrl-C |",
        "| 143 | terminated (SIGTERM) |",
        "",
    ]
    for name, (module, summary) in COMMANDS.items():
        lines += _command(f"sdonnx {name}", module, summary)
    return "\n".join(lines)


def _command(heading: str, module: str, summary: str) -> Iterator[str]:
    parser = argparse.ArgumentParser(
        prog=heading, formatter_class=functools.partial(argparse.HelpFormatter, width=100), add_help=False
    )
    importlib.import_module(module).add_arguments(parser)
    yield from (f"## {heading}", "", _escape(parser.description or summary), "")
    yield from ("```text", parser.format_usage().strip(), "```", "")
    positional, options, *named = parser._action_groups
    for group in (positional, *named, options):
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if not actions:
            continue
        if named and group is not positional:
            title = "Other" if group is options else _escape(str(group.title)).capitalize()
            yield from (f"**{title}**", "")
        yield from ("| argument | meaning |" if group is positional else "| option | meaning |", "| --- | --- |")
        for action in actions:
            yield f"| {_names(action)} | {_help(parser, action)} |"
        yield ""


def _names(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if isinstance(value, tuple):
        value = " ".join(value)
    takes_value = action.nargs != 0
    several = " ..." if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        return f"`{value}{several}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return f"{names} `{value}{several}`" if takes_value else names


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = _escape(parser._get_formatter()._expand_help(action)) if action.help else ""
    return f"{text} (required)" if action.required and action.option_strings else text


def _escape(text: str) -> str:
    """Return text as Markdown that shows it literally."""
    return re.sub(r"([\\`*_\[\]|<])", r"\\\1", " ".join(text.split())).replace("\\|", "&#124;")


def fusions() -> str:
    """Return the page of the fusions, their options and rules."""
    from sdonnx.fusions.derived_tables import option_table, rule_table

    return f"{_FUSIONS_INTRO}\n{option_table()}\n{_RULES_INTRO}\n{rule_table()}"


def _root_page(page: str, file: str) -> str:
    """Return a file outside of docs/ as a page of the site, with its links relative to that page."""
    pages = {name: each for each, name in _ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        target = pages.get(path, path.removeprefix("docs/"))
        if not posixpath.splitext(target)[1]:  # a folder
            target = f"{target}/index.md"
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{match[2] or ''})"

    text = (ROOT / file).read_text(encoding="utf-8")
    return re.sub(r"\]\(([^)#:\s]+)(#[^)]*)?\)", link, text)


GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/fusions.md": fusions,
    "decisions/index.md": decision_index,
    **{page: functools.partial(_root_page, page, file) for page, file in _ROOT_PAGES.items()},
}
"""Path of each generated page, relative to docs/, and the function that returns its text."""


def _checklists() -> list[dict[str, str]]:
    """Return a navigation entry for each checklist in docs/contributing."""
    return [
        {path.stem.replace("-", " ").capitalize(): f"contributing/{path.name}"}
        for path in sorted(DOCS.glob("contributing/*.md"))
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Import the package from this checkout, and add the checklists to the navigation."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Contributing" in entry:
            entry["Contributing"][1:1] = _checklists()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, generate in GENERATED.items():
        files.append(File.generated(config, path, content=generate()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show the date and the subject of a decision below its heading, and leave decisions out of the search."""
    if not page.file.src_uri.startswith("decisions/"):
        return markdown
    page.meta["search"] = {"exclude": True}
    if page.file.name == "index":
        return markdown
    record = read_decision(DECISIONS / Path(page.file.src_uri).name)
    status = f"{record.number:04d} · {record.date} · {record.subject}"
    heading, rest = markdown.split("\n", 1)
    return f"{heading}\n\n<p class='decision-status' markdown>{status}</p>\n{rest}"


def main() -> int:
    """Print the generated pages."""
    sys.path.insert(0, str(ROOT))
    for path, generate in GENERATED.items():
        print(f"<!-- {path} -->\n{generate()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
