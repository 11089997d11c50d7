"""Choose between the two forms of a folder's graphs: with our own kernels, or with ONNX Runtime's only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdonnx.doctor.first_use import SelfCheck, self_check
from sdonnx.doctor.kernel_library import KernelLibrary, usable_library
from sdonnx.doctor.own_kernel_check import own_verdict
from sdonnx.doctor.verdict import Verdict
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import SessionSettings

__all__ = ["library_for"]

_LOGGER = logging.getLogger(__name__)


def library_for(device: Device, report: Mapping[str, Any], settings: SessionSettings) -> Path | None:
    """Return the library with which a folder's graphs are loaded; None for the form without our own kernels.

    One line in the log says which form is used, and why. The kernels are checked at their first use on a GPU, unless
    SDONNX_SELF_CHECK is 0; faulty ones are not used.

    Args:
        device: where the graphs run.
        report: report of the optimized folder.
        settings: options of ONNX Runtime from the caller.

    Raises:
        FolderError: a file of the doctor cannot be read.
        OptionError: SDONNX_KERNELS or SDONNX_SELF_CHECK has a value that cannot be used.
    """
    options = report.get("options")
    if not isinstance(options, Mapping) or options.get("kernels") != "auto":
        return None
    library, reason = usable_library(device.capability())
    if library is not None and settings.session_options is not None:
        # They are one object for all sessions, which can register a library once.
        library, reason = None, "session options of the caller are used"
    if library is not None:
        reason = _fault(device, library)
    if library is None or reason:
        _LOGGER.info("using ONNX Runtime's kernels only: %s", reason)
        return None
    _LOGGER.info("using our own kernels of %s", library.path)
    return library.path


def _fault(device: Device, library: KernelLibrary) -> str:
    """Return why the kernels must not be used on this GPU, "" if they may be."""
    if self_check() is SelfCheck.OFF:
        return ""
    verdict: Verdict = device_thread(device).run(lambda: own_verdict(device.index, library))
    wrong = [f"{result.operator} is wrong" for result in verdict.faults]
    lost = [f"{result.operator} did not run ({result.failure})" for result in verdict.unavailable]
    if not verdict.complete:
        lost.append("the check took too long")
    return next(iter([*wrong, *lost]), "")
