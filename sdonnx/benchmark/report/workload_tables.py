"""The tables of each workload, for the page and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.results import Comparison, Result, Summary
from sdonnx.html.tables import (
    MB,
    Heading,
    Measure,
    Table,
    Text,
    aligned,
    decimals_for,
    fixed,
    make_table,
    number,
    percent,
    whole,
)
from sdonnx.reference import REFERENCE
from sdonnx.reference.workload import Workload

__all__ = [
    "Remark",
    "WorkloadTables",
    "make_tables",
    "memory_kinds",
    "results_by_workload",
    "settings_text",
    "trusted_results",
    "unit_for",
    "verdict",
]

_MIN_SECONDS = 0.1  # three decimals then show at least three digits


@dataclass(frozen=True)
class Remark:
    """A remark on an engine's result; `is_failure` if it is the reason for which the result is missing or untrusted."""

    rival: str
    text: str
    is_failure: bool


@dataclass(frozen=True)
class WorkloadTables:
    """A workload with its tables and the remarks on its results."""

    title: str
    details: str
    tables: tuple[Table, ...]
    remarks: tuple[Remark, ...]


def results_by_workload(comparison: Comparison) -> dict[Workload, list[Result]]:
    """Return the rows by workload, in order."""
    found: dict[Workload, list[Result]] = {}
    for result in comparison.results:
        found.setdefault(result.workload, []).append(result)
    return found


def trusted_results(results: Sequence[Result]) -> list[tuple[Result, Summary]]:
    """Return the rows with a result and without a failure, with their summaries."""
    return [(each, each.summary) for each in results if not each.failure and each.summary is not None]


def unit_for(seconds: Sequence[float]) -> tuple[str, float]:
    """Return the unit of latencies in seconds: its name and its length in seconds.

    Seconds if all values are at least a tenth of a second, else milliseconds.
    """
    return ("s", 1.0) if seconds and min(seconds) >= _MIN_SECONDS else ("ms", 1e-3)


def make_tables(workload: Workload, results: Sequence[Result], palette: Palette) -> WorkloadTables:
    """Return the tables of a workload: times; memory, agreement and work."""
    headings = [
        Heading(each.rival, palette.colour(each.rival), verdict(each) if each.failure else None) for each in results
    ]
    remarks = [
        Remark(each.rival, f"{verdict(each)}: {text}" if text == each.failure else text, text == each.failure)
        for each in results
        for text in each.remarks
    ]
    tables = {"Times": _times(results), "Memory, agreement and work": _others(results)}
    return WorkloadTables(
        workload.title,
        settings_text(workload),
        tuple(make_table(caption, "", headings, measures) for caption, measures in tables.items()),
        tuple(remarks),
    )


def verdict(result: Result) -> str:
    """Return the reason for which a result is left out: failed, untrusted or not measured."""
    if not result.failure:
        return "not measured"
    return "untrusted" if result.rounds else "failed"


def settings_text(workload: Workload) -> str:
    """Return the settings that the title does not include."""
    parts = [
        f"seed {workload.seed}",
        f"guidance scale {workload.guidance_scale:g}",
        f"sampler {workload.scheduler}" if workload.scheduler else "the folder's sampler",
    ]
    if workload.negative_prompt:
        parts.append(f"negative prompt “{workload.negative_prompt}”")
    if workload.image:
        parts.append(f"from the image {workload.image} with strength {workload.strength:g}")
    return ", ".join(parts)


def _measure(results: Sequence[Result], group: str, name: str, path: str, text: Text, unit: float = 1.0) -> Measure:
    """Return the row of an attribute of the results, such as "stages.text_ms", in a unit."""
    values = (each.value(path) for each in results)
    return Measure(group, name, tuple(None if value is None else value / unit for value in values), text)


def _times(results: Sequence[Result]) -> list[Measure]:
    summaries = [each.summary for each in results]
    medians = [each.median_s for each in summaries if each is not None]
    name, unit = unit_for(medians)
    latency, short = fixed(decimals_for([median / unit for median in medians])), aligned(3, 2)
    # The spread of one run is undefined.
    spreads = tuple(each.spread if each is not None and each.runs > 1 else None for each in summaries)
    starts = (
        ("load", "load"),
        ("diffusers' load", "pipeline_load"),
        ("first image", "first_image"),
        ("first image, filled cache", "cached_first_image"),
        ("diffusers' load, filled cache", "cached_pipeline_load"),
    )
    warm_ups = tuple(None if each is None else each.warm_up_s or None for each in summaries)
    return [
        *(
            _measure(results, f"latency, {name}", each, f"summary.{each}_s", latency, unit)
            for each in ("median", "average", "min", "p90", "p99")
        ),
        Measure(f"latency, {name}", "spread", spreads, percent),
        _measure(results, "denoiser", "it/s", "stages.iterations_per_second", short),
        *(
            _measure(results, "stages, ms", each, f"stages.{each}_ms", aligned(3))
            for each in ("text", "step", "decode")
        ),
        *(_measure(results, "start, s", title, f"summary.{each}_s", short) for title, each in starts),
        Measure("start, s", "warm-up", warm_ups, short),
    ]


def _others(results: Sequence[Result]) -> list[Measure]:
    peaks = (
        ("first run", "first_run"), ("second run", "second_run"), ("allocator", "allocator"), ("host", "host_peak")
    )  # fmt: skip
    agreements = [each.agreement for each in results]
    decibels = tuple(
        None if each is None else math.inf if each.psnr_db is None else each.psnr_db for each in agreements
    )
    agreement = f"agreement with {REFERENCE}"
    return [
        *(_measure(results, "peak memory, MB", name, f"summary.{each}_bytes", _peak, MB) for name, each in peaks),
        Measure(agreement, "PSNR, dB", decibels, _decibels),
        _measure(results, agreement, "SSIM", "agreement.ssim", fixed(4)),
        _measure(results, agreement, "LPIPS", "agreement.lpips", fixed(4)),
        _measure(results, agreement, "differing values", "agreement.differing", percent),
        _measure(results, "denoiser", "TFLOP per call", "flops", aligned(4), 1e12),
        _measure(results, "denoiser", "share of matrix rate", "share_of_matrix_rate", percent),
    ]


def _peak(values: Sequence[float | None]) -> list[str]:
    """Format memory; zero means that it was not measured."""
    return whole([value or None for value in values])


def _decibels(values: Sequence[float | None]) -> list[str]:
    return ["identical" if value == math.inf else number(value, 1) for value in values]


def memory_kinds(comparison: Comparison) -> list[str]:
    """Return the kinds of memory that were measured, without duplicates."""
    return list(dict.fromkeys(each.memory_kind for result in comparison.results for each in result.rounds))
