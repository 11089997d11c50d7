"""Captures after the start: single images are ready first, and larger batches follow without delaying requests much."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serve_load import CAPTIONS
from support.serving import Recorder, until

from sdonnx import AsyncPipeline, OrtDiffusionPipeline, ServeLimits
from sdonnx.errors import DeviceMemoryError, UnavailableError
from sdonnx.serve.image_service import ServeObserver
from sdonnx.serve.later_captures import LaterCapture, LaterCaptures

LIMITS = ServeLimits(batch_wait_ms=50)
TIMEOUT_S = 60


class Gate:
    """Holds each capture of a larger batch until it is opened.

    Attributes:
        errors: exceptions to raise instead of captures, by batch size.
        begun: batch sizes of the captures that have begun.
    """

    def __init__(self, pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[int, Exception] = {}
        self.begun: list[int] = []
        self._open = threading.Semaphore(0)
        capture = pipeline.warmup

        def warmup(shapes: list[tuple[int, int, int]]) -> Any:
            for batch, _, _ in shapes:
                if batch > 1:
                    self.begun.append(batch)
                    assert self._open.acquire(timeout=TIMEOUT_S)
                if batch in self.errors:
                    raise self.errors[batch]
            return capture(shapes)

        monkeypatch.setattr(pipeline, "warmup", warmup)

    def open(self, captures: int = 1) -> None:
        self._open.release(captures)


@pytest.fixture
def pipeline(shapes_cpu: Path) -> Iterator[OrtDiffusionPipeline]:
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu) as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


def serve(
    pipeline: OrtDiffusionPipeline, body: Callable[[AsyncPipeline], Awaitable[None]], observer: ServeObserver
) -> None:
    """Run a test with a queue that is warmed up in the background."""

    async def all_of_it() -> None:
        async with AsyncPipeline(pipeline, limits=LIMITS, observer=observer) as queue:
            await asyncio.to_thread(queue.warmup, background=True)
            await body(queue)

    asyncio.run(all_of_it())


def captured(pipeline: OrtDiffusionPipeline) -> set[int]:
    return {report.batch for report in pipeline.captured_sizes}


async def generated(queue: AsyncPipeline, count: int) -> list[Any]:
    jobs = [queue.submit(CAPTIONS[seed % len(CAPTIONS)], seed=seed, num_inference_steps=2) for seed in range(count)]
    return [np.asarray(result.images[0]) for result in await asyncio.gather(*jobs)]


async def until_captured(queue: AsyncPipeline) -> None:
    await asyncio.to_thread(until, lambda: queue.pending_captures == 0)


def test_ready_before_larger_batches(pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = np.asarray(pipeline(CAPTIONS[0], seed=0, num_inference_steps=2).images[0])
    gate, events = Gate(pipeline, monkeypatch), Recorder()

    async def body(queue: AsyncPipeline) -> None:
        assert captured(pipeline) == {1}
        assert (events.shapes, queue.pending_captures) == ([1], 2)
        await asyncio.to_thread(until, lambda: gate.begun == [2])
        assert queue.batch_age_s > 0  # a capture that hangs is noticed
        job = asyncio.ensure_future(generated(queue, 1))
        await asyncio.sleep(0.1)
        assert not events.batches
        gate.open()
        (image,) = await job
        assert np.array_equal(image, alone)
        gate.open()
        await until_captured(queue)
        assert captured(pipeline) == {1, 2, 4}
        assert (events.shapes[-1], events.pending[-1]) == (3, 0)
        await generated(queue, 4)
        assert events.batches == [1, 4]

    serve(pipeline, body, events)


def test_requests_wait_for_one_capture(pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, events = Gate(pipeline, monkeypatch), Recorder()

    async def body(queue: AsyncPipeline) -> None:
        await asyncio.to_thread(until, lambda: gate.begun == [2])
        jobs = asyncio.ensure_future(generated(queue, 5))
        await asyncio.sleep(0.1)
        gate.open()
        await jobs  # all of them, although the next capture is not let through
        assert events.batches == [2, 2, 1]
        gate.open()
        await until_captured(queue)

    serve(pipeline, body, events)


@pytest.mark.parametrize(
    ("failing", "error", "largest"),
    [
        (4, DeviceMemoryError("no memory", "more", "free some"), 2),
        (4, RuntimeError("unforeseen"), 2),
        (2, DeviceMemoryError("no memory", "more", "free some"), 1),
    ],
)
def test_failed_captures_reduce_batches(
    failing: int,
    error: Exception,
    largest: int,
    pipeline: OrtDiffusionPipeline,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, events = Gate(pipeline, monkeypatch), Recorder()
    gate.errors[failing] = error
    gate.open(2)

    async def body(queue: AsyncPipeline) -> None:
        await until_captured(queue)
        await generated(queue, 4)
        assert events.batches == [largest] * (4 // largest)
        assert queue.failure is None

    with caplog.at_level(logging.WARNING, "sdonnx"):
        serve(pipeline, body, events)
    assert gate.begun[-1] == failing  # larger ones are not tried
    (message,) = [record.message for record in caplog.records if "cannot be captured" in record.message]
    assert f"batches of {failing} images of 64x64" in message
    assert type(error).__name__ in message


def test_broken_device_is_a_failure(pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the model cannot generate an image either."""
    gate = Gate(pipeline, monkeypatch)
    gate.errors[2] = RuntimeError("illegal memory access")

    async def body(queue: AsyncPipeline) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("illegal memory access")

        monkeypatch.setattr(type(queue._models[queue.models[0]]), "check", broken)
        gate.open()
        await asyncio.to_thread(until, lambda: queue.failure is not None)
        with pytest.raises(UnavailableError, match="illegal memory access"):
            queue.submit("a circle")

    serve(pipeline, body, Recorder())


