"""The environment of a measurement: machine, engines and packages."""

from __future__ import annotations

from typing import Any

from sdonnx.benchmark.report.html_tables import DASH, Row, Table, number
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.results import Comparison

__all__ = ["device_name", "engines_table", "installed_packages", "machine_facts"]

_GIB = 1024**3

_HEADINGS = {"name": "library", "compile_mode": "compile mode"}


def device_name(comparison: Comparison) -> str:
    """Return the device's name: the GPU if an engine used it, else the processor."""
    machine = _part(comparison.environment, "machine")
    gpu = _part(machine, "gpu")
    devices = {str(result.engine.get("device", "cuda")) for result in comparison.results}
    on_gpu = "cuda" in devices or not devices
    name = gpu.get("name") if on_gpu else None
    return str(name or machine.get("cpu") or "an unknown machine")


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


def engines_table(comparison: Comparison, palette: Palette) -> Table | None:
    """Return the engines' properties, one row for each engine; None if there are none."""
    found: dict[str, dict[str, Any]] = {}
    for result in comparison.results:
        if result.engine:
            found.setdefault(result.rival, result.engine)
    keys = dict.fromkeys(key for engine in found.values() for key in engine)
    if not keys:
        return None
    rows = [
        Row(rival, tuple(_text(engine.get(key)) for key in keys), palette.colour(rival))
        for rival, engine in found.items()
    ]
    headings = tuple(_HEADINGS.get(key, key.replace("_", " ")) for key in keys)
    return Table("Engines", "engine", headings, tuple(rows))


def installed_packages(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the installed packages with their versions."""
    packages = _part(comparison.environment, "packages")
    return [(name, str(version)) for name, version in packages.items() if version is not None]


def _part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a record, or an empty dictionary (a machine without a GPU)."""
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str:
    return DASH if value is None else str(value)
