"""Statistics of latencies: quantiles, spread, summaries over rounds, and line fits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["LineFit", "Summary", "fit_line", "quantile", "relative_spread", "summarize"]


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
    @property
    def cached(self) -> bool: ...
    @property
    def pipeline_load_s(self) -> float | None: ...


@dataclass(frozen=True)
class Summary:
    """Statistics over the rounds of an engine.

    Latencies are over the runs of all rounds. For values that occur once in a process it is the median over the
    rounds, and for memory the maximum. `load_s`, `pipeline_load_s`, `first_image_s` and `warm_up_s` come from
    the rounds that start with empty caches.

    Attributes:
        runs: number of timed runs.
        average_s: mean latency; median_s, min_s, p90_s and p99_s are the other statistics.
        spread: see `relative_spread`.
        load_s: time to load.
        pipeline_load_s: the part of it in which diffusers' pipeline was loaded; None for engines of graphs.
        first_image_s: time from the start of loading to the first image.
        cached_first_image_s: time from the start of loading to the first image with filled caches; None if it was not
            measured.
        cached_pipeline_load_s: the part of it in which diffusers' pipeline was loaded.
        warm_up_s: total time of the warm-up runs.
        first_run_bytes: peak memory in the first run.
        second_run_bytes: peak memory in the run after the timed ones.
        allocator_bytes: peak memory of the library's allocator; None if unknown.
        host_peak_bytes: peak resident memory.
    """

    runs: int
    average_s: float
    median_s: float
    min_s: float
    p90_s: float
    p99_s: float
    spread: float
    load_s: float
    pipeline_load_s: float | None
    first_image_s: float
    cached_first_image_s: float | None
    cached_pipeline_load_s: float | None
    warm_up_s: float
    first_run_bytes: int
    second_run_bytes: int
    allocator_bytes: int | None
    host_peak_bytes: int


@dataclass(frozen=True)
class LineFit:
    """time = slope * steps + offset, in seconds.

    Attributes:
        slope: seconds per step.
        offset: seconds of the work that does not depend on the steps: text encoder, decoder, overhead.
        r_squared: share of the variance that the line explains.
    """

    slope: float
    offset: float
    r_squared: float


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of the values, with linear interpolation."""
    return float(np.quantile(np.asarray(values, np.float64), share))


def relative_spread(latencies: Sequence[float]) -> float:
    """Return (p90 - p10) / median, the relative range of the middle 80 % of the runs. Ignores single slow runs."""
    return (quantile(latencies, 0.9) - quantile(latencies, 0.1)) / quantile(latencies, 0.5)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summarize(
    rounds: Sequence[_Round], cached_start_s: float | None = None, cached_pipeline_load_s: float | None = None
) -> Summary:
    """Return statistics over rounds.

    Args:
        rounds: at least one round that starts with empty caches; each has at least one timed run.
        cached_start_s: time to the first image with filled caches, if no round started with them.
        cached_pipeline_load_s: the part of it in which diffusers' pipeline was loaded.
    """
    latencies = [latency for each in rounds for latency in each.latencies_s]
    allocated = [each.allocator_bytes for each in rounds if each.allocator_bytes is not None]
    fresh = [each for each in rounds if not each.cached]
    cached = [each for each in rounds if each.cached]
    if cached:
        cached_start_s = statistics.median(each.first_image_s for each in cached)
        cached_pipeline_load_s = _median(each.pipeline_load_s for each in cached)
    return Summary(
        runs=len(latencies),
        average_s=statistics.fmean(latencies),
        median_s=statistics.median(latencies),
        min_s=min(latencies),
        p90_s=quantile(latencies, 0.9),
        p99_s=quantile(latencies, 0.99),
        spread=relative_spread(latencies),
        load_s=statistics.median(each.load_s for each in fresh),
        pipeline_load_s=_median(each.pipeline_load_s for each in fresh),
        first_image_s=statistics.median(each.first_image_s for each in fresh),
        cached_first_image_s=cached_start_s,
        cached_pipeline_load_s=cached_pipeline_load_s,
        warm_up_s=statistics.median(sum(each.warm_up_s) for each in fresh),
        first_run_bytes=max(each.first_run_bytes for each in rounds),
        second_run_bytes=max(each.second_run_bytes for each in rounds),
        allocator_bytes=max(allocated, default=None),
        host_peak_bytes=max(each.host_peak_bytes for each in rounds),
    )


def fit_line(points: Sequence[tuple[float, float]]) -> LineFit:
    """Return the least-squares line through (steps, seconds), for at least two different step counts."""
    steps, seconds = np.asarray(points, np.float64).T
    slope, offset = np.polynomial.Polynomial.fit(steps, seconds, 1).convert().coef[::-1]
    residual = float(np.sum((seconds - (slope * steps + offset)) ** 2))
    total = float(np.sum((seconds - seconds.mean()) ** 2))
    return LineFit(float(slope), float(offset), 1.0 if total == 0 else 1 - residual / total)