@pytest.mark.parametrize("finish", [True, False])
def test_closing_during_a_capture(
    finish: bool, pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(pipeline, monkeypatch)

    async def body(queue: AsyncPipeline) -> None:
        await asyncio.to_thread(until, lambda: gate.begun == [2])
        job = queue.submit("a circle", num_inference_steps=1)
        closing = asyncio.ensure_future(queue.aclose(finish=finish))
        await asyncio.sleep(0.1)
        gate.open()
        await closing
        (result,) = await asyncio.gather(job, return_exceptions=True)
        assert type(result).__name__ == ("GeneratedImages" if finish else "UnavailableError")
        assert gate.begun == [2]

    serve(pipeline, body, Recorder())


def test_captured_shapes_are_not_released_for_later_ones(shapes_cpu: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu, max_sizes=2) as small:
        small.set_progress_bar_config(disable=True)

        async def body(queue: AsyncPipeline) -> None:
            await until_captured(queue)
            assert captured(small) == {1, 2}

        serve(small, body, Recorder())


def capture(batch: int, edge: int = 64, model: str = "m") -> LaterCapture:
    return LaterCapture(model, batch, edge, edge)


def test_captures_are_due_between_requests() -> None:
    later = LaterCaptures()
    later.add([capture(4), capture(2)])
    assert later.due(oldest_s=1.0) is None  # a request comes first
    assert later.due(None) == capture(2)
    later.note_batch()
    assert later.due(1.0) == capture(2)
    later.note_end(capture(2), 3.0)
    later.note_batch()
    assert later.due(2.0) is None  # this request has waited for the capture of 2
    assert later.due(4.0) == capture(4)
    later.note_end(capture(4), 5.0)
    assert (later.due(None), len(later)) == (None, 0)


def test_usable_batch_sizes() -> None:
    later = LaterCaptures()
    later.add([capture(2), capture(4), capture(8)])
    assert later.usable("m", 64, 64, [1, 2, 4, 8]) == [1]
    assert later.usable("m", 64, 32, [1, 2, 4, 8]) == [1, 2, 4, 8]  # captured on their first use
    assert later.usable("other", 64, 64, [1, 2]) == [1, 2]
    later.note_end(capture(2), 1.0)
    later.note_end(capture(4), 2.0, failed=True)
    assert len(later) == 0  # 8 images need more memory
    assert later.usable("m", 64, 64, [1, 2, 4, 8]) == [1, 2]
    assert later.usable("m", 64, 32, [1, 2, 4, 8]) == [1, 2, 4]
    assert later.usable("m", 512, 512, [1, 2]) == [1]
