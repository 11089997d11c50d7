"""Whether sessions read weights from the memory that they were given, so that they can be changed in place."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import SdonnxError
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.load_shared_weights import shareable
from sdonnx.runtime.device.session import Graph

__all__ = ["reads_weights_in_place"]

_LOGGER = logging.getLogger(__name__)

_PROBE = Path(__file__).with_name("in_place_probe.onnx")
"""`result` is `x` times `first` (MatMul) times `second` (Gemm), all 16x16, plus `bias` (SkipLayerNormalization), in
float16; see `scripts/write_probe.py`."""

_INT8_PROBE = Path(__file__).with_name("in_place_probe_int8.onnx")
"""`result` is `x` times `stored` in int8, times `scales` of its columns."""


@functools.cache
def reads_weights_in_place(device: Device, *, int8: bool = False) -> bool:
    """Return whether kernels read their weights from the memory of the session's caller at each run.

    Args:
        device: the device.
        int8: whether the weights are in int8, and DequantizeLinear restores them.

    On the CPU, ONNX Runtime copies weights into another layout when a session is made. On a GPU it does not; a small
    graph whose weights are changed between two runs shows that this holds for the installed version.
    """
    if device.provider == "cpu":
        return False
    try:
        return _int8_is_changed_between_runs(device) if int8 else _is_changed_between_runs(device)
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


def _int8_is_changed_between_runs(device: Device) -> bool:
    identity = np.eye(16, dtype=np.float16)
    now: dict[str, npt.NDArray[Any]] = {"stored": np.zeros((16, 16), np.int8), "scales": np.ones(16, np.float16)}
    buffers = {name: shareable(values.copy(), device) for name, values in now.items()}
    graph = Graph(_INT8_PROBE, device, weights=buffers)
    numbers = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    for name, values in (("stored", numbers), ("scales", np.arange(16, dtype=np.float16)), ("stored", -numbers)):
        device.write(buffers[name], values)
        now[name] = values
        if not np.array_equal(graph.run({"x": identity})["result"], now["stored"] * now["scales"]):
            return False
    return True
