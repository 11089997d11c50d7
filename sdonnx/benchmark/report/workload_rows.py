"""The headline and the tables of each workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdonnx.benchmark.report.html_tables import (
    DASH,
    MB,
    Column,
    Row,
    Table,
    Text,
    aligned,
    decimals_for,
    fixed,
    make_table,
    number,
    percent,
    ratio,
    whole,
)
from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.results import REFERENCE, Agreement, Comparison, Result
from sdonnx.benchmark.statistics import Summary, quantile
from sdonnx.benchmark.workload import Workload

__all__ = [
    "Headline",
    "Part",
    "RankedEngine",
    "Unit",
    "all_latencies",
    "counted",
    "make_headline",
    "make_tables",
    "memory_kinds",
    "results_by_workload",
    "trusted_results",
    "unit_for",
]


@dataclass(frozen=True)
class Unit:
    """The unit of latencies: a factor from seconds, and its name."""

    factor: float
    name: str


@dataclass(frozen=True)
class RankedEngine:
    """An engine in a headline. `ratio` is relative to the first engine's median, `length` to the slowest median."""

    name: str
    colour: str
    median: str
    ratio: str
    length: float
    is_fastest: bool


@dataclass(frozen=True)
class Headline:
    """The summary of a workload.

    Attributes:
        title: the workload.
        fastest: the engine with the lowest median.
        median: the lowest median, with its unit.
        level: engines whose middle 80 % of runs overlap those of the fastest; the difference may be chance.
        base: the engine that the ratios refer to; None if it has no result.
        rivals: the engines, in order.
        left_out: engines without a trusted result.
        counted: the number of runs and rounds.
    """

    title: str
    fastest: str
    median: str
    level: tuple[str, ...]
    base: str | None
    rivals: tuple[RankedEngine, ...]
    left_out: tuple[str, ...]
    counted: str


@dataclass(frozen=True)
class Part:
    """A workload with its tables."""

    title: str
    details: str
    tables: tuple[Table, ...]


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
    """Return seconds if all values are at least one second, else milliseconds."""
    return Unit(1.0, "s") if seconds and min(seconds) >= 1 else Unit(1e3, "ms")


def all_latencies(result: Result) -> list[float]:
    """Return the timed runs of all rounds, in seconds."""
    return [latency for each in result.rounds for latency in each.latencies_s]


def counted(results: Sequence[Result]) -> str:
    """Return the number of runs and rounds: "15 runs in 3 rounds"."""
    runs = [len(all_latencies(each)) for each in results if each.rounds]
    rounds = [len(each.rounds) for each in results if each.rounds]
    return f"{_range(runs, 'run')} in {_range(rounds, 'round')}" if runs else "nothing"


def _range(numbers: Sequence[int], noun: str) -> str:
    text = str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"
    return f"{text} {noun}{'' if set(numbers) == {1} else 's'}"


def make_headline(workload: Workload, results: Sequence[Result], palette: Palette) -> Headline | None:
    """Return the headline of a workload, or None without a trusted result."""
    rows = trusted_results(results)
    if not rows:
        return None
    fastest, best = min(rows, key=lambda row: row[1].median_s)
    slowest_s = max(summary.median_s for _, summary in rows)
    unit = unit_for([best.median_s])
    decimals = decimals_for([best.median_s * unit.factor])
    # The first engine; if it failed, no other engine replaces it.
    base = next((summary for result, summary in rows if result.rival == palette.rivals[0]), None)
    rivals = tuple(
        RankedEngine(
            result.rival,
            palette.colour(result.rival),
            f"{number(summary.median_s * unit.factor, decimals)} {unit.name}",
            DASH if base is None else ratio(summary.median_s / base.median_s),
            summary.median_s / slowest_s,
            result is fastest,
        )
        for result, summary in rows
    )
    ends_at = quantile(all_latencies(fastest), 0.9)
    level = [row for row, _ in rows if row is not fastest and quantile(all_latencies(row), 0.1) <= ends_at]
    return Headline(
        workload.title,
        fastest.rival,
        f"{number(best.median_s * unit.factor, decimals)} {unit.name}",
        tuple(row.rival for row in level),
        None if base is None else palette.rivals[0],
        rivals,
        tuple(f"{each.rival} ({_verdict(each)})" for each in results if each.failure or not each.rounds),
        counted([result for result, _ in rows]),
    )


