"""The result of each workload in a sentence, and its engines in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdonnx.benchmark.report.palette import Palette
from sdonnx.benchmark.report.workload_tables import trusted_results, unit_for, verdict
from sdonnx.benchmark.results import OURS, Result, Summary, quantile
from sdonnx.html.tables import DASH, decimals_for, number, ratio
from sdonnx.reference.workload import Workload

__all__ = ["Headline", "RankedEngine", "make_headline"]

_MIN_RATIO = 1.005  # below it, the ratio would be shown as 1.00


@dataclass(frozen=True)
class RankedEngine:
    """An engine in a headline. `ratio` is relative to the base's median, `length` to the slowest median."""

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
        sentence: the result in one sentence.
        level: the fastest engines, if they are too close to call; otherwise empty.
        base: the engine that the ratios refer to; None if it has no result.
        rivals: the engines, in order.
        left_out: engines without a trusted result.
        counted: the number of runs and rounds.
    """

    title: str
    sentence: str
    level: tuple[str, ...]
    base: str | None
    rivals: tuple[RankedEngine, ...]
    left_out: tuple[str, ...]
    counted: str


def make_headline(workload: Workload, results: Sequence[Result], palette: Palette) -> Headline | None:
    """Return the headline of a workload, or None without a trusted result."""
    rows = trusted_results(results)
    if not rows:
        return None
    fastest = min(rows, key=lambda row: row[1].median_s)
    slowest_s = max(summary.median_s for _, summary in rows)
    # The first engine; if it failed, no other engine replaces it.
    base = next((summary for result, summary in rows if result.rival == palette.rivals[0]), None)
    others = [row for row in rows if row is not fastest and _are_level(row, fastest)]
    level = tuple(result.rival for result, _ in (fastest, *others)) if others else ()
    times = _times([summary.median_s for _, summary in rows])
    rivals = tuple(
        RankedEngine(
            result.rival,
            palette.colour(result.rival),
            text,
            DASH if base is None else ratio(summary.median_s / base.median_s),
            summary.median_s / slowest_s,
            result is fastest[0] and not level,
        )
        for (result, summary), text in zip(rows, times, strict=True)
    )
    return Headline(
        workload.title,
        _sentence(workload, rows),
        level,
        None if base is None else palette.rivals[0],
        rivals,
        tuple(f"{each.rival} ({verdict(each)})" for each in results if each.failure or not each.rounds),
        _counted([result for result, _ in rows]),
    )


Measured = tuple[Result, Summary]


def _sentence(workload: Workload, rows: Sequence[Measured]) -> str:
    """Return the result of this project against the fastest other engine, or of the two fastest engines."""
    ranked = sorted(rows, key=lambda row: row[1].median_s)
    ours = next((row for row in ranked if row[0].rival == OURS), ranked[0])
    images = "an image" if workload.batch_size == 1 else f"{workload.batch_size} images"
    rival = next((row for row in ranked if row is not ours), None)
    if rival is None:
        return f"{ours[0].rival} generates {images} in {_times([ours[1].median_s])[0]}."
    if _are_level(ours, rival):
        one, other = _times([ours[1].median_s, rival[1].median_s])
        return (
            f"{ours[0].rival} and {rival[0].rival} are too close to call: they generate {images} in {one} and {other}."
        )
    fast, slow = (ours, rival) if ours[1].median_s < rival[1].median_s else (rival, ours)
    times = ratio(slow[1].median_s / fast[1].median_s)
    seconds = _times([fast[1].median_s])[0]
    return f"{fast[0].rival} generates {images} in {seconds}, {times} times as fast as {slow[0].rival}."


def _are_level(one: Measured, other: Measured) -> bool:
    """Return whether the middle 80 % of the runs overlap, or the medians hardly differ: it may be chance."""
    fast, slow = sorted((one, other), key=lambda row: row[1].median_s)
    if slow[1].median_s < _MIN_RATIO * fast[1].median_s:
        return True
    return quantile(slow[0].latencies_s, 0.1) <= quantile(fast[0].latencies_s, 0.9)


def _times(seconds: Sequence[float]) -> list[str]:
    """Format latencies with one unit."""
    name, unit = unit_for(seconds)
    values = [value / unit for value in seconds]
    decimals = decimals_for(values)
    return [f"{number(value, decimals)} {name}" for value in values]


def _counted(results: Sequence[Result]) -> str:
    """Return the number of runs and rounds: "15 runs in 3 rounds"."""
    runs = [len(each.latencies_s) for each in results if each.rounds]
    rounds = [len(each.rounds) for each in results if each.rounds]
    return f"{_range(runs, 'run')} in {_range(rounds, 'round')}"


def _range(numbers: Sequence[int], noun: str) -> str:
    text = str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"
    return f"{text} {noun}{'' if set(numbers) == {1} else 's'}"
