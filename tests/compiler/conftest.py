"""Fixtures of the tests of compiled graphs that are cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from sdonnx.compiler import module_graph
from sdonnx.compiler.module_graph import build_model


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
