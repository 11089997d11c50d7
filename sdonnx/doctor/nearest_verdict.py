"""Find the verdict that counts on a machine until its own kernels are checked (docs/decisions/0160).

Only versions of NVIDIA's driver and libraries may differ. The GPU, ONNX Runtime, our kernels and the kernel cases have
to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from sdonnx.doctor.verdict import Key, Verdict

__all__ = ["is_near", "nearest_verdict", "other_versions"]

# Libraries of which another minor version or patch may be loaded, those with the most kernels first: NVIDIA's name, and
# the factors of major, minor and patch in the number of a version (CUDNN_VERSION, CUBLAS_VERSION, CUDART_VERSION).
_LIBRARIES = MappingProxyType(
    {
        "cudnn": ("cuDNN", (10_000, 100, 1)),
        "cublas": ("cuBLAS", (10_000, 100, 1)),
        "cuda_runtime": ("CUDA", (1_000, 10)),
    }
)
_DRIVER = "driver"


def is_near(key: Key, other: Key) -> bool:
    """Return whether a verdict on a machine counts on another one until that is checked.

    Libraries have to be of the same major version, and every version has to be known: a library that is not found
    cannot run a kernel.

    Args:
        key: the machine.
        other: the machine that the verdict is on.
    """
    if key.keys() != other.keys():
        return False
    return all(_may_differ(name, key[name], other[name]) for name in key if key[name] != other[name])


def _may_differ(name: str, value: str, other: str) -> bool:
    if name == _DRIVER:
        return bool(value and other)
    return name in _LIBRARIES and value.isdecimal() and other.isdecimal() and _major(name, value) == _major(name, other)


def _major(name: str, value: str) -> int:
    return int(value) // _LIBRARIES[name][1][0]


def nearest_verdict(key: Key, verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict on an equal machine or otherwise on the nearest one, None if none counts here.

    The nearest one has the closest version of cuDNN, then of cuBLAS, then of CUDA's run-time, then the same driver. Of
    two equally near, the one with faults is returned.

    Args:
        key: the machine.
        verdicts: verdicts on any machines.
    """
    near = [verdict for verdict in verdicts if is_near(key, verdict.key)]
    return min(near, key=lambda verdict: (*_distance(key, verdict.key), verdict.sound), default=None)


def _distance(key: Key, other: Key) -> tuple[int, ...]:
    changed = [name for name in _LIBRARIES if key.get(name) != other.get(name)]
    apart = [abs(int(key[name]) - int(other[name])) if name in changed else 0 for name in _LIBRARIES]
    return *apart, int(key.get(_DRIVER) != other.get(_DRIVER))


def other_versions(key: Key, other: Key) -> str:
    """Return the versions that differ between two near machines, such as "cuDNN 9.19.0 (here 9.20.0)"; "" if none do.

    Args:
        key: this machine.
        other: the machine that a verdict is on.
    """
    names = {name: title for name, (title, _) in _LIBRARIES.items()} | {_DRIVER: "driver"}
    return ", ".join(
        f"{title} {_text(name, other[name])} (here {_text(name, key[name])})"
        for name, title in names.items()
        if key.get(name) != other.get(name)
    )


def _text(name: str, value: str) -> str:
    if name not in _LIBRARIES:
        return value
    parts, rest = list[str](), int(value)
    for factor in _LIBRARIES[name][1]:
        part, rest = divmod(rest, factor)
        parts.append(str(part))
    return ".".join(parts)
