"""Measure the stages of a run: marks on the device's clock around the text encoder, each step and the decoder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sdonnx.benchmark.results import Stages
from sdonnx.models.spec import Role

__all__ = ["DECODE", "STAGES", "STEP", "TEXT", "StageClock", "host_clock", "median_stages"]

TEXT, STEP, DECODE = "text", "step", "decode"

STAGES = {
    Role.TEXT_ENCODER: TEXT,
    Role.TEXT_ENCODER_2: TEXT,
    Role.IMAGE_PROMPT_ENCODER: TEXT,
    Role.IMAGE_PROMPT_ADAPTER: TEXT,
    Role.PRECOMPUTE: TEXT,
    Role.CONTROLNET_PRECOMPUTE: TEXT,
    Role.T2I_ADAPTER: TEXT,
    Role.CONTROLNET: STEP,
    Role.DENOISER: STEP,
    Role.CONTROLLED_DENOISER: STEP,
    Role.IMAGE_DECODER: DECODE,
}
"""The stage of each component."""


def median_stages(stages: Sequence[Stages]) -> Stages:
    """Return the median of each stage over at least one round."""
    text, step, decode = (
        statistics.median(getattr(each, name) for each in stages) for name in ("text_ms", "step_ms", "decode_ms")
    )
    return Stages(text, step, decode, 1e3 / step if step else 0.0, stages[0].denoiser_calls)


class StageClock:
    """Collects the stages of one run.

    Args:
        mark: records a mark after all work that is queued.
        milliseconds: returns the time between two marks.
    """

    def __init__(self, mark: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        self._mark, self._milliseconds = mark, milliseconds
        self._spans: dict[str, list[tuple[Any, Any]]] = {TEXT: [], STEP: [], DECODE: []}

    @contextmanager
    def span(self, stage: str | None) -> Iterator[None]:
        """Measure the work that is queued within a `with` block as part of a stage; None measures nothing."""
        if stage is None:
            yield
            return
        start = self._mark()
        yield
        self._spans[stage].append((start, self._mark()))

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with each call measured."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.span(stage):
                return function(*arguments, **options)

        return call

    def stages(self) -> Stages:
        """Wait for the marks and return the stages.

        A step lasts from the end of one denoiser call to the end of the next, so that it includes the sampler and all
        other work between the calls. The first call is not counted; clocks and caches settle during it.
        """
        steps = self._spans[STEP]
        if len(steps) > 1:
            step_ms = self._milliseconds(steps[0][1], steps[-1][1]) / (len(steps) - 1)
        else:
            step_ms = self._sum(STEP)
        rate = 1e3 / step_ms if step_ms else 0.0
        return Stages(self._sum(TEXT), step_ms, self._sum(DECODE), rate, len(steps))

    def _sum(self, stage: str) -> float:
        return sum(self._milliseconds(start, end) for start, end in self._spans[stage])


def host_clock() -> StageClock:
    """Return a clock for work that the caller waits for: on a CPU, or with results on the host."""
    return StageClock(time.perf_counter, lambda start, end: (end - start) * 1e3)
