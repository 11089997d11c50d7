"""Which kernels are right: our own, and the attention of ONNX Runtime, by compute capability and version."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sdonnx.doctor.kernel_library import OPERATORS

__all__ = ["KNOWN_FAULTS", "TRUSTED", "is_trusted", "sdpa_kernel"]

TRUSTED = {((9, 0), 13): "docs/results/own-kernels-h100.json"}
"""By compute capability and release of our kernels (`OPERATORS`), the record of the test that earned the trust: all of
their cases ran on such a GPU and were correct.

Add a row with the record of `test_whole_check` in tests/gpu/test_kernels_gpu.py, on a GPU of that capability.
"""

KNOWN_FAULTS: Mapping[tuple[str, int], int] = {("1.31.1", 8): 2 | 16}
"""The provider option that leaves wrong backends of attention out, by the first version of ONNX Runtime that has the
fault and the major compute capability where it would choose one. A row of a later version takes the place of an earlier
one.

Flash attention is wrong in fp16 for heads of 160 (docs/results/doctor-h200.json). From compute capability 9.0 on,
ONNX Runtime prefers cuDNN to it, and before 8.0 it has no flash attention.
"""


def is_trusted(capability: tuple[int, int], release: int = OPERATORS) -> bool:
    """Return whether our own kernels of a release are used on a GPU without a check."""
    return (capability, release) in TRUSTED


def sdpa_kernel(version: str, capability: tuple[int, int]) -> int:
    """Return the bits of the attention backends that ONNX Runtime may use, 0 for its own choice.

    Args:
        version: the version of ONNX Runtime.
        capability: compute capability of the GPU, major and minor.
    """
    rows = {_numbers(since): bits for (since, major), bits in KNOWN_FAULTS.items() if major == capability[0]}
    return max(((since, bits) for since, bits in rows.items() if since <= _numbers(version)), default=((), 0))[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
