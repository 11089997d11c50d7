"""What is kept of a measurement: a row of a CSV file, and a record with everything beside it."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sdonnx
from sdonnx.benchmark.engines import ENGINES, Engine, Workload
from sdonnx.benchmark.measure import Measurement, open_gpu
from sdonnx.errors import OutputError

__all__ = ["COLUMNS", "Row", "append_json", "append_row", "record_of", "refuse_csv", "refuse_json", "row_of"]

COLUMNS = (
    "engine",
    "version",
    "provider",
    "disable_safety_checker",
    "height",
    "width",
    "steps",
    "batch_size",
    "batch_count",
    "num_prompts",
    "average_latency",
    "median_latency",
    "first_run_memory_MB",
    "second_run_memory_MB",
)
"""The table of ONNX Runtime's README for Stable Diffusion (transformers/models/stable_diffusion)."""

Row = dict[str, str | int | float | bool]

_MB = 1024**2  # as in ONNX Runtime's benchmark.py

_PACKAGES = ("numpy", "rich", "tokenizers")


def row_of(
    engine: Engine,
    version: str,
    workload: Workload,
    num_prompts: int,
    batch_count: int,
    measured: Measurement,
) -> Row:
    """Return the row of a measurement: latencies of a batch in seconds, memory in units of 2**20 bytes."""
    values = (
        engine.name,
        version,
        engine.provider,
        True,
        workload.height,
        workload.width,
        workload.steps,
        workload.batch_size,
        batch_count,
        num_prompts,
        round(measured.average_s, 6),
        round(measured.median_s, 6),
        round(measured.first_run_bytes / _MB, 1),
        round(measured.second_run_bytes / _MB, 1),
    )
    return dict(zip(COLUMNS, values, strict=True))


def record_of(
    engine: Engine, workload: Workload, prompts: Sequence[str], row: Row, measured: Measurement
) -> dict[str, Any]:
    """Return everything that a reader needs to judge the row and to repeat it, ready for JSON."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "row": row,
        "engine": {
            "name": engine.name,
            "version": engine.version,
            "device": engine.device,
            "precision": engine.precision,
            "compile_mode": engine.options.compile_mode,
            "scheduler": engine.scheduler,
            "folder": str(engine.folder.path.resolve()),
            "family": engine.family.name,
        },
        "workload": {**dataclasses.asdict(workload), "prompts": list(prompts)},
        "measured": {
            **dataclasses.asdict(measured),
            "first_image_s": measured.first_image_s,
        },
        "packages": _packages(),
        "git": _checkout(),
        "machine": _machine(engine.device),
    }


def _packages() -> dict[str, str | None]:
    """Return versions by distribution, None for what is not installed."""
    names = {name for engine in ENGINES.values() for group in engine.distributions for name in group}
    versions: dict[str, str | None] = {"python": platform.python_version(), "sdonnx": sdonnx.__version__}
    for name in sorted(names | set(_PACKAGES)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _checkout() -> dict[str, Any] | None:
    """Return the commit that this package lies at, and whether files differ from it; None if nowhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        # Without its locks a look at the status cannot get in the way of someone who commits.
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine(device: str) -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu() if device == "cuda" else None,
    }


def _cpu_name() -> str:
    """Return the processor's name; Linux tells it in /proc alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any]:
    import pynvml

    gpu = open_gpu()
    return {
        "name": pynvml.nvmlDeviceGetName(gpu),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
    }


def refuse_csv(path: Path) -> None:
    """Raise OutputError where a row cannot be appended: look before minutes of measuring are spent.

    Raises:
        OutputError: the file has other columns, or cannot be read or written.
    """
    _refuse_unwritable(path)
    content = _read(path)
    if not content.strip():
        return
    header = next(csv.reader(io.StringIO(content, newline="")), [])
    if tuple(header) != COLUMNS:
        raise OutputError(
            f"{path} has the columns {', '.join(header)}",
            f"{', '.join(COLUMNS)}",
            "choose another file with --csv, or move this one away",
        )


def append_row(path: Path, row: Row) -> None:
    """Append a row to a CSV file, after the header where the file is new or empty.

    Raises:
        OutputError: the file has other columns, or cannot be written.
    """
    refuse_csv(path)
    content = _read(path)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not content.strip():
        writer.writeheader()
    writer.writerow(row)
    _append(path, content, text.getvalue())


def refuse_json(path: Path) -> None:
    """Raise OutputError where a record cannot be appended."""
    _refuse_unwritable(path)


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines.

    Raises:
        OutputError: the file cannot be written.
    """
    _append(path, _read(path), json.dumps(record, ensure_ascii=False) + "\n")


def _refuse_unwritable(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder", "a folder to write into", "make it first")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is no file", "a file, or a new name", "choose another name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written", "permission to write", "choose another place")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} cannot be read ({error})", "a text file", "choose another file") from error


def _append(path: Path, before: str, text: str) -> None:
    """Append lines to a file in one piece; a last line that was left without its end gets it."""
    start = "\n" if before and not before.endswith("\n") else ""
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(start + text)
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a place with enough free space and permission to write",
            "choose another place",
        ) from error
