"""Write a comparison as a single self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdonnx.benchmark.report.charts import make_panels
from sdonnx.benchmark.report.headline import make_headline
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.workload_tables import make_tables, memory_kinds, results_by_workload, settings_text
from sdonnx.benchmark.results import LARGE_SPREAD, Comparison, with_shown_names
from sdonnx.html.gallery import Gallery, make_gallery
from sdonnx.html.page import readable_date, render_page, write_page
from sdonnx.html.tables import DASH, Row, Table, device_name, installed_packages, machine_facts
from sdonnx.metrics import MIN_PSNR_DB
from sdonnx.models.registry import model_name
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload

__all__ = ["write_report"]

_NO_RESULTS = "No engine was measured: the benchmark was interrupted before the first result."
_NO_TRUSTED = "No engine has a trusted result."

# Names of an engine's properties for people. None: the library is named by its engine, and packages are listed below.
_HEADINGS = {
    "name": None,
    "version": None,
    "packages": None,
    "compile_mode": "compile mode",
    "compiler_config": "compiler options",
    "regional": "only blocks compiled",
    "io_binding": "I/O binding",
    "scheduler": "sampler",
}

_LIBRARIES = {
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-plain": "ONNX Runtime",
    "torch": "PyTorch",
    "sdonnx-compile": "ONNX Runtime",
}

_NO = "no"


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page atomically.

    Raises:
        OutputError: the file is not writable.
    """
    write_page(render_page("page.html", __package__, _shown(with_shown_names(comparison))), path)


def _shown(comparison: Comparison) -> dict[str, Any]:
    """Return the template's variables."""
    palette = Palette(comparison)
    by_workload = results_by_workload(comparison)
    found = [make_headline(workload, results, palette) for workload, results in by_workload.items()]
    headlines = [headline for headline in found if headline is not None]
    workloads = _workloads(comparison)
    settings = list(dict.fromkeys(map(settings_text, workloads)))
    shared, differences = _engine_facts(comparison, palette)
    galleries = (_gallery(comparison, workload, palette) for workload in workloads)
    packages = installed_packages(comparison.environment)
    clocks = [clock for result in comparison.results for each in result.rounds for clock in each.clocks_mhz]
    return {
        "title": _title(comparison),
        "result": headlines[0].sentence if headlines else _NO_TRUSTED if comparison.results else _NO_RESULTS,
        # A single workload is named once, at the top; several are named wherever their numbers are.
        "workload": headlines[0].title if headlines else workloads[0].title if workloads else None,
        "has_several": len(workloads) > 1,
        "settings": settings[0] if len(settings) == 1 else None,
        "measured": readable_date(comparison.time),
        "version": dict(packages).get("sdonnx"),
        "headlines": headlines,
        "parts": [make_tables(workload, results, palette) for workload, results in by_workload.items()],
        "memory_kinds": memory_kinds(comparison),
        "panels": make_panels(comparison, palette),
        "galleries": [gallery for gallery in galleries if gallery.shown],
        "reference": REFERENCE,
        "machine": machine_facts(comparison.environment, clocks),
        "engines": shared,
        "engines_table": differences,
        "packages": packages,
        "command": comparison.command,
        "large_spread": LARGE_SPREAD,
        "min_psnr_db": MIN_PSNR_DB,
    }


def _title(comparison: Comparison) -> str:
    """Return the model and the device: "Stable Diffusion 1.5 on NVIDIA H200"."""
    families = [result.engine["family"] for result in comparison.results if "family" in result.engine]
    name = model_name(comparison.model, str(families[0]) if families else None)
    devices = {str(result.engine.get("device", "cuda")) for result in comparison.results}
    device = device_name(comparison.environment, on_gpu="cuda" in devices or not devices)
    return f"{name or 'Benchmark'} on {device}"


def _workloads(comparison: Comparison) -> list[Workload]:
    measured: list[Any] = [*comparison.results, *comparison.throughput, *comparison.resolutions, *comparison.kernels]
    return list(
        dict.fromkeys([*(each.workload for each in measured), *(workload for _, workload in comparison.images)])
    )


def _gallery(comparison: Comparison, workload: Workload, palette: Palette) -> Gallery:
    names = [REFERENCE, *(name for name in palette.rivals if name != REFERENCE)]
    found = {name: comparison.images[name, workload] for name in names if (name, workload) in comparison.images}
    return make_gallery(workload.title, found, palette.colour)


def _engine_facts(comparison: Comparison, palette: Palette) -> tuple[list[tuple[str, str]], Table | None]:
    """Return the properties that all engines share, and a table of those that differ; None if there are none."""
    found = {result.rival: _properties(result.engine) for result in reversed(comparison.results) if result.engine}
    found = {rival: found[rival] for rival in palette.rivals if rival in found}
    shared: list[tuple[str, str]] = []
    rows: list[Row] = []
    for name in dict.fromkeys(name for properties in found.values() for name in properties):
        values = [properties.get(name, DASH) for properties in found.values()]
        if len(set(values)) > 1:
            rows.append(Row(name, tuple(values)))
        elif values[0] not in (DASH, _NO):
            shared.append((name, values[0]))
    return shared, Table("Settings that differ", "", palette.headings(found), tuple(rows)) if rows else None


def _properties(engine: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties of an engine as names and values in words."""
    name = str(engine.get("name"))
    properties = {"library": _LIBRARIES.get(name, name), "version": _text(engine.get("version"))}
    for key, value in engine.items():
        if (heading := _HEADINGS.get(key, key.replace("_", " "))) is not None:
            properties[heading] = _text(value)
    return properties


def _text(value: object) -> str:
    """Return a value in words."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else _NO
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or _NO
    return str(value)
