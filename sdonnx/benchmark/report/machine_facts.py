"""The environment of a measurement: machine, engines and packages."""

from __future__ import annotations

import re
from typing import Any

from sdonnx.benchmark.report.html_tables import DASH, Row, Table, number
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.results import Comparison

__all__ = ["device_name", "engine_facts", "installed_packages", "machine_facts"]

_GIB = 1024**3

_TRADEMARKS = re.compile(r"\((R|TM)\)", re.IGNORECASE)

_HEADINGS = {
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
    "optimum": "optimum",
}

# The library is named by its engine, and packages are listed below the engines.
_SEPARATE = ("name", "version", "packages")

_NO = "no"


def device_name(comparison: Comparison) -> str:
    """Return the device's name: the GPU if an engine used it, else the processor."""
    machine = _part(comparison.environment, "machine")
    gpu = _part(machine, "gpu")
    devices = {str(result.engine.get("device", "cuda")) for result in comparison.results}
    on_gpu = "cuda" in devices or not devices
    name = gpu.get("name") if on_gpu else None
    return _TRADEMARKS.sub("", str(name or machine.get("cpu") or "an unknown machine"))


def machine_facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the known properties of the machine as names and values."""
    machine = _part(comparison.environment, "machine")
    gpu, git = _part(machine, "gpu"), _part(comparison.environment, "git")
    memory = gpu.get("memory_bytes")
    clocks = [
        clock for result in comparison.results for each in result.rounds for clock in each.clocks_mhz
    ]  # fmt: skip
    commit = git.get("commit")
    found = {
        "GPU": gpu.get("name"),
        "GPU memory": None if memory is None else f"{number(memory / _GIB, 1)} GiB",
        "driver": gpu.get("driver"),
        "GPU clocks": f"{min(clocks)} to {max(clocks)} MHz, during the runs" if clocks else None,
        "processor": machine.get("cpu"),
        "available processors": machine.get("cpus"),
        "system": machine.get("system"),
        "commit of sdonnx": f"{commit}, with changed files" if commit and git.get("changed") else commit,
    }
    return [(name, str(value)) for name, value in found.items() if value is not None]


def engine_facts(comparison: Comparison, palette: Palette) -> tuple[list[tuple[str, str]], Table | None]:
    """Return the properties that all engines share, and a table of those that differ; None if there are none."""
    found: dict[str, dict[str, str]] = {}
    for result in comparison.results:
        if result.engine:
            found.setdefault(result.rival, _properties(result.engine))
    shared: list[tuple[str, str]] = []
    rows: list[Row] = []
    for name in dict.fromkeys(name for properties in found.values() for name in properties):
        values = [properties.get(name, DASH) for properties in found.values()]
        if len(set(values)) > 1:
            rows.append(Row(name, tuple(values)))
        elif values[0] not in (DASH, _NO):
            shared.append((name, values[0]))
    return shared, Table("Settings that differ", "", palette.headings(found), tuple(rows)) if rows else None


def _properties(engine: dict[str, Any]) -> dict[str, str]:
    """Return the properties of an engine as names and values in words."""
    library = {"library": _text(engine.get("name")), "version": _text(engine.get("version"))}
    if library["library"] in _LIBRARIES:
        library["library"] = _LIBRARIES[library["library"]]
    others = {
        _HEADINGS.get(key, key.replace("_", " ")): _text(value) for key, value in engine.items() if key not in _SEPARATE
    }
    return library | others


def installed_packages(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the installed packages with their versions."""
    packages = _part(comparison.environment, "packages")
    return [(name, str(version)) for name, version in packages.items() if version is not None]


def _part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a record, or an empty dictionary (a machine without a GPU)."""
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str:
    """Return a value in words."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else _NO
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or _NO
    return str(value)
