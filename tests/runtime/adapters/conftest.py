"""Fixtures of tests that change weights in the memory that loaded sessions read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import onnxruntime
import pytest
from support.kernel_library import emulated_library

from sdonnx.runtime.device import session, session_weights
from sdonnx.runtime.device.low_rank_kernel import LowRankProducts
from sdonnx.runtime.device.session import Graph


@pytest.fixture
def plain_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions on the CPU keep weights where and as they are, as those on a GPU do."""
    options = session._session_options

    def unpacked(*arguments: Any) -> Any:
        made = options(*arguments)
        made.add_session_config_entry("session.disable_prepacking", "1")
        # Without the last level, which reorders weights of convolutions.
        made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        return made

    monkeypatch.setattr(session, "_session_options", unpacked)


@pytest.fixture
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, plain_sessions: None) -> Iterator[mock.Mock]:
    """Let sessions read weights in place, and count sessions that are loaded.

    Its parameter says what computes new weights: numpy ("host", by default), or the emulated kernel ("device").
    """
    if getattr(request, "param", "host") == "device":
        library = emulated_library()
        monkeypatch.setattr(session_weights, "LowRankProducts", lambda device, _: LowRankProducts(device, library))
    monkeypatch.setattr(session_weights, "reads_in_place", lambda _: True)
    with mock.patch.object(Graph, "_load", autospec=True, side_effect=Graph._load) as counted:
        yield counted
