"""Choose between the two forms of a folder's graphs: with our own kernels, or with ONNX Runtime's only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sdonnx.doctor.background_check import BackgroundCheck, background_check
from sdonnx.doctor.check_kernels import CaseResult
from sdonnx.doctor.first_use import SelfCheck, self_check
from sdonnx.doctor.kernel_library import KernelLibrary, usable_library
from sdonnx.doctor.nearest_verdict import is_near, other_versions
from sdonnx.doctor.own_kernel_check import EIGHT_BIT_OPERATORS, formats_of_types, known_own_verdict, own_verdict
from sdonnx.doctor.verdict import Key, Verdict
from sdonnx.runtime.device.awaits_verdict import AwaitsVerdict
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import SessionSettings

__all__ = ["OwnKernelForm", "check_own_kernels", "knows_own_kernels"]

_LOGGER = logging.getLogger(__name__)

_UNKNOWN = (
    "our own were not checked on this GPU; a check in the background follows the first image, for pipelines that are "
    "loaded after it; SDONNX_SELF_CHECK=strict checks before"
)


def check_own_kernels(device: Device) -> None:
    """Check our own kernels on a GPU if it can use them and no verdict is known."""
    library, _ = usable_library(device.capability())
    if library is not None:
        device_thread(device).run(lambda: own_verdict(device.index, library))


def knows_own_kernels(device: Device) -> bool:
    """Return whether a verdict of this machine on our own kernels is known, or the GPU cannot use them."""
    library, _ = usable_library(device.capability())
    if library is None:
        return True
    key, verdict = device_thread(device).run(lambda: known_own_verdict(device.index, library))
    return verdict is not None and verdict.key == key


class OwnKernelForm(AwaitsVerdict):
    """The form of a folder's graphs that a pipeline uses, which depends on the verdict on our own kernels.

    Without a known verdict the pipeline uses ONNX Runtime's kernels for as long as it is loaded, and `start` starts a
    check in another process, for the next pipeline (docs/decisions/0151). A verdict on a machine with other versions of
    NVIDIA's driver and libraries is used at once, and the same check confirms it (docs/decisions/0160). One line in the
    log says which form is used, and why. SDONNX_SELF_CHECK=strict checks here, and with SDONNX_SELF_CHECK=0 the kernels
    are trusted.

    Args:
        device: where the graphs run.
        report: report of the optimized folder.
        settings: options of ONNX Runtime from the caller.

    Attributes:
        kernel_library: the library with which the graphs are loaded; None for the form without our own kernels.

    Raises:
        FolderError: a file of the doctor cannot be read.
        OptionError: SDONNX_KERNELS or SDONNX_SELF_CHECK has a value that cannot be used.
    """

    def __init__(self, device: Device, report: Mapping[str, Any], settings: SessionSettings) -> None:
        super().__init__()
        self.kernel_library: Path | None = None
        self._key: Key = {}
        self._unconfirmed = ""  # how the machine of the verdict differs from this one
        self._formats = formats_of_types(_quantization_types(report))
        options = report.get("options")
        if not isinstance(options, Mapping) or options.get("kernels") != "auto":
            return
        library, reason = usable_library(device.capability())
        if library is not None and settings.session_options is not None:
            # They are one object for all sessions, which can register a library once.
            library, reason = None, "session options of the caller are used"
        if library is not None:
            reason = self._reason_against(device, library)
        if library is None or reason:
            _LOGGER.info("using ONNX Runtime's kernels only: %s%s", reason, self._unconfirmed)
            return
        checked = f", which were checked{self._unconfirmed}" if self._unconfirmed else ""
        _LOGGER.info("using our own kernels of %s%s", library.path, checked)
        self.kernel_library = library.path

    def _reason_against(self, device: Device, library: KernelLibrary) -> str:
        """Return why the kernels must not be used on this GPU, "" if they may be."""
        mode = self_check()
        if mode is SelfCheck.OFF:
            return ""
        if mode is SelfCheck.STRICT:
            return self._fault(device_thread(device).run(lambda: own_verdict(device.index, library)))
        self._key, verdict = device_thread(device).run(lambda: known_own_verdict(device.index, library))
        if verdict is None or verdict.key != self._key:
            self._awaited = background_check(device.index)
        if verdict is None:
            return _UNKNOWN
        if versions := other_versions(self._key, verdict.key):
            self._unconfirmed = f" with {versions}; a check in the background follows the first image"
        return self._fault(verdict)

    def _verdict_of(self, check: BackgroundCheck) -> Verdict | None:
        return check.own_verdict

    def _follow(self, verdict: Verdict) -> list[str]:
        """Replace kernels in use that are wrong.

        Other news is for pipelines that are loaded later, so that the results of a pipeline do not change from one call
        to the next.
        """
        if not is_near(self._key, verdict.key):
            return []  # it is about another library
        # Next to a pipeline a check may lack time or memory, which is no fault of the kernels.
        if self.kernel_library is None or not self._in_use(verdict.faults):
            later = "; pipelines that are loaded from now on use them" if self.kernel_library is None else ""
            _LOGGER.info(
                "our own kernels were checked in the background: %s", self._fault(verdict) or f"correct{later}"
            )
            return []
        self.kernel_library = None
        return [
            f"images so far were generated with faulty kernels of our own ({self._fault(verdict)}); expected correct "
            "ones; ONNX Runtime's are used from now on; generate them again"
        ]

    def _fault(self, verdict: Verdict) -> str:
        """Return the first fault of a verdict on kernels that the folder uses, "" if they can be used."""
        wrong = [f"{result.operator} is wrong" for result in self._in_use(verdict.faults)]
        lost = [f"{result.operator} did not run ({result.failure})" for result in self._in_use(verdict.unavailable)]
        if not verdict.complete:
            lost.append("the check took too long")
        return next(iter([*wrong, *lost]), "")

    def _in_use(self, results: Iterable[CaseResult]) -> list[CaseResult]:
        return [
            result
            for result in results
            if result.operator not in EIGHT_BIT_OPERATORS or any(each in result.case for each in self._formats)
        ]


def _quantization_types(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the quantization types of an optimized folder's components, from the folder's report."""
    components = report.get("components")
    for part in components.values() if isinstance(components, Mapping) else ():
        found = part.get("quantized") if isinstance(part, Mapping) else None
        yield from map(str, found) if isinstance(found, Mapping) else ()
