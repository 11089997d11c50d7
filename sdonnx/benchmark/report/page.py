"""The page: a comparison becomes one HTML file that needs nothing beside it."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from sdonnx.benchmark.report.images import galleries_of
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.plots import panels_of
from sdonnx.benchmark.report.rows import headline_of, memory_kinds, tables_of, workloads_of
from sdonnx.benchmark.report.surroundings import device_of, engines_table, machine_of, packages_of
from sdonnx.benchmark.report.terms import TERMS
from sdonnx.benchmark.results import REFERENCE, Comparison
from sdonnx.errors import OutputError
from sdonnx.folder import finite

__all__ = ["refuse_report", "rendered", "write_report"]


def refuse_report(path: Path) -> None:
    """Look whether the page can be written, before minutes of measuring are spent.

    Raises:
        OutputError: its folder is missing or cannot be written into, or its name is taken by what is no file.
    """
    with _told(path):
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is no folder", "a folder to write into", "make it first")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is no file", "a file, or a new name", "choose another name")
        # Permissions alone do not tell: a file system can be read-only or full.
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\0")


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page; a reader of an older one sees that or this one, and no half.

    Raises:
        OutputError: the file cannot be written.
    """
    refuse_report(path)
    # Names of files may hold bytes that are no text, which come as lone surrogates.
    content = _page(comparison).encode("utf-8", "backslashreplace")
    with _told(path):
        target = path.resolve()  # a link stays one
        partial = target.parent / f".report-{secrets.token_hex(4)}.partial"
        try:
            with partial.open("xb") as file:
                file.write(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a place with enough free space and permission to write",
            "choose another place",
        ) from error


def rendered(template: str, package: str, values: Mapping[str, Any]) -> str:
    """Return a page of this package's style and macros; what was measured, or came from outside, is escaped.

    Args:
        template: the file of the template.
        package: the package that it lies in.
        values: what it shows.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader(__package__, "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values, style=Markup(_read("page.css")))


def _page(comparison: Comparison) -> str:
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    # Plotly is most of the page.
    scripts = {"script": Markup(_read("page.js")), "plotly": Markup(get_plotlyjs())}
    return rendered("page.html", __package__, _shown(comparison) | scripts)


def _shown(comparison: Comparison) -> dict[str, Any]:
    palette = Palette(comparison)
    by_workload = workloads_of(comparison)
    headlines = [headline_of(workload, results, palette) for workload, results in by_workload.items()]
    panels = panels_of(comparison, palette)
    figures = [figure for panel in panels for figure in panel.figures]
    return {
        "title": _title(comparison, palette),
        "written": datetime.now(UTC).strftime("%d %B %Y"),
        "headlines": [headline for headline in headlines if headline is not None],
        "parts": [tables_of(workload, results, palette) for workload, results in by_workload.items()],
        "memory_kinds": memory_kinds(comparison),
        "panels": panels,
        "figures": [finite({"data": figure.data, "layout": figure.layout}) for figure in figures],
        "galleries": galleries_of(comparison, palette),
        "reference": REFERENCE,
        "machine": machine_of(comparison),
        "engines_table": engines_table(comparison, palette),
        "packages": packages_of(comparison),
        "command": comparison.command,
        "terms": TERMS,
    }


def _title(comparison: Comparison, palette: Palette) -> str:
    count = sum(rival != REFERENCE for rival in palette.rivals)
    engines = {0: "Benchmark", 1: "1 engine"}.get(count, f"{count} engines")
    return f"{engines} on {device_of(comparison)}"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
