"""Whether sessions read weights from the memory that they were given, so that they can be changed in place."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np

from sdonnx.errors import SdonnxError
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.load_shared_weights import shareable
from sdonnx.runtime.device.session import Graph

__all__ = ["reads_weights_in_place"]

_LOGGER = logging.getLogger(__name__)

_PROBE = Path(__file__).with_name("in_place_probe.onnx")
"""`result` is `x` times `first` (MatMul) times `second` (Gemm), all 16x16, plus `bias` (SkipLayerNormalization), in
float16; see `scripts/write_probe.py`."""


@functools.cache
def reads_weights_in_place(device: Device) -> bool:
    """Return whether kernels read their weights from the memory of the session's caller at each run.

    On the CPU, ONNX Runtime copies weights into another layout when a session is made. On a GPU it does not; a small
    graph whose weights are changed between two runs shows that this holds for the installed version.
    """
    if device.provider == "cpu":
        return False
    try:
        return _is_changed_between_runs(device)
    except SdonnxError as error:
        _LOGGER.warning("weights are not changed in place: %s", error)
        return False


def _is_changed_between_runs(device: Device) -> bool:
    identity = np.eye(16, dtype=np.float16)
    changes = (("first", 2 * identity), ("second", 2 * identity), ("bias", np.ones(16, np.float16)))
    now = {"first": identity, "second": identity, "bias": np.zeros(16, np.float16)}
    # Each its own copy: on the CPU, a buffer is the memory of its array.
    buffers = {name: shareable(values.copy(), device) for name, values in now.items()}
    graph = Graph(_PROBE, device, weights=buffers)
    for name, values in (("first", identity), *changes):
        device.write(buffers[name], values)
        now[name] = values
        expected = identity @ now["first"] @ now["second"] + now["bias"]
        if not np.array_equal(graph.run({"x": identity})["result"], expected):
            return False
    return True
