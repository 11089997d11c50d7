"""The machine and the packages of a measurement, in words for a page, from the record of its environment."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from sdonnx.html.tables import number

__all__ = ["device_name", "installed_packages", "machine_facts"]

_GIB = 1024**3

_TRADEMARKS = re.compile(r"\((R|TM)\)", re.IGNORECASE)


def device_name(environment: Mapping[str, Any], *, on_gpu: bool = True) -> str:
    """Return the name of the GPU or, if there is none or it was not used, of the processor."""
    machine = _part(environment, "machine")
    name = _part(machine, "gpu").get("name") if on_gpu else None
    return _TRADEMARKS.sub("", str(name or machine.get("cpu") or "an unknown machine"))


def machine_facts(environment: Mapping[str, Any], clocks_mhz: Collection[int] = ()) -> list[tuple[str, str]]:
    """Return the known properties of the machine as names and values.

    Args:
        environment: the record.
        clocks_mhz: the clocks of the GPU during the runs.
    """
    machine, git = _part(environment, "machine"), _part(environment, "git")
    gpu, commit = _part(machine, "gpu"), git.get("commit")
    memory = gpu.get("memory_bytes")
    found = {
        "GPU": gpu.get("name"),
        "GPU memory": None if memory is None else f"{number(memory / _GIB, 1)} GiB",
        "driver": gpu.get("driver"),
        "GPU clocks": f"{min(clocks_mhz)} to {max(clocks_mhz)} MHz, during the runs" if clocks_mhz else None,
        "processor": machine.get("cpu"),
        "available processors": machine.get("cpus"),
        "system": machine.get("system"),
        "commit of sdonnx": f"{commit}, with changed files" if commit and git.get("changed") else commit,
    }
    return [(name, str(value)) for name, value in found.items() if value is not None]


def installed_packages(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the installed packages with their versions."""
    return [(name, str(version)) for name, version in _part(environment, "packages").items() if version is not None]


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a record, or an empty dictionary (a machine without a GPU)."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}
