"""Convert results to rows of a CSV file and to full records for JSON, including the environment."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sdonnx._version import __version__
from sdonnx.benchmark.engine import installed_version
from sdonnx.benchmark.engines import ENGINES
from sdonnx.benchmark.extra_results import Kernels, Resolutions, Throughput
from sdonnx.benchmark.memory import open_gpu
from sdonnx.benchmark.results import Comparison, Result, plain
from sdonnx.errors import ProviderError

__all__ = ["COLUMNS", "CsvRow", "csv_row", "environment", "git_commit", "measurement_record", "result_record"]

_STARTS = (
    "load_s",
    "pipeline_load_s",
    "first_image_s",
    "cached_first_image_s",
    "cached_pipeline_load_s",
    "warm_up_s",
)

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
    "min_latency",
    "p90_latency",
    "p99_latency",
    "spread",
    "iterations_per_second",
    "text_ms",
    "step_ms",
    "decode_ms",
    *_STARTS,
    "allocator_MB",
    "host_peak_MB",
    "psnr_db",
    "ssim",
    "lpips",
    "differing",
    "tflop_per_call",
    "share_of_matrix_rate",
    "precision",
    "scheduler",
    "rounds",
    "gpu",
    "remarks",
    "guidance_scale",
    "seed",
    "image_to_image_strength",
    "ip_adapter_scale",
    "io_binding",
    "compiler_config",
    "warm_ups",
    "denoiser_calls",
    "engine_version",
    "commit",
)
"""First the columns of ONNX Runtime's README for Stable Diffusion (transformers/models/stable_diffusion), then ours.
Latencies are for a batch, in seconds; 1 MB is 2**20 bytes; psnr_db is empty for identical images."""

CsvRow = dict[str, str | int | float | bool | None]

_MB = 1024**2  # as in ONNX Runtime's benchmark.py

_PACKAGES = ("jinja2", "numpy", "rich", "scikit-image", "tokenizers", "xformers", "lpips", "triton")


def csv_row(
    result: Result, version: str, num_prompts: int, batch_count: int, surroundings: Mapping[str, Any]
) -> CsvRow:
    """Return the row of a result that has rounds.

    Args:
        result: the result.
        version: a label of the model.
        num_prompts: number of prompts in each round.
        batch_count: timed runs of each prompt.
        surroundings: the record returned by `environment`.
    """
    summary = result.summary
    assert summary is not None
    engine, workload, stages, agreement = result.engine, result.workload, result.stages, result.agreement
    ours = {
        **{f"{name}_latency": round(getattr(summary, f"{name}_s"), 6) for name in ("min", "p90", "p99")},
        "spread": round(summary.spread, 4),
        "iterations_per_second": _number(stages, "iterations_per_second", 4),
        **{name: _number(stages, name, 4) for name in ("text_ms", "step_ms", "decode_ms")},
        **{name: _number(summary, name, 3) for name in _STARTS},
        "allocator_MB": _number(summary, "allocator_bytes", 1, _MB),
        "host_peak_MB": _number(summary, "host_peak_bytes", 1, _MB),
        "psnr_db": _number(agreement, "psnr_db", 2),
        **{name: _number(agreement, name, 6) for name in ("ssim", "lpips", "differing")},
        "tflop_per_call": _number(result, "flops", 4, 1e12),
        "share_of_matrix_rate": _number(result, "share_of_matrix_rate", 4),
        "precision": engine["precision"],
        "scheduler": engine["scheduler"],
        "rounds": len(result.rounds),
        "gpu": (surroundings["machine"]["gpu"] or {}).get("name"),
        "remarks": "; ".join(result.remarks),
        "guidance_scale": workload.guidance_scale,
        "seed": workload.seed,
        "image_to_image_strength": None if workload.image is None else workload.strength,
        "ip_adapter_scale": workload.ip_adapter_scale,
        "io_binding": engine["io_binding"],
        "compiler_config": engine.get("compiler_config"),
        "warm_ups": len(result.rounds[0].warm_up_s),
        "denoiser_calls": None if stages is None else stages.denoiser_calls,
        "engine_version": engine["version"],
        "commit": surroundings["git"]["commit"],
    }
    return {
        "engine": engine["name"],
        "version": version,
        "provider": engine["provider"] + (" xformers" if engine["xformers"] else ""),
        "disable_safety_checker": not engine["safety_checker"],
        "height": workload.height,
        "width": workload.width,
        "steps": workload.steps,
        "batch_size": workload.batch_size,
        "batch_count": batch_count,
        "num_prompts": num_prompts,
        "average_latency": round(summary.average_s, 6),
        "median_latency": round(summary.median_s, 6),
        "first_run_memory_MB": round(summary.first_run_bytes / _MB, 1),
        "second_run_memory_MB": round(summary.second_run_bytes / _MB, 1),
    } | ours


def _number(holder: object, name: str, digits: int, unit: float = 1.0) -> float | None:
    """Return a rounded attribute, or None if it or its holder is None."""
    value = getattr(holder, name, None)
    return None if value is None else round(float(value) / unit, digits)


def result_record(result: Result, prompts: Sequence[str], row: CsvRow | None, comparison: Comparison) -> dict[str, Any]:
    """Return the full record of a result for JSON, with the information to reproduce it."""
    return _record("pipeline", comparison) | {
        "row": row,
        "prompts": list(prompts),
        **plain(result),
        "summary": plain(result.summary),
        "share_of_matrix_rate": result.share_of_matrix_rate,
        "remarks": result.remarks,
    }


def measurement_record(extra: Throughput | Resolutions | Kernels, comparison: Comparison) -> dict[str, Any]:
    """Return the record of an extra measurement for JSON."""
    return {**_record(type(extra).__name__.lower(), comparison), **plain(extra)}


def _record(benchmark: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": comparison.command,
        "environment": comparison.environment,
    }


_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Return the environment of a measurement for JSON: packages, this project's commit, the machine."""
    return {
        "packages": _packages(),
        # SDONNX_COMMIT sets the commit for copies of the files without this repository's history.
        "git": {"commit": surroundings} if (surroundings := os.environ.get("SDONNX_COMMIT")) else git_commit(_ROOT),
        "machine": _machine(),
    }


def _packages() -> dict[str, str | None]:
    """Return versions by distribution, None for packages that are not installed."""
    names = {name for engine in ENGINES.values() for group in engine.distributions for name in group}
    versions: dict[str, str | None] = {"python": platform.python_version(), "sdonnx": __version__}
    return versions | {name: installed_version(name) for name in sorted(names | set(_PACKAGES))}


def git_commit(root: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout at `root`, and whether files differ from it; None without a checkout."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        # Without optional locks, reading the status cannot interfere with a concurrent commit.
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
    """Return the processor's name; on Linux it is only in /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    """Return the properties of CUDA device 0, or None if there is no GPU or NVML is not installed."""
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
