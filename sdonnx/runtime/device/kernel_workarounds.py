"""Work around faulty GPU kernels: avoid faulty attention backends, and warn about other kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sdonnx.doctor.background_check import BackgroundCheck, background_check
from sdonnx.doctor.check_kernels import ATTENTION, digest_of
from sdonnx.doctor.first_use import SelfCheck, complaint, first_use, known_verdict, self_check
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.nearest_verdict import other_versions
from sdonnx.doctor.verdict import Verdict, keep_known_faults
from sdonnx.runtime.device.awaits_verdict import AwaitsVerdict
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.own_kernel_form import check_own_kernels, knows_own_kernels

__all__ = ["KernelCheck", "check_now"]

_LOGGER = logging.getLogger(__name__)

_OPTION = "sdpa_kernel"

_CHECKED = {"cuda"}  # providers


def check_now(device: Device) -> None:
    """Check a GPU's kernels if no verdict is known, so that pipelines loaded later act on it from their first image.

    This includes our own kernels, which those pipelines then use. The check runs in another process, which gives all of
    its memory back, and in this one if the other one fails. Nothing is done for the CPU, or if SDONNX_SELF_CHECK is 0.
    """
    if _mode(device) is SelfCheck.OFF:
        return
    _, is_known = known_verdict(device_thread(device).run(lambda: identity(device.index, digest_of())))
    if not is_known or not knows_own_kernels(device):
        check = background_check(device.index)
        check.start()
        check.join()
    device_thread(device).run(lambda: first_use(device.index))
    check_own_kernels(device)


def _mode(device: Device) -> SelfCheck:
    return self_check() if device.provider in _CHECKED else SelfCheck.OFF


class KernelCheck(AwaitsVerdict):
    """The verdict on the kernels of a pipeline's device, and its consequences for the pipeline.

    Unless SDONNX_SELF_CHECK says otherwise, a GPU without a known verdict is checked in another process, which `start`
    starts; `update` reads its verdict.

    Args:
        device: where the graphs run.
        report: report of the optimized folder, which counts the operators of its graphs.
        given: provider options of the caller; they override workarounds.

    Raises:
        FolderError: a file of the doctor cannot be read.
        OptionError: SDONNX_SELF_CHECK has an unknown value.
    """

    def __init__(self, device: Device, report: Mapping[str, Any], given: Mapping[str, str]) -> None:
        super().__init__()
        self._operators, self._given = _operators(report), dict(given)
        self._verdict: Verdict | None = None
        mode = _mode(device)
        if mode is SelfCheck.STRICT:
            self._verdict = device_thread(device).run(lambda: first_use(device.index))
        elif mode is SelfCheck.BACKGROUND:
            key = device_thread(device).run(lambda: identity(device.index, digest_of()))
            # One of a machine with another driver or libraries counts until this machine's own is there.
            self._verdict, is_equal = known_verdict(key)
            self._awaited = None if is_equal else background_check(device.index)
            if self._verdict is not None and not is_equal:
                _LOGGER.info(
                    "ONNX Runtime's kernels were checked with %s; a check in the background follows the first image",
                    other_versions(key, self._verdict.key),
                )

    @property
    def provider_options(self) -> dict[str, str]:
        """The caller's provider options, and those that disable faulty attention backends."""
        avoided = 0 if self._verdict is None else self._verdict.sdpa_kernel
        return ({_OPTION: str(avoided)} if avoided else {}) | self._given

    @property
    def warning(self) -> str:
        """A warning about faulty kernels that the folder's graphs use; "" if there are none."""
        return "" if self._verdict is None else complaint(self._verdict, self._operators)

    def _verdict_of(self, check: BackgroundCheck) -> Verdict | None:
        return check.verdict

    def _follow(self, verdict: Verdict) -> list[str]:
        """Use the verdict from now on."""
        before = self.provider_options
        self._verdict = keep_known_faults(verdict, self._verdict)
        messages = [self.warning] if self.warning else []
        if self.provider_options != before and self._verdict.sdpa_kernel and ATTENTION in self._operators:
            names = ", ".join(self._verdict.faulty_backends)
            messages.append(
                f"images so far were generated with a faulty attention backend ({names}); expected a correct one, "
                "which is used from now on; generate them again"
            )
        return messages


def _operators(report: Mapping[str, Any]) -> set[str]:
    """Return the operators of an optimized folder's graphs, from its report."""
    components = report.get("components")
    counts = [part.get("operators_after") for part in components.values()] if isinstance(components, dict) else []
    return {name for count in counts if isinstance(count, dict) for name in count}
