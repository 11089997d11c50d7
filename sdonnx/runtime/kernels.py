"""What the run-time does about kernels that lie on a GPU: attention's are avoided, others are told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdonnx.doctor.first_use import complaint, first_use, is_wanted
from sdonnx.doctor.verdict import Verdict
from sdonnx.runtime.device import Device
from sdonnx.runtime.worker import device_thread

__all__ = ["kernel_options", "verdict_on", "warning_of"]

_OPTION = "sdpa_kernel"


def verdict_on(device: Device) -> Verdict | None:
    """Return the verdict on a device's kernels; None for the CPU, and where SDONNX_SELF_CHECK is 0.

    The first use of a GPU is a check of some seconds, later ones read a file.
    """
    if device.provider != "cuda" or not is_wanted():
        return None
    return device_thread(device).run(lambda: first_use(device.index))


def kernel_options(verdict: Verdict | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return provider options that keep attention from back ends that lie; what the caller gave stands."""
    if verdict is None or not verdict.sdpa_kernel:
        return dict(given)
    return {_OPTION: str(verdict.sdpa_kernel), **given}


def _operators(report: Mapping[str, Any]) -> set[str]:
    """Return the operators of an optimized folder's graphs, as its report counts them."""
    components = report.get("components")
    counts = [part.get("operators_after") for part in components.values()] if isinstance(components, dict) else []
    return {name for count in counts if isinstance(count, dict) for name in count}


def warning_of(verdict: Verdict | None, report: Mapping[str, Any]) -> str:
    """Return what a user has to know of the kernels that a folder's graphs use, "" where there is nothing."""
    return "" if verdict is None else complaint(verdict, _operators(report))
