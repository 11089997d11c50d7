"""A call that another thread ends within a step, and the next call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.pipelines import refused

from sdonnx.errors import UnavailableError
from sdonnx.models.spec import Role
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "seed": 0, "output_type": "np"}


@pytest.mark.parametrize("ended", [Role.TEXT_ENCODER, Role.DENOISER, Role.IMAGE_DECODER])
def test_a_call_ends_within_a_run(ours: OrtDiffusionPipeline, ended: Role) -> None:
    expected = ours("a", **USUAL).images
    finished: list[Role] = []

    @contextmanager
    def observe(role: Role, _: Run) -> Iterator[None]:
        if role is ended:
            canceller = threading.Thread(target=ours.cancel)
            canceller.start()
            canceller.join()
        yield
        finished.append(role)

    ours.observe(observe)
    try:
        with refused(UnavailableError, "the call was cancelled"):
            ours("a", **USUAL)
    finally:
        ours.observe(None)
    assert ended not in finished
    np.testing.assert_array_equal(ours("a", **USUAL).images, expected)


def test_onnxruntime_ends_a_run_that_has_begun(ours: OrtDiffusionPipeline) -> None:
    """The flag is set while operators run: without it, this call takes minutes."""
    begun = threading.Event()

    @contextmanager
    def observe(role: Role, _: Run) -> Iterator[None]:
        if role is Role.DENOISER:
            begun.set()
        yield

    def cancel() -> None:
        begun.wait(60)
        threading.Event().wait(0.05)
        ours.cancel()

    canceller = threading.Thread(target=cancel)
    ours.observe(observe)
    canceller.start()
    try:
        with refused(UnavailableError, "the call was cancelled"):
            ours("a", **USUAL | {"height": 256, "width": 256, "num_inference_steps": 500})
    finally:
        canceller.join()
        ours.observe(None)


def test_a_callback_may_cancel(ours: OrtDiffusionPipeline) -> None:
    calls: list[int] = []

    def stop(pipeline: OrtDiffusionPipeline, step: int, _: float, values: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(step)
        if step == 1:
            pipeline.cancel()
        return values

    with refused(UnavailableError, "the call was cancelled"):
        ours("a", **USUAL, callback_on_step_end=stop)
    assert calls == [0, 1]
    assert len(ours.encode_prompt("a")) == 2  # a cancelled call ends itself only
