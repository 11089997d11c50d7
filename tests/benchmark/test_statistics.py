"""Statistics with results computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdonnx.benchmark.extra_results import fit_line
from sdonnx.benchmark.results import LARGE_SPREAD, Result, Round, Stages, quantile, summarize
from sdonnx.reference.workload import Workload

FIRST = Round(1.0, (9.0, 8.0), (1.0, 2.0, 6.0), (70, 90, 50), "known", 30, 100)
SECOND = Round(3.0, (5.0, 2.0), (3.0, 4.0, 2.0), (60, 20, 55), "known", 35, 90)


def test_quantiles_are_interpolated() -> None:
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 0.9, 1)] == pytest.approx([1, 2, 3, 4.6, 5])
    # 100 values have 99 steps: 1 + 0.99 * 99.
    assert quantile(list(range(1, 101)), 0.99) == pytest.approx(99.01)
    assert quantile([7.0], 0.9) == 7


def spread(latencies: Sequence[float]) -> float:
    return summarize([replace(FIRST, latencies_s=tuple(latencies))]).spread


def test_spread_covers_the_middle_eighty_percent() -> None:
    assert spread([1.0] * 10) == 0
    # p10 = 1.4, p90 = 4.6, median 3, in any unit.
    assert spread([1, 2, 3, 4, 5]) == spread([1e3, 2e3, 3e3, 4e3, 5e3]) == pytest.approx(3.2 / 3)
    # One slow run of twenty has no effect.
    assert spread([1.0] * 19 + [50.0]) == 0


def test_round_properties() -> None:
    assert FIRST.first_image_s == 10
    assert (FIRST.first_run_bytes, FIRST.second_run_bytes) == (70, 50)
    skipped = Round(1.0, (), (2.0, 3.0), (70, 60), "known")
    assert (skipped.first_image_s, skipped.first_run_bytes, skipped.second_run_bytes) == (3, 70, 60)


def test_summary_keeps_starts_with_filled_caches_apart() -> None:
    rounds = [
        replace(FIRST, pipeline_load_s=0.75),
        replace(SECOND, cached=True, pipeline_load_s=0.5),
        replace(FIRST, load_s=2.0, cached=True, pipeline_load_s=0.25),
    ]
    summary = summarize(rounds, 7, 3)
    assert (summary.load_s, summary.first_image_s, summary.warm_up_s) == (1, 10, 17)
    # The first images of the others are after 8 and 11 s; a process that only starts is not needed.
    assert summary.cached_first_image_s == 9.5
    assert (summary.pipeline_load_s, summary.cached_pipeline_load_s) == (0.75, 0.375)
    assert summary.runs == 9
    summary = summarize([FIRST], 7, 3)
    assert (summary.cached_first_image_s, summary.pipeline_load_s, summary.cached_pipeline_load_s) == (7, None, 3)


def test_summary_of_two_rounds() -> None:
    summary = summarize([FIRST, SECOND])
    # Runs of both rounds: 1, 2, 2, 3, 4, 6.
    assert summary.runs == 6
    assert (summary.average_s, summary.median_s, summary.min_s) == (3, 2.5, 1)
    assert (summary.p90_s, summary.p99_s) == pytest.approx((5, 5.9))
    assert summary.spread == pytest.approx((5 - 1.5) / 2.5)
    # Values that occur once in a process: medians of (1, 3), (10, 8) and (17, 7).
    assert (summary.load_s, summary.first_image_s, summary.warm_up_s) == (2, 9, 12)
    assert summary.cached_first_image_s is None
    # Memory: the maximum.
    assert (summary.first_run_bytes, summary.second_run_bytes) == (70, 55)
    assert (summary.allocator_bytes, summary.host_peak_bytes) == (35, 100)


def test_unknown_allocator_memory() -> None:
    assert summarize([Round(1.0, (), (1.0,), (1,), "known")]).allocator_bytes is None


def test_fit_line_of_exact_points() -> None:
    line = fit_line([(5, 0.7), (10, 1.2), (20, 2.2)])
    assert (line.slope, line.offset, line.r_squared) == pytest.approx((0.1, 0.2, 1))


def test_fit_line_minimizes_squares() -> None:
    # By hand: means 2 and 7/3; slope = sum((x-2)(y-7/3)) / 2 = 3/2; offset = 7/3 - 3; residuals 1/6, -1/3, 1/6.
    line = fit_line([(1, 1), (2, 2), (3, 4)])
    assert (line.slope, line.offset) == pytest.approx((1.5, -2 / 3))
    assert line.r_squared == pytest.approx(1 - (1 / 36 + 4 / 36 + 1 / 36) / (14 / 3))


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.floats(0.01, 10)), min_size=3, max_size=20, unique_by=lambda each: each[0]
    )
)
def test_fit_line_matches_polyfit(points: list[tuple[int, float]]) -> None:
    line = fit_line(points)
    slope, offset = np.polyfit([steps for steps, _ in points], [seconds for _, seconds in points], 1)
    assert (line.slope, line.offset) == pytest.approx((slope, offset), rel=1e-6, abs=1e-8)


def test_share_of_the_matrix_rate() -> None:
    stages = Stages(text_ms=1, step_ms=20, decode_ms=5, iterations_per_second=50, denoiser_calls=10)
    # 0.8 TFLOP in 20 ms are 40 TFLOP/s, of 100.
    result = Result("known", Workload(), stages=stages, flops=0.8e12, matrix_rate=100e12)
    assert result.share_of_matrix_rate == pytest.approx(0.4)
    assert Result("known", Workload(), stages=stages, flops=0.8e12).share_of_matrix_rate is None
    assert Result("known", Workload(), flops=0.8e12, matrix_rate=1e12).share_of_matrix_rate is None


@pytest.mark.parametrize(("slow", "remarks"), [(1.05, []), (1.5, ["spread of 50%"])])
def test_remark_on_a_large_spread(slow: float, remarks: list[str]) -> None:
    result = Result("known", Workload(), rounds=[Round(1.0, (), (1.0, 1.0, 1.0, slow, slow), (1,) * 5, "known")])
    assert result.remarks == remarks
    assert LARGE_SPREAD == 0.1


def test_remarks_on_failures() -> None:
    result = Result("known", Workload(), failure="black", unchecked="no memory", unstaged="no clock")
    assert result.remarks == ["black", "images not compared: no memory", "stages not measured: no clock"]


@pytest.mark.parametrize(
    ("second", "remarks"), [(58.0, []), (21.0, ["first image after 22.0 to 59.0 s, depending on the round"])]
)
def test_remark_on_different_start_times(second: float, remarks: list[str]) -> None:
    """Start times differ, for example, if a compiler reuses files of the previous round."""
    rounds = [Round(1.0, (first,), (1.0,), (1, 1), "known") for first in (58.0, second)]
    assert Result("known", Workload(), rounds=rounds).remarks == remarks
    quick = [Round(0.2, (first,), (1.0,), (1, 1), "known") for first in (0.5, 1.2)]
    assert Result("known", Workload(), rounds=quick).remarks == []
