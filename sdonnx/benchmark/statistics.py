"""The benchmark's arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Line", "Summary", "fit_line", "quantile", "spread_of", "summary_of"]


class _Round(Protocol):
    @property
    def load_s(self) -> float: ...
    @property
    def warm_up_s(self) -> tuple[float, ...]: ...
    @property
    def latencies_s(self) -> tuple[float, ...]: ...
    @property
    def first_image_s(self) -> float: ...
    @property
    def first_run_bytes(self) -> int: ...
    @property
    def second_run_bytes(self) -> int: ...
    @property
    def allocator_bytes(self) -> int | None: ...
    @property
    def host_peak_bytes(self) -> int: ...


@dataclass(frozen=True)
class Summary:
    """What the rounds of an engine sum up to.

    Latencies are over the runs of all rounds. What happens once in a process is the median over the rounds, and
    memory the largest of them.

    Attributes:
        runs: how many were timed.
        average_s: mean latency; so median_s, min_s, p90_s and p99_s.
        spread: see `spread_of`.
        load_s: loading.
        first_image_s: from the start of loading to the first image.
        warm_up_s: the runs before the clock counted, together.
        first_run_bytes: the peak in the first run.
        second_run_bytes: the peak in the timed runs.
        allocator_bytes: the peak by the library's own allocator; None where it does not tell.
        host_peak_bytes: the highest resident memory.
    """

    runs: int
    average_s: float
    median_s: float
    min_s: float
    p90_s: float
    p99_s: float
    spread: float
    load_s: float
    first_image_s: float
    warm_up_s: float
    first_run_bytes: int
    second_run_bytes: int
    allocator_bytes: int | None
    host_peak_bytes: int


@dataclass(frozen=True)
class Line:
    """time = slope * steps + offset, in seconds.

    Attributes:
        slope: seconds of a step.
        offset: seconds of what is done once: text encoder, decoder, calls.
        r_squared: share of the variance that the line explains.
    """

    slope: float
    offset: float
    r_squared: float


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, by linear interpolation between neighbours."""
    return float(np.quantile(np.asarray(values, np.float64), share))


def spread_of(latencies: Sequence[float]) -> float:
    """Return (p90 - p10) / median: how far apart the middle 80 % of the runs lie. One slow run does not count."""
    return (quantile(latencies, 0.9) - quantile(latencies, 0.1)) / quantile(latencies, 0.5)


def summary_of(rounds: Sequence[_Round]) -> Summary:
    """Return what rounds sum up to; one at least, each with one timed run at least."""
    latencies = [latency for each in rounds for latency in each.latencies_s]
    allocated = [each.allocator_bytes for each in rounds if each.allocator_bytes is not None]
    return Summary(
        runs=len(latencies),
        average_s=statistics.fmean(latencies),
        median_s=statistics.median(latencies),
        min_s=min(latencies),
        p90_s=quantile(latencies, 0.9),
        p99_s=quantile(latencies, 0.99),
        spread=spread_of(latencies),
        load_s=statistics.median(each.load_s for each in rounds),
        first_image_s=statistics.median(each.first_image_s for each in rounds),
        warm_up_s=statistics.median(sum(each.warm_up_s) for each in rounds),
        first_run_bytes=max(each.first_run_bytes for each in rounds),
        second_run_bytes=max(each.second_run_bytes for each in rounds),
        allocator_bytes=max(allocated, default=None),
        host_peak_bytes=max(each.host_peak_bytes for each in rounds),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line of least squares through (steps, seconds), two different numbers of steps at least."""
    steps, seconds = np.asarray(points, np.float64).T
    slope, offset = np.polynomial.Polynomial.fit(steps, seconds, 1).convert().coef[::-1]
    residual = float(np.sum((seconds - (slope * steps + offset)) ** 2))
    total = float(np.sum((seconds - seconds.mean()) ** 2))
    return Line(float(slope), float(offset), 1.0 if total == 0 else 1 - residual / total)
