"""Write a comparison as a single self-contained HTML file."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from sdonnx.benchmark.report.charts import make_panels
from sdonnx.benchmark.report.headline import make_headline
from sdonnx.benchmark.report.image_comparison import make_galleries
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.surroundings import device_name, engine_facts, installed_packages, machine_facts
from sdonnx.benchmark.report.terms import TERMS
from sdonnx.benchmark.report.workload_rows import make_tables, memory_kinds, results_by_workload, settings_text
from sdonnx.benchmark.results import REFERENCE, Comparison
from sdonnx.benchmark.shown_names import with_shown_names
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import OutputError
from sdonnx.models.model_names import model_name

__all__ = ["check_report", "readable_date", "render_page", "write_report"]

_NO_RESULTS = "No engine was measured: the benchmark was interrupted before the first result."
_NO_TRUSTED = "No engine has a trusted result."


def check_report(path: Path) -> None:
    """Check that the page can be written, before minutes are spent on measuring.

    Raises:
        OutputError: the folder is missing or not writable, or the path exists and is not a file.
    """
    with _write_errors(path):
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder", "an existing folder")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file", "a file, or a new name")
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
    return render_page("page.html", __package__, _shown(with_shown_names(comparison)))


def _shown(comparison: Comparison) -> dict[str, Any]:
    palette = Palette(comparison)
    by_workload = results_by_workload(comparison)
    found = [make_headline(workload, results, palette) for workload, results in by_workload.items()]
    headlines = [headline for headline in found if headline is not None]
    workloads = _workloads(comparison)
    settings = list(dict.fromkeys(map(settings_text, workloads)))
    shared, differences = engine_facts(comparison, palette)
    return {
        "title": _title(comparison),
        "result": headlines[0].sentence if headlines else _NO_TRUSTED if comparison.results else _NO_RESULTS,
        # A single workload is named once, at the top; several are named wherever their numbers are.
        "workload": headlines[0].title if headlines else workloads[0].title if workloads else None,
        "has_several": len(workloads) > 1,
        "settings": settings[0] if len(settings) == 1 else None,
        "measured": readable_date(comparison.time),
        "version": dict(installed_packages(comparison)).get("sdonnx"),
        "headlines": headlines,
        "parts": [make_tables(workload, results, palette) for workload, results in by_workload.items()],
        "memory_kinds": memory_kinds(comparison),
        "panels": make_panels(comparison, palette),
        "galleries": make_galleries(comparison, palette),
        "reference": REFERENCE,
        "machine": machine_facts(comparison),
        "engines": shared,
        "engines_table": differences,
        "packages": installed_packages(comparison),
        "command": comparison.command,
        "terms": TERMS,
    }


def _title(comparison: Comparison) -> str:
    """Return the model and the device: "Stable Diffusion 1.5 on NVIDIA H200"."""
    families = [result.engine["family"] for result in comparison.results if "family" in result.engine]
    name = model_name(comparison.model, str(families[0]) if families else None)
    return f"{name or 'Benchmark'} on {device_name(comparison)}"


def _workloads(comparison: Comparison) -> list[Workload]:
    measured: list[Any] = [*comparison.results, *comparison.throughput, *comparison.resolutions, *comparison.kernels]
    return list(
        dict.fromkeys([*(each.workload for each in measured), *(workload for _, workload in comparison.images)])
    )


def readable_date(time: str) -> str | None:
    """Return the date of an ISO 8601 time in words: "5 March 2026"; None for an empty string."""
    if not time:
        return None
    date = datetime.fromisoformat(time)
    return f"{date.day} {date:%B %Y}"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
