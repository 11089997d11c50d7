"""GPUs on which our own kernels are used without a check: all of their kernel cases ran there and were correct."""

from __future__ import annotations

from sdonnx.doctor.kernel_library import OPERATORS

__all__ = ["TRUSTED", "is_trusted"]

TRUSTED = {((9, 0), 13): "docs/results/own-kernels-h100.json"}
"""By compute capability and release of the kernels (`OPERATORS`), the record of the test that earned the trust.

Add a row with the record of `test_whole_check` in tests/gpu/test_kernels_gpu.py, on a GPU of that capability.
"""


def is_trusted(capability: tuple[int, int], release: int = OPERATORS) -> bool:
    """Return whether our own kernels of a release are used on a GPU without a check."""
    return (capability, release) in TRUSTED
