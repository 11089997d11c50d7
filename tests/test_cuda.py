"""The CUDA runtime by ctypes, as far as a machine without a GPU can tell."""

from __future__ import annotations

import ctypes
import os

import pytest
from pipelines import refused

from sdonnx.errors import ProviderError
from sdonnx.runtime.cuda import Cuda, small_workspaces

NAME = "CUBLAS_WORKSPACE_CONFIG"


class Failing:
    """A library whose every call fails with the number 100."""

    def __getattr__(self, name: str) -> object:
        def call(*_: object) -> object:
            return b"no CUDA-capable device is detected" if name == "cudaGetErrorString" else 100

        return call


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with refused(ProviderError, "libcudart.so.13", "sdonnx[cuda]"):
        Cuda(0)


def test_a_failing_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Failing())
    with refused(ProviderError, "no CUDA-capable device", "GPU 3", "nvidia-smi"):
        Cuda(3)


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_the_environment_is_left_as_it_was(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    with small_workspaces():
        assert os.environ[NAME] == (given or ":4096:2")
    assert os.environ.get(NAME) == given
