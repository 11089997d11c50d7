"""Stages measured with a simulated clock."""

from __future__ import annotations

from typing import cast

import pytest

from sdonnx.benchmark.operator_times import DECODE, STEP, TEXT, StageClock, median_stages
from sdonnx.benchmark.results import Stages


class Hands:
    """A clock in milliseconds that advances only in `work`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = StageClock(lambda: self.now, lambda start, end: end - start)

    def work(self, milliseconds: float) -> str:
        self.now += milliseconds
        return "done"


def test_stages_of_a_run() -> None:
    hands = Hands()
    encode = hands.clock.around(TEXT, hands.work)
    assert [encode(3), encode(milliseconds=4)] == ["done", "done"]  # the prompt and the negative prompt
    for first in (100, 10, 10, 10):
        with hands.clock.span(STEP):
            hands.work(first)
        hands.work(2)  # the sampler
    with hands.clock.span(None):
        hands.work(1000)
    hands.clock.around(DECODE, hands.work)(20)
    # From the end of the first call to the end of the last: three steps of 12 ms, without the slow first call.
    assert hands.clock.stages() == Stages(7, 12, 20, cast(float, pytest.approx(1000 / 12)), 4)


def test_median_stages() -> None:
    rounds = [Stages(1, 30, 5, 33, 4), Stages(2, 10, 9, 100, 4)]
    # The rate is the median step's, not the median of the rates.
    assert median_stages(rounds) == Stages(1.5, 20, 7, 50, 4)
    assert median_stages([*rounds, Stages(9, 12, 6, 83, 4)]) == Stages(
        2, 12, 6, cast(float, pytest.approx(1000 / 12)), 4
    )


def test_a_single_step() -> None:
    hands = Hands()
    with hands.clock.span(STEP):
        hands.work(8)
    assert hands.clock.stages() == Stages(0, 8, 0, 125, 1)


def test_no_step() -> None:
    assert Hands().clock.stages() == Stages(0, 0, 0, 0, 0)
