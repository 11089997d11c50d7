"""Tests of the exporter read no committed graphs."""

from __future__ import annotations

import pytest
from support import committed_graphs


@pytest.fixture(autouse=True)
def export_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch export, in tests of what it exports; what follows is tested with committed graphs."""
    if request.path.stem in ("test_decomposition", "test_repeated_blocks", "test_simplify"):
        monkeypatch.setenv(committed_graphs.MODE, "export")
