"""Work around faulty GPU kernels: avoid faulty attention backends, and warn about other kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdonnx.doctor.first_use import complaint, first_use, is_wanted
from sdonnx.doctor.verdict import Verdict
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread

__all__ = ["kernel_options", "verdict_on", "warning_of"]

_OPTION = "sdpa_kernel"


def verdict_on(device: Device) -> Verdict | None:
    """Return the verdict on a device's kernels; None for the CPU, or if SDONNX_SELF_CHECK is 0.

    The first use of a GPU runs a check of some seconds; later uses read its result from a file.
    """
    if device.provider != "cuda" or not is_wanted():
        return None
    return device_thread(device).run(lambda: first_use(device.index))


def kernel_options(verdict: Verdict | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return provider options that disable faulty attention backends, unless the caller sets them."""
    if verdict is None or not verdict.sdpa_kernel:
        return dict(given)
    return {_OPTION: str(verdict.sdpa_kernel), **given}


def _operators(report: Mapping[str, Any]) -> set[str]:
    """Return the operators of an optimized folder's graphs, from its report."""
    components = report.get("components")
    counts = [part.get("operators_after") for part in components.values()] if isinstance(components, dict) else []
    return {name for count in counts if isinstance(count, dict) for name in count}


def warning_of(verdict: Verdict | None, report: Mapping[str, Any]) -> str:
    """Return a warning about faulty kernels that a folder's graphs use; "" if there are none."""
    return "" if verdict is None else complaint(verdict, _operators(report))
