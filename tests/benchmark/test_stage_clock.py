"""Marks around stages, with a clock whose hands the test sets."""

from __future__ import annotations

import pytest

from sdonnx.benchmark.results import Stages
from sdonnx.benchmark.stages import DECODE, STEP, TEXT, StageClock, median_of


class Hands:
    """A clock in milliseconds that moves only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = StageClock(lambda: self.now, lambda start, end: end - start)

    def work(self, milliseconds: float) -> str:
        self.now += milliseconds
        return "done"


def test_stages_of_a_run() -> None:
    hands = Hands()
    encode = hands.clock.around(TEXT, hands.work)
    assert [encode(3), encode(milliseconds=4)] == ["done", "done"]  # a prompt and what to draw away from
    for first in (100, 10, 10, 10):
        with hands.clock.span(STEP):
            hands.work(first)
        hands.work(2)  # the sampler
    with hands.clock.span(None):
        hands.work(1000)
    hands.clock.around(DECODE, hands.work)(20)
    # From the end of the first call to the end of the last: three steps of 12 ms, the slow first one left out.
    assert hands.clock.stages() == Stages(7, 12, 20, pytest.approx(1000 / 12), 4)


def test_rounds_have_a_median_for_each_stage() -> None:
    rounds = [Stages(1, 30, 5, 33, 4), Stages(2, 10, 9, 100, 4)]
    # The rate is that of the median step, not a median of rates.
    assert median_of(rounds) == Stages(1.5, 20, 7, 50, 4)
    assert median_of([*rounds, Stages(9, 12, 6, 83, 4)]) == Stages(2, 12, 6, pytest.approx(1000 / 12), 4)


def test_a_single_step() -> None:
    hands = Hands()
    with hands.clock.span(STEP):
        hands.work(8)
    assert hands.clock.stages() == Stages(0, 8, 0, 125, 1)


def test_no_step() -> None:
    assert Hands().clock.stages() == Stages(0, 0, 0, 0, 0)
