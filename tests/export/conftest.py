"""Tests of the exporter export: they read no committed graphs."""

from __future__ import annotations

import pytest
from support import committed_graphs


@pytest.fixture(autouse=True)
def export_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch export, in tests of what it exports; weights of other graphs are tested with committed ones."""
    if not request.path.stem.removeprefix("test_").startswith(("single_file", "weight_files", "open_source")):
        monkeypatch.setenv(committed_graphs.MODE, "export")
