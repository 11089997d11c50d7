"""The tables of each workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdonnx.benchmark.report.html_tables import (
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
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.results import REFERENCE, Agreement, Comparison, Result
from sdonnx.benchmark.statistics import Summary
from sdonnx.benchmark.workload import Workload

__all__ = [
    "Part",
    "Remark",
    "Unit",
    "all_latencies",
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
class Unit:
    """The unit of latencies: a factor from seconds, and its name."""

    factor: float
    name: str


@dataclass(frozen=True)
class Remark:
    """A remark on an engine's result; `is_failure` if it is the reason for which the result is missing or untrusted."""

    rival: str
    text: str
    is_failure: bool


@dataclass(frozen=True)
class Part:
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


def unit_for(seconds: Sequence[float]) -> Unit:
    """Return seconds if all values are at least a tenth of a second, else milliseconds."""
    return Unit(1.0, "s") if seconds and min(seconds) >= _MIN_SECONDS else Unit(1e3, "ms")


def all_latencies(result: Result) -> list[float]:
    """Return the timed runs of all rounds, in seconds."""
    return [latency for each in result.rounds for latency in each.latencies_s]


def make_tables(workload: Workload, results: Sequence[Result], palette: Palette) -> Part:
    """Return the tables of a workload: times; memory, agreement and work."""
    headings = [
        Heading(each.rival, palette.colour(each.rival), verdict(each) if each.failure else None) for each in results
    ]
    remarks = [
        Remark(each.rival, f"{verdict(each)}: {text}" if text == each.failure else text, text == each.failure)
        for each in results
        for text in each.remarks
    ]
    return Part(
        workload.title,
        settings_text(workload),
        (
            make_table("Times", "", headings, _times(results)),
            make_table("Memory, agreement and work", "", headings, _others(results)),
        ),
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


def _times(results: Sequence[Result]) -> list[Measure]:
    summaries = [each.summary for each in results]
    unit = unit_for([each.median_s for each in summaries if each is not None])

    def measure(group: str, name: str, value: Callable[[Summary], float | None], text: Text) -> Measure:
        return Measure(group, name, tuple(None if each is None else value(each) for each in summaries), text)

    medians = [None if each is None else each.median_s * unit.factor for each in summaries]
    latency = fixed(decimals_for(medians))
    stages = [each.stages for each in results]
    return [
        measure(f"latency, {unit.name}", "median", lambda each: each.median_s * unit.factor, latency),
        measure(f"latency, {unit.name}", "average", lambda each: each.average_s * unit.factor, latency),
        measure(f"latency, {unit.name}", "min", lambda each: each.min_s * unit.factor, latency),
        measure(f"latency, {unit.name}", "p90", lambda each: each.p90_s * unit.factor, latency),
        measure(f"latency, {unit.name}", "p99", lambda each: each.p99_s * unit.factor, latency),
        # The spread of one run is undefined.
        measure(f"latency, {unit.name}", "spread", lambda each: each.spread if each.runs > 1 else None, percent),
        Measure("denoiser", "it/s", tuple(None if each is None else each.iterations_per_second for each in stages),
               aligned(3, 2)),
        Measure("stages, ms", "text", tuple(None if each is None else each.text_ms for each in stages), aligned(3)),
        Measure("stages, ms", "step", tuple(None if each is None else each.step_ms for each in stages), aligned(3)),
        Measure("stages, ms", "decode", tuple(None if each is None else each.decode_ms for each in stages), aligned(3)),
        measure("start, s", "load", lambda each: each.load_s, aligned(3, 2)),
        measure("start, s", "diffusers' load", lambda each: each.pipeline_load_s, aligned(3, 2)),
        measure("start, s", "first image", lambda each: each.first_image_s, aligned(3, 2)),
        measure("start, s", "first image, filled cache", lambda each: each.cached_first_image_s, aligned(3, 2)),
        measure("start, s", "diffusers' load, filled cache", lambda each: each.cached_pipeline_load_s, aligned(3, 2)),
        measure("start, s", "warm-up", lambda each: each.warm_up_s or None, aligned(3, 2)),
    ]  # fmt: skip


def _others(results: Sequence[Result]) -> list[Measure]:
    summaries = [each.summary for each in results]

    def memory(name: str, value: Callable[[Summary], int | None]) -> Measure:
        peaks = [None if each is None else value(each) for each in summaries]
        # Zero means that the memory was not measured.
        return Measure("peak memory, MB", name, tuple(peak / MB if peak else None for peak in peaks), whole)

    def agreement(name: str, value: Callable[[Agreement], float | None], text: Text) -> Measure:
        found = [each.agreement for each in results]
        values = tuple(None if each is None else value(each) for each in found)
        return Measure(f"agreement with {REFERENCE}", name, values, text)

    return [
        memory("first run", lambda each: each.first_run_bytes),
        memory("second run", lambda each: each.second_run_bytes),
        memory("allocator", lambda each: each.allocator_bytes),
        memory("host", lambda each: each.host_peak_bytes),
        agreement("PSNR, dB", lambda each: math.inf if each.psnr_db is None else each.psnr_db, _decibels),
        agreement("SSIM", lambda each: each.ssim, fixed(4)),
        agreement("LPIPS", lambda each: each.lpips, fixed(4)),
        agreement("differing values", lambda each: each.differing, percent),
        Measure("denoiser", "TFLOP per call", tuple(each.flops and each.flops / 1e12 for each in results), aligned(4)),
        Measure("denoiser", "share of matrix rate", tuple(each.share_of_matrix_rate for each in results), percent),
    ]


def _decibels(values: Sequence[float | None]) -> list[str]:
    return ["identical" if value == math.inf else number(value, 1) for value in values]


def memory_kinds(comparison: Comparison) -> list[str]:
    """Return the kinds of memory that were measured, without duplicates."""
    return list(dict.fromkeys(each.memory_kind for result in comparison.results for each in result.rounds))
