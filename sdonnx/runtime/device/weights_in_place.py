"""Whether sessions read weights from the memory that they were given, so that they can be changed in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import SdonnxError
from sdonnx.folder.stored_numbers import STORED_FORMATS
from sdonnx.folder.weight_table import Reader
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.load_shared_weights import shareable
from sdonnx.runtime.device.session import Graph

__all__ = ["Probe", "probe_of", "reads_weights_in_place"]

_LOGGER = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# cuDNN may choose an algorithm that rounds intermediate results to float16.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class Probe:
    """A small graph; its weights are changed between runs.

    Attributes:
        path: the graph, with the input `x` and the output `result`; see `scripts/write_runtime_graphs.py`.
        x: its input.
        before: values of its initializers when the session is made.
        changes: changes of initializers, one after another.
        expected: returns the result for values of the initializers.
        dtypes: types of initializers that numpy lacks, as in the header of a safetensors file.
    """

    path: Path
    x: Array
    before: Mapping[str, Array]
    changes: tuple[tuple[str, Array], ...]
    expected: Callable[[Mapping[str, Array]], Array]
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def sees_changes(self, device: Device) -> bool:
        """Return whether each run uses the values that were written last.

        Raises:
            FolderError: ONNX Runtime rejects the graph.
            DeviceMemoryError: the device has too little memory.
        """
        now = dict(self.before)
        # Each its own copy: on the CPU, a buffer is the memory of its array.
        buffers = {name: shareable(values.copy(), device, self.dtypes.get(name, "")) for name, values in now.items()}
        graph = Graph(self.path, device, weights=buffers)
        for name, values in (next(iter(now.items())), *self.changes):
            device.write(buffers[name], values)
            now[name] = values
            expected = self.expected(now).astype(np.float32)
            error = np.abs(graph.run({"x": self.x})["result"].astype(np.float32) - expected).max()
            if not error <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
                return False
        return True


def probe_of(reader: Reader) -> Probe:
    """Return the probe for a kind of kernel. All its sums are exact in float16."""
    return _PROBES[reader]()


@functools.cache
def reads_weights_in_place(device: Device, reader: Reader = "product") -> bool:
    """Return whether kernels read their weights from the memory of the session's caller at each run.

    Args:
        device: the device.
        reader: the kind of kernel.

    On the CPU, ONNX Runtime copies weights into another layout when a session is made. On a GPU it does not; runs
    of a small graph with changed weights show that this holds for the installed version.
    """
    if device.provider == "cpu":
        return False
    try:
        return probe_of(reader).sees_changes(device)
    except (SdonnxError, RuntimeError) as error:  # RuntimeError: of a tensor that ONNX Runtime does not accept
        _LOGGER.warning("weights of the kind %s are not changed in place: %s", reader, error)
        return False


def _path(suffix: str = "") -> Path:
    return Path(__file__).with_name(f"in_place_probe{suffix}.onnx")


def _products() -> Probe:
    identity = np.eye(16, dtype=np.float16)
    return Probe(
        _path(),
        identity,
        {"first": identity, "second": identity, "bias": np.zeros(16, np.float16)},
        (("first", 2 * identity), ("second", 2 * identity), ("bias", np.ones(16, np.float16))),
        lambda now: identity @ now["first"] @ now["second"] + now["bias"],
    )


def _int8() -> Probe:
    numbers = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    return Probe(
        _path("_int8"),
        np.eye(16, dtype=np.float16),
        {"stored": np.zeros((16, 16), np.int8), "scales": np.ones(16, np.float16)},
        (("stored", numbers), ("scales", np.arange(16, dtype=np.float16)), ("stored", -numbers)),
        lambda now: now["stored"] * now["scales"],
    )


def _fp8() -> Probe:
    """Return the probe of a product by a weight in e4m3 and one in e5m2."""
    draw = np.random.default_rng(0)
    formats = {"e4m3": STORED_FORMATS["e4m3"], "e5m2": STORED_FORMATS["e5m2"]}

    def stored(name: str) -> Array:
        return formats[name].rounded(draw.integers(-4, 5, (16, 16)).astype(np.float32))

    def restored(now: Mapping[str, Array], name: str) -> Array:
        return formats[name].restored(now[name]) * now[f"{name}_scales"].astype(np.float32)

    ones = np.ones(16, np.float16)
    return Probe(
        _path("_fp8"),
        np.eye(16, dtype=np.float16),
        {"e4m3": stored("e4m3"), "e5m2": stored("e5m2"), "e4m3_scales": ones, "e5m2_scales": ones},
        (
            *((name, stored(name)) for name in formats),
            *((f"{name}_scales", draw.integers(1, 3, 16).astype(np.float16)) for name in formats),
            *((name, stored(name)) for name in formats),
        ),
        lambda now: restored(now, "e4m3") @ restored(now, "e5m2"),
        {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"},
    )


def _convolution() -> Probe:
    """Return the probe of a convolution of 3x3 with channels last, and its bias.

    It is ONNX Runtime's; an operator of our own reads its inputs as they are in each run.
    """
    draw = np.random.default_rng(0)

    def numbers(*shape: int) -> Array:
        return draw.integers(-2, 3, shape).astype(np.float16)

    x = numbers(1, 6, 6, 16)
    padded = np.pad(x.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))

    def expected(now: Mapping[str, Array]) -> Array:
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))  # (1, 6, 6, in, 3, 3)
        result: Array = np.einsum("bhwcij,mijc->bhwm", windows, now["weight"].astype(np.float32)) + now["bias"]
        return result

    return Probe(
        _path("_nhwc_conv"),
        x,
        {"weight": numbers(16, 3, 3, 16), "bias": np.zeros(16, np.float16)},
        (("weight", numbers(16, 3, 3, 16)), ("bias", 8 * numbers(16)), ("weight", numbers(16, 3, 3, 16))),
        expected,
    )


_PROBES: Mapping[Reader, Callable[[], Probe]] = {
    "product": _products,
    "convolution": _convolution,
    "int8": _int8,
    "fp8": _fp8,
}
