"""Add products of low rank to weights in a device's memory, with `kernels/weights/low_rank.cu`."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import ProviderError
from sdonnx.installation import kernels_command
from sdonnx.runtime.device.cuda import cuda
from sdonnx.runtime.device.device import Device

__all__ = ["PART", "TERM", "LowRankKernel"]

_LOGGER = logging.getLogger(__name__)

Array = npt.NDArray[Any]

PART = np.dtype(
    [
        *((name, "<u8") for name in ("base", "out")),
        *((name, "<i8") for name in ("channel_stride", "input_stride")),
        *((name, "<i4") for name in ("channels", "inputs", "first_channel", "first_term", "terms", "weight")),
        *((name, "<i4") for name in ("first_tile", "is_half")),
    ]
)
"""A part of a weight, with channels at equal distances in memory; as `LowRankPart` of the kernel."""

TERM = np.dtype(
    [
        *((name, "<u8") for name in ("up", "down")),
        ("rank", "<i4"),
        ("scale", "<f4"),
        *((name, "<i4") for name in ("up_is_half", "down_is_half")),
    ]
)
"""A product of low rank, `scale * up @ down`; as `LowRankTerm` of the kernel."""

_TILE = 64  # kTile of the kernel


class LowRankKernel:
    """The kernel of a library on a device.

    Args:
        library: the file of our kernel library.
        device: a GPU, or the CPU for the emulated library of tests.
    """

    def __init__(self, library: Path, device: Device) -> None:
        function = ctypes.CDLL(str(library)).sdonnx_add_low_rank
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        function.argtypes = [pointer, number, number, pointer, pointer, number, pointer]
        function.restype = ctypes.c_char_p
        self._function, self._device = function, device

    @classmethod
    def of(cls, library: Path | None, device: Device) -> LowRankKernel | None:
        """Return the kernel; None without a library, with one from before the kernel, or if its results are wrong."""
        try:
            kernel = None if library is None else cls(library, device)
        except AttributeError:
            return None
        if kernel is None or kernel.is_right():
            return kernel
        _LOGGER.warning("new weights are computed on the host: the kernel of %s is wrong on %s", library, device)
        return None

    def is_right(self) -> bool:
        """Return whether the kernel adds two products to a small matrix correctly; all sums are exact in float16."""
        draw = np.random.default_rng(0)
        base, *factors = (
            draw.integers(-4, 5, shape).astype(np.float16) for shape in ((70, 90), (90, 20), (20, 70), (90, 3), (3, 70))
        )
        target, *uploaded = map(self._device.upload, (base, *factors))
        at = target.data_ptr()
        parts = np.array([(at, at, 1, 90, 90, 70, 0, 0, 2, 0, 0, True)], PART)
        up, down, other_up, other_down = (each.data_ptr() for each in uploaded)
        terms = np.array([(up, down, 20, 2.0, True, True), (other_up, other_down, 3, -1.0, True, True)], TERM)
        expected = base + (2 * factors[0] @ factors[1] - factors[2] @ factors[3]).T
        largest = self.run(parts, terms, writes=True)
        return bool(np.array_equal(target.numpy(), expected) and largest[0] == np.abs(expected).max())

    def run(self, parts: Array, terms: Array, *, writes: bool) -> npt.NDArray[np.float32]:
        """Compute parts of weights, wait, and return the largest magnitude of each weight.

        Args:
            parts: of type `PART`, without `first_tile`; each `weight` from 0 on occurs.
            terms: of type `TERM`.
            writes: whether to write the new values; otherwise only their magnitudes are computed.

        Returns:
            (weights); infinite where a value is not a number.

        Raises:
            ProviderError: the kernel cannot run.
            DeviceMemoryError: the device has too little memory.
        """
        tiles = -(-parts["channels"] // _TILE) * -(-parts["inputs"] // _TILE)
        parts["first_tile"] = np.cumsum(tiles) - tiles
        magnitudes = self._device.upload(np.zeros(int(parts["weight"].max(initial=-1)) + 1, np.float32))
        uploaded = [self._upload(each) for each in (parts, terms)]
        stream = cuda(self._device.index).stream if self._device.provider == "cuda" else 0
        reason = self._function(
            uploaded[0].data_ptr(),
            len(parts),
            int(tiles.sum()),
            uploaded[1].data_ptr(),
            magnitudes.data_ptr(),
            writes,
            stream,
        )
        if reason is not None:
            raise ProviderError(
                f"the kernel that changes weights reports {reason.decode()!r}",
                "kernels for this GPU",
                f"install them again: {kernels_command()}",
            )
        self._device.synchronize()
        found: npt.NDArray[np.float32] = magnitudes.numpy().copy()
        return found

    def _upload(self, records: Array) -> OrtValue:
        return self._device.upload(np.ascontiguousarray(records).view(np.uint8))
