"""Graphs of the tests of compiled modules: shared by all tests of a run, or in a cache of their own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.logged_lines import logged_lines
from support.pipeline_cache import run_root
from support.shared_torchlib import share_torchlib
from support.torch_graphs import graphs_in_torch

from sdonnx.compiler import module_graph
from sdonnx.compiler.module_graph import build_model


@pytest.fixture(scope="module", autouse=True)
def shared_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build each graph once in a run: most tests compile the same ones."""
    share_torchlib()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDONNX_CACHE", str(run_root(tmp_path_factory.getbasetemp()) / "compiled"))
        patch.setenv("SDONNX_CACHE_LIMIT", "10GB")
        yield


@pytest.fixture(params=["in torch", pytest.param("exported", marks=pytest.mark.weekly)])
def variants(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute graphs in torch; with --weekly, also export them. `test_unet_variants` exports one with all inputs."""
    with graphs_in_torch() if request.param == "in torch" else contextlib.nullcontext():
        yield


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds each graph, and writes none into a cache."""
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of graphs of an empty cache."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "1GB")
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def builds() -> Iterator[mock.Mock]:
    """Counts graphs that are built."""
    with mock.patch.object(module_graph, "build_model", wraps=build_model) as built:
        yield built


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The warnings of this project, while the test runs."""
    with logged_lines(logging.WARNING) as lines:
        yield lines


@pytest.fixture
def noted() -> Iterator[list[str]]:
    """The warnings and the notes of this project, while the test runs."""
    with logged_lines(logging.INFO) as lines:
        yield lines
