"""The CUDA runtime through ctypes, with a fake library, so without a GPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from support.pipelines import refused

from sdonnx.errors import ProviderError
from sdonnx.runtime.device.cuda import Cuda, small_workspaces

NAME = "CUBLAS_WORKSPACE_CONFIG"


class Failing:
    """A library in which all calls fail with error 100."""

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> object:
            return b"no CUDA-capable device is detected" if name == "cudaGetErrorString" else 100

        return call


def test_missing_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with refused(ProviderError, "libcudart.so.13", "[cuda]"):
        Cuda(0)


def test_failing_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Failing())
    with refused(ProviderError, "no CUDA-capable device", "GPU 3", "nvidia-smi"):
        Cuda(3)


class Recording:
    """A library that records its calls; functions in `failing` fail, and graphs get numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: dict[str, list[Any]] = {}
        self.failing: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: Any) -> object:
            if name == "cudaGetErrorString":
                return b"operation not permitted when stream is capturing"
            self.calls.append(name.removeprefix("cuda"))
            self.arguments[name.removeprefix("cuda")] = [getattr(each, "value", each) for each in arguments]
            if name in self.failing:
                return 900
            given = {
                "cudaStreamCreateWithFlags": (0, 5),
                "cudaStreamEndCapture": (1, 7),
                "cudaGraphInstantiate": (0, 9),
            }
            if name in given:
                place, handle = given[name]
                arguments[place]._obj.value = handle
            return 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recording:
    made = Recording()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: made)
    return made


def test_graph_is_captured_launched_and_released(library: Recording) -> None:
    device = Cuda(0)
    library.calls.clear()
    graph = device.capture(lambda: library.calls.append("work"))
    begun = ["StreamBeginCapture", "work", "StreamEndCapture", "GraphInstantiate", "GraphUpload", "GraphDestroy"]
    assert library.calls == begun
    graph.launch()
    graph.launch()
    graph.release()
    graph.release()
    del graph
    assert library.calls == [*begun, "GraphLaunch", "GraphLaunch", "GraphExecDestroy"]
    told = library.arguments
    stream, graph_of_stream, executable, thread_local = 5, 7, 9, 1
    assert told["StreamBeginCapture"] == [stream, thread_local]
    assert told["StreamEndCapture"][0] == stream
    assert told["GraphInstantiate"][1:] == [graph_of_stream, 0]
    assert told["GraphDestroy"] == [graph_of_stream]
    assert told["GraphUpload"] == told["GraphLaunch"] == [executable, stream]
    assert told["GraphExecDestroy"] == [executable]


def test_failure_resets_the_last_error(library: Recording) -> None:
    """CUDA keeps the last error until it is read, and ONNX Runtime reads it after each kernel."""
    device = Cuda(0)
    graph = device.capture(lambda: None)
    library.failing = {"cudaGraphLaunch"}
    library.calls.clear()
    with refused(ProviderError, "stream is capturing"):
        graph.launch()
    assert library.calls == ["GraphLaunch", "GetLastError"]


def test_reserved_memory_is_freed(library: Recording) -> None:
    device = Cuda(0)
    library.calls.clear()

    def fail() -> None:
        with device.spare(2**20):
            library.calls.append("work")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert library.calls == ["Malloc", "work", "Free"]
    library.calls.clear()
    library.failing = {"cudaMalloc"}
    with device.spare(2**22):  # less and less of it, down to 2**20
        library.calls.append("work")
    assert library.calls == ["Malloc", "GetLastError"] * 3 + ["work"]


def test_stream_is_usable_after_a_failed_capture(library: Recording) -> None:
    device = Cuda(0)
    library.calls.clear()

    def fail() -> None:
        raise KeyError("error of the caller")

    with pytest.raises(KeyError, match="error of the caller"):
        device.capture(fail)
    assert library.calls == ["StreamBeginCapture", "StreamEndCapture", "GraphDestroy", "GetLastError"]


@pytest.mark.parametrize("step", ["StreamBeginCapture", "StreamEndCapture", "GraphInstantiate", "GraphUpload"])
def test_failed_capture_raises(step: str, library: Recording) -> None:
    device = Cuda(0)
    library.calls.clear()
    library.failing = {f"cuda{step}"}
    with refused(ProviderError, "stream is capturing"):
        device.capture(lambda: None)
    made = [call for call in library.calls if call in ("StreamEndCapture", "GraphInstantiate")]
    ended = [call for call in library.calls if call in ("GraphDestroy", "GraphExecDestroy")]
    assert len(ended) == len([call for call in made if call != step])  # every created graph is released


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_environment_is_restored(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    with small_workspaces():
        assert os.environ[NAME] == (given or ":4096:2")
    assert os.environ.get(NAME) == given


def test_environment_is_restored_by_the_last_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with ExitStack() as second:
        with small_workspaces():
            second.enter_context(small_workspaces())
        assert os.environ[NAME] == ":4096:2"  # the first one has left
    assert NAME not in os.environ