def make_tables(workload: Workload, results: Sequence[Result], palette: Palette) -> Part:
    """Return the tables of a workload: times; memory, agreement and work."""
    rows = [_row(result, palette) for result in results]
    return Part(
        workload.title,
        _details(workload),
        (
            make_table(f"{workload.title}: times", "engine", rows, _times(results)),
            make_table(f"{workload.title}: memory, agreement and work", "engine", rows, _others(results)),
        ),
    )


def _row(result: Result, palette: Palette) -> Row:
    badges = [each for each in result.remarks if each != result.failure]
    if result.failure:
        badges.insert(0, _verdict(result))
    return Row(result.rival, (), palette.colour(result.rival), tuple(badges), result.failure)


def _verdict(result: Result) -> str:
    if not result.failure:
        return "not measured"
    return "untrusted" if result.rounds else "failed"


def _details(workload: Workload) -> str:
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


def _times(results: Sequence[Result]) -> list[Column]:
    summaries = [each.summary for each in results]
    unit = unit_for([each.median_s for each in summaries if each is not None])

    def column(group: str, name: str, value: Callable[[Summary], float | None], text: Text) -> Column:
        return Column(group, name, tuple(None if each is None else value(each) for each in summaries), text)

    medians = [None if each is None else each.median_s * unit.factor for each in summaries]
    latency = fixed(decimals_for(medians))
    stages = [each.stages for each in results]
    return [
        column(f"latency, {unit.name}", "median", lambda each: each.median_s * unit.factor, latency),
        column(f"latency, {unit.name}", "average", lambda each: each.average_s * unit.factor, latency),
        column(f"latency, {unit.name}", "min", lambda each: each.min_s * unit.factor, latency),
        column(f"latency, {unit.name}", "p90", lambda each: each.p90_s * unit.factor, latency),
        column(f"latency, {unit.name}", "p99", lambda each: each.p99_s * unit.factor, latency),
        # The spread of one run is undefined.
        column(f"latency, {unit.name}", "spread", lambda each: each.spread if each.runs > 1 else None, percent),
        Column("denoiser", "it/s", tuple(None if each is None else each.iterations_per_second for each in stages),
               aligned(3, 2)),
        Column("stages, ms", "text", tuple(None if each is None else each.text_ms for each in stages), aligned(3)),
        Column("stages, ms", "step", tuple(None if each is None else each.step_ms for each in stages), aligned(3)),
        Column("stages, ms", "decode", tuple(None if each is None else each.decode_ms for each in stages), aligned(3)),
        column("start, s", "load", lambda each: each.load_s, aligned(3, 2)),
        column("start, s", "first image", lambda each: each.first_image_s, aligned(3, 2)),
        column("start, s", "warm-up", lambda each: each.warm_up_s or None, aligned(3, 2)),
    ]  # fmt: skip


def _others(results: Sequence[Result]) -> list[Column]:
    summaries = [each.summary for each in results]

    def memory(name: str, value: Callable[[Summary], int | None]) -> Column:
        peaks = [None if each is None else value(each) for each in summaries]
        # Zero means that the memory was not measured.
        return Column("peak memory, MB", name, tuple(peak / MB if peak else None for peak in peaks), whole)

    def agreement(name: str, value: Callable[[Agreement], float | None], text: Text) -> Column:
        found = [each.agreement for each in results]
        values = tuple(None if each is None else value(each) for each in found)
        return Column(f"agreement with {REFERENCE}", name, values, text)

    return [
        memory("first run", lambda each: each.first_run_bytes),
        memory("second run", lambda each: each.second_run_bytes),
        memory("allocator", lambda each: each.allocator_bytes),
        memory("host", lambda each: each.host_peak_bytes),
        agreement("PSNR, dB", lambda each: math.inf if each.psnr_db is None else each.psnr_db, _decibels),
        agreement("SSIM", lambda each: each.ssim, fixed(4)),
        agreement("LPIPS", lambda each: each.lpips, fixed(4)),
        agreement("differing values", lambda each: each.differing, percent),
        Column("denoiser", "TFLOP per call", tuple(each.flops and each.flops / 1e12 for each in results), aligned(4)),
        Column("denoiser", "share of matrix rate", tuple(each.share_of_matrix_rate for each in results), percent),
    ]


def _decibels(values: Sequence[float | None]) -> list[str]:
    return ["identical" if value == math.inf else number(value, 1) for value in values]


def memory_kinds(comparison: Comparison) -> list[str]:
    """Return the kinds of memory that were measured, without duplicates."""
    return list(dict.fromkeys(each.memory_kind for result in comparison.results for each in result.rounds))
