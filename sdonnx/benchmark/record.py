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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sdonnx
from sdonnx.benchmark.engine import Engine, Workload
from sdonnx.benchmark.engines import ENGINES
from sdonnx.benchmark.measure import Measurement
from sdonnx.benchmark.memory import open_gpu
from sdonnx.errors import OutputError, ProviderError

__all__ = [
    "COLUMNS",
    "Row",
    "append_json",
    "append_row",
    "commit_of",
    "environment",
    "record_of",
    "refuse_csv",
    "refuse_json",
    "row_of",
]

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
            "folder": str(engine.folder.path),
            "family": engine.family.name,
        },
        "workload": {**dataclasses.asdict(workload), "prompts": list(prompts)},
        "measured": {
            **dataclasses.asdict(measured),
            "first_image_s": measured.first_image_s,
        },
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Return where something was measured, ready for JSON: packages, this project's commit, the machine."""
    return {
        "packages": _packages(),
        # A copy of the files without their history is told its commit.
        "git": commit_of(Path(__file__).resolve().parents[2]) or {"commit": os.environ.get("SDONNX_COMMIT")},
        "machine": _machine(),
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


def commit_of(root: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout at `root`, and whether files differ from it; None if it is none."""
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


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu(),
    }


def _cpu_name() -> str:
    """Return the processor's name; Linux tells it in /proc alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    """Return what the GPU that CUDA calls 0 is, None where there is none or NVML is not installed."""
    try:
        gpu = open_gpu()
    except ProviderError:
        return None
    import pynvml

    return {
        "name": pynvml.nvmlDeviceGetName(gpu),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
    }


def refuse_csv(path: Path) -> None:
    """Look whether a row can be appended, before minutes of measuring are spent.

    Raises:
        OutputError: the file has other columns, or cannot be read or written.
    """
    refuse_json(path)
    header = _header(path)
    if header is not None and header != COLUMNS:
        raise OutputError(
            f"{path} has the columns {', '.join(header) or 'none'}",
            ", ".join(COLUMNS),
            "choose another file with --csv, or move this one away",
        )


def append_row(path: Path, row: Row) -> None:
    """Append a row to a CSV file, after the header where the file is new or empty.

    Raises:
        OutputError: the file has other columns, or cannot be written.
    """
    refuse_csv(path)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if _header(path) is None:
        writer.writeheader()
    writer.writerow(row)
    _append(path, text.getvalue())


def refuse_json(path: Path) -> None:
    """Look whether a record can be appended, before minutes of measuring are spent.

    Raises:
        OutputError: the file cannot be written.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder", "a folder to write into", "make it first")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is no file", "a file, or a new name", "choose another name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written", "permission to write", "choose another place")


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines.

    Raises:
        OutputError: the file cannot be written.
    """
    _append(path, json.dumps(record, ensure_ascii=False) + "\n")


def _header(path: Path) -> tuple[str, ...] | None:
    """Return the columns of a CSV file, None where the file is missing or empty."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = next(csv.reader(file), None)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OutputError(f"{path} cannot be read ({error})", "a CSV file", "choose another file with --csv") from error
    return None if first is None else tuple(first)


def _append(path: Path, text: str) -> None:
    """Append lines to a file in one piece; a last line that was left without its end gets it."""
    try:
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(start + text.encode())
    except OSError as error:
        raise OutputError(
            f"writing {path} failed ({error.strerror})",
            "a place with enough free space and permission to write",
            "choose another place",
        ) from error
