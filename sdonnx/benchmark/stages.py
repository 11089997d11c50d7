"""Where the time of a run goes: marks on the device's clock around the text encoder, each step and the decoder."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sdonnx.benchmark.results import Stages
from sdonnx.families import Role

__all__ = ["DECODE", "STAGES", "STEP", "TEXT", "StageClock", "median_of"]

TEXT, STEP, DECODE = "text", "step", "decode"

STAGES = {
    Role.TEXT_ENCODER: TEXT,
    Role.TEXT_ENCODER_2: TEXT,
    Role.IMAGE_PROMPT_ENCODER: TEXT,
    Role.IMAGE_PROMPT_ADAPTER: TEXT,
    Role.CONDITIONS: TEXT,
    Role.DENOISER: STEP,
    Role.IMAGE_DECODER: DECODE,
}
"""What a component's run is a part of."""


def median_of(stages: Sequence[Stages]) -> Stages:
    """Return the median of each stage over rounds, one at least."""
    text, step, decode = (
        statistics.median(getattr(each, name) for each in stages) for name in ("text_ms", "step_ms", "decode_ms")
    )
    return Stages(text, step, decode, 1e3 / step if step else 0.0, stages[0].denoiser_calls)


class StageClock:
    """Collects the stages of one run.

    Args:
        mark: makes a mark after everything that is queued by now.
        milliseconds: returns the time between two marks.
    """

    def __init__(self, mark: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        self._mark, self._milliseconds = mark, milliseconds
        self._spans: dict[str, list[tuple[Any, Any]]] = {TEXT: [], STEP: [], DECODE: []}

    @contextmanager
    def span(self, stage: str | None) -> Iterator[None]:
        """Collect what is queued within as a part of a stage; None for what is no stage."""
        if stage is None:
            yield
            return
        start = self._mark()
        yield
        self._spans[stage].append((start, self._mark()))

    def around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with each call collected."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.span(stage):
                return function(*arguments, **options)

        return call

    def stages(self) -> Stages:
        """Wait for the marks and return the stages.

        A step lasts from the end of one denoiser call to the end of the next, so that the sampler and what else
        happens between the calls counts; the first call, after which clocks and caches have settled, does not.
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
