"""Write a comparison as a single self-contained HTML file."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from sdonnx.benchmark.report.image_comparison import make_galleries
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.plots import make_panels
from sdonnx.benchmark.report.surroundings import device_name, engines_table, installed_packages, machine_facts
from sdonnx.benchmark.report.terms import TERMS
from sdonnx.benchmark.report.workload_rows import make_headline, make_tables, memory_kinds, results_by_workload
from sdonnx.benchmark.results import REFERENCE, Comparison
from sdonnx.errors import OutputError
from sdonnx.folder.pipeline_folder import finite

__all__ = ["check_report", "render_page", "write_report"]


def check_report(path: Path) -> None:
    """Check that the page can be written, before minutes are spent on measuring.

    Raises:
        OutputError: the folder is missing or not writable, or the path exists and is not a file.
    """
    with _write_errors(path):
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder", "an existing folder", "create it")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file", "a file, or a new name", "choose another name")
        # Write a byte, because permissions do not show whether a file system is read-only or full.
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\0")


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page atomically.

    Raises:
        OutputError: the file is not writable.
    """
    check_report(path)
    # File names may contain undecodable bytes, which are lone surrogates in a string.
    content = _page(comparison).encode("utf-8", "backslashreplace")
    with _write_errors(path):
        target = path.resolve()  # keep a symbolic link
        partial = target.parent / f".report-{secrets.token_hex(4)}.partial"
        try:
            with partial.open("xb") as file:
                file.write(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a folder with enough free space and permission to write",
            "choose another folder",
        ) from error


def render_page(template: str, package: str, values: Mapping[str, Any]) -> str:
    """Render a page with this package's style and macros. All values are escaped.

    Args:
        template: file name of the template.
        package: package of the template.
        values: the template's variables.
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
    return render_page("page.html", __package__, _shown(comparison) | scripts)


def _shown(comparison: Comparison) -> dict[str, Any]:
    palette = Palette(comparison)
    by_workload = results_by_workload(comparison)
    headlines = [make_headline(workload, results, palette) for workload, results in by_workload.items()]
    panels = make_panels(comparison, palette)
    figures = [figure for panel in panels for figure in panel.figures]
    return {
        "title": _title(comparison, palette),
        "written": datetime.now(UTC).strftime("%d %B %Y"),
        "headlines": [headline for headline in headlines if headline is not None],
        "parts": [make_tables(workload, results, palette) for workload, results in by_workload.items()],
        "memory_kinds": memory_kinds(comparison),
        "panels": panels,
        "figures": [finite({"data": figure.data, "layout": figure.layout}) for figure in figures],
        "galleries": make_galleries(comparison, palette),
        "reference": REFERENCE,
        "machine": machine_facts(comparison),
        "engines_table": engines_table(comparison, palette),
        "packages": installed_packages(comparison),
        "command": comparison.command,
        "terms": TERMS,
    }


def _title(comparison: Comparison, palette: Palette) -> str:
    count = sum(rival != REFERENCE for rival in palette.rivals)
    engines = {0: "Benchmark", 1: "1 engine"}.get(count, f"{count} engines")
    return f"{engines} on {device_name(comparison)}"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
