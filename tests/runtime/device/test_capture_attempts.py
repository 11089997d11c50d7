"""A capture that lacks a block of memory is repeated after another run, which allocates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pytest
from support.pipelines import refused

from sdonnx.errors import DeviceMemoryError
from sdonnx.runtime.device import session
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph, Run

MISSING = RuntimeError("Failed to allocate memory for requested buffer of size 67584")


class Capturer:
    """A CUDA runtime that fails the first captures."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts = 0

    def capture(self, work: Callable[[], None]) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise MISSING
        work()
        return "captured graph"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    )
    onnx.save(model, tmp_path / "model.onnx")
    device = device_for("cpu")
    graph = Graph(tmp_path / "model.onnx", device)
    monkeypatch.setattr(graph, "captures", True)
    x = device.upload(np.ones(3, np.float32))
    return graph.bind({"x": x, "y": device.empty((3,), np.float32)})


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_captures_after_another_run(run: Run, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = Capturer(failures)
    monkeypatch.setattr(session, "cuda", lambda _: capturer)
    with mock.patch.object(run, "_run", wraps=run._run) as runs:
        run.capture()
    assert capturer.attempts == failures + 1
    assert runs.call_count == failures + 2  # one before each attempt, and the captured one


def test_gives_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = Capturer(failures=9)
    monkeypatch.setattr(session, "cuda", lambda _: capturer)
    with refused(DeviceMemoryError, "running model.onnx"):
        run.capture()
    assert 1 < capturer.attempts < 9
