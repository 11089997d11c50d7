"""Rows of the CSV file and full records for JSON, and how records are read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sdonnx.benchmark.extra_results import Kernels, LineFit, Resolution, Resolutions, Throughput
from sdonnx.benchmark.results import Agreement, Comparison, Result, Round, Stages
from sdonnx.reference.workload import Workload

__all__ = ["COLUMNS", "csv_row", "measurement_record", "read_comparison", "read_round", "result_record"]

_MB = 1024**2  # as in ONNX Runtime's benchmark.py

_Cell = Callable[[Result], Any]


def _rounded(path: str, digits: int, unit: float = 1.0) -> _Cell:
    """Return a function that returns a rounded attribute of a result, such as "stages.text_ms"; None if it is None."""

    def rounded(result: Result) -> float | None:
        found = result.value(path)
        return None if found is None else round(float(found) / unit, digits)

    return rounded


def _value(path: str) -> _Cell:
    return lambda result: result.value(path)


def _engine(name: str) -> _Cell:
    return lambda result: result.engine.get(name)


_STARTS = ("load", "pipeline_load", "first_image", "cached_first_image", "cached_pipeline_load", "warm_up")

# How each column is filled; None for columns that `csv_row` fills from the settings of the command.
_CELLS: Mapping[str, _Cell | None] = {
    "engine": _engine("name"),
    "version": None,
    "provider": lambda result: result.engine["provider"] + (" xformers" if result.engine["xformers"] else ""),
    "disable_safety_checker": lambda result: not result.engine["safety_checker"],
    **{name: _value(f"workload.{name}") for name in ("height", "width", "steps", "batch_size")},
    "batch_count": None,
    "num_prompts": None,
    **{f"{name}_latency": _rounded(f"summary.{name}_s", 6) for name in ("average", "median")},
    **{f"{name}_run_memory_MB": _rounded(f"summary.{name}_run_bytes", 1, _MB) for name in ("first", "second")},
    **{f"{name}_latency": _rounded(f"summary.{name}_s", 6) for name in ("min", "p90", "p99")},
    "spread": _rounded("summary.spread", 4),
    **{name: _rounded(f"stages.{name}", 4) for name in ("iterations_per_second", "text_ms", "step_ms", "decode_ms")},
    **{f"{name}_s": _rounded(f"summary.{name}_s", 3) for name in _STARTS},
    **{f"{name}_MB": _rounded(f"summary.{name}_bytes", 1, _MB) for name in ("allocator", "host_peak")},
    "psnr_db": _rounded("agreement.psnr_db", 2),
    **{name: _rounded(f"agreement.{name}", 6) for name in ("ssim", "lpips", "differing")},
    "tflop_per_call": _rounded("flops", 4, 1e12),
    "share_of_matrix_rate": _rounded("share_of_matrix_rate", 4),
    "precision": _engine("precision"),
    "scheduler": _engine("scheduler"),
    "rounds": lambda result: len(result.rounds),
    "gpu": None,
    "remarks": lambda result: "; ".join(result.remarks),
    "guidance_scale": _value("workload.guidance_scale"),
    "seed": _value("workload.seed"),
    "image_to_image_strength": lambda result: None if result.workload.image is None else result.workload.strength,
    "ip_adapter_scale": _value("workload.ip_adapter_scale"),
    "io_binding": _engine("io_binding"),
    "compiler_config": _engine("compiler_config"),
    "warm_ups": lambda result: len(result.rounds[0].warm_up_s),
    "denoiser_calls": _value("stages.denoiser_calls"),
    "engine_version": _engine("version"),
    "commit": None,
}

COLUMNS = tuple(_CELLS)
"""First the columns of ONNX Runtime's README for Stable Diffusion (transformers/models/stable_diffusion), then ours.
Latencies are for a batch, in seconds; 1 MB is 2**20 bytes; psnr_db is empty for identical images."""


def csv_row(result: Result, comparison: Comparison, num_prompts: int, batch_count: int) -> dict[str, Any]:
    """Return the row of a result that has rounds.

    Args:
        result: the result.
        comparison: the comparison that it is part of.
        num_prompts: number of prompts in each round.
        batch_count: timed runs of each prompt.
    """
    environment = comparison.environment
    given = {
        "version": comparison.model,
        "batch_count": batch_count,
        "num_prompts": num_prompts,
        "gpu": (environment["machine"]["gpu"] or {}).get("name"),
        "commit": environment["git"]["commit"],
    }
    return {name: given[name] if cell is None else cell(result) for name, cell in _CELLS.items()}


def result_record(
    result: Result, prompts: Sequence[str], row: Mapping[str, Any] | None, comparison: Comparison
) -> dict[str, Any]:
    """Return the full record of a result for JSON, with the information to reproduce it."""
    summary = result.summary
    return _record("pipeline", comparison) | {
        "row": row,
        "prompts": list(prompts),
        **dataclasses.asdict(result),
        "summary": None if summary is None else dataclasses.asdict(summary),
        "share_of_matrix_rate": result.share_of_matrix_rate,
        "remarks": result.remarks,
    }


def measurement_record(extra: Throughput | Resolutions | Kernels, comparison: Comparison) -> dict[str, Any]:
    """Return the record of an extra measurement for JSON."""
    return _record(type(extra).__name__.lower(), comparison) | dataclasses.asdict(extra)


def _record(benchmark: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": comparison.command,
        "environment": comparison.environment,
    }


def read_comparison(records: Iterable[Mapping[str, Any]]) -> Comparison:
    """Return the comparison of records from one machine. Records contain no images.

    The command, the environment, the model and the time are taken from the first record.

    Args:
        records: the lines of a file that `--json` wrote, at least one.

    Raises:
        ValueError: there are no records.
    """
    found = list(records)
    if not found:
        raise ValueError("no records; expected at least one")
    comparison = Comparison(
        found[0]["command"],
        found[0]["environment"],
        model=next((each["row"]["version"] for each in found if each.get("row")), ""),
        time=found[0]["time"],
    )
    for record in found:
        rival, workload = record["rival"], Workload(**record["workload"])
        match record["benchmark"]:
            case "throughput":
                points = tuple((int(steps), float(seconds)) for steps, seconds in record["points"])
                comparison.throughput.append(Throughput(rival, workload, points, LineFit(**record["line"])))
            case "resolutions":
                visited = tuple(Resolution(**size) for size in record["visited"])
                comparison.resolutions.append(Resolutions(rival, workload, visited))
            case "kernels":
                source, launches = record["source"], record["launches"]
                comparison.kernels.append(Kernels(rival, workload, record["milliseconds"], launches, source))
            case _:
                comparison.results.append(_read_result(record, workload))
    return comparison


def _read_result(record: Mapping[str, Any], workload: Workload) -> Result:
    values = {each.name: record[each.name] for each in dataclasses.fields(Result) if each.name in record}
    values |= {
        "workload": workload,
        "rounds": [read_round(each) for each in record["rounds"]],
        "stages": record["stages"] and Stages(**record["stages"]),
        "agreement": record["agreement"] and Agreement(**record["agreement"]),
    }
    return Result(**values)


def read_round(record: Mapping[str, Any]) -> Round:
    """Return a round from its fields, with lists in place of tuples."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Round(**values)
