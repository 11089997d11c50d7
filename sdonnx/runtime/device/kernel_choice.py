"""Choose the kernels of graphs: our own where they can be trusted, and ONNX Runtime's without known faults."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime

from sdonnx.doctor.first_check import LIMIT_S, OFF, ON, STRICT, formats_of_types, kernel_faults, self_check
from sdonnx.doctor.kernel_library import is_trusted, sdpa_kernel, usable_library
from sdonnx.errors import ProviderError
from sdonnx.folder.pipeline_folder import own_kernel_graph
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread

__all__ = ["KernelChoice", "choose_kernels"]

_LOGGER = logging.getLogger(__name__)

# The operator of a node in a serialized graph: the tag of NodeProto.op_type, the length, and the name.
_OPERATOR = re.compile(rb'"(.)([A-Z]\w+)', re.DOTALL)


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that graphs run with.

    Attributes:
        library: the library of our own kernels; None for the form of the graphs without them.
        provider_options: options that keep attention from faulty backends.
        warning: why our own kernels are not used although the GPU has code for them, "" if nothing is wrong.
    """

    library: Path | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""


def choose_kernels(
    device: Device, report: Mapping[str, Any], folder: Path | None = None, *, shares_options: bool = False
) -> KernelChoice:
    """Return the kernels for the graphs of a folder. One line in the log says which form of them is used, and why.

    On a GPU that is not trusted, our operators that the graphs contain are checked here. None of our kernels is used if
    a case is wrong, did not run, or was not reached within the time limit (docs/decisions/0202).

    Args:
        device: where the graphs run.
        report: report of the optimized folder.
        folder: the folder; None for graphs that are not yet known, which may have any operator.
        shares_options: whether all sessions have the same session options, which can register a library once.

    Raises:
        FolderError: the kernel cases cannot be read.
        OptionError: SDONNX_KERNELS or SDONNX_SELF_CHECK has a value that cannot be used.
        ProviderError: SDONNX_SELF_CHECK is strict, and kernels cannot be used.
    """
    capability = device.capability()
    if capability is None:
        return KernelChoice()
    mode, run = self_check(), device_thread(device).run
    limit_s = math.inf if mode == STRICT else LIMIT_S
    avoided = 0 if mode == OFF else sdpa_kernel(str(onnxruntime.__version__), capability)
    options = {"sdpa_kernel": str(avoided)} if avoided else {}
    parts, given = report.get("components"), report.get("options")
    components = [part for part in parts.values() if isinstance(part, Mapping)] if isinstance(parts, Mapping) else []
    if mode == STRICT:
        used = {name for part in components for name in part.get("operators_after") or ()}
        faults = run(lambda: kernel_faults(device.index, None, used, sdpa_kernel=avoided, limit_s=limit_s))
        _require_none(faults, "ONNX Runtime's")
    if not isinstance(given, Mapping) or given.get("kernels") != "auto":
        return KernelChoice(None, options)  # the folder has one form
    library, reason = usable_library(capability)
    if library is not None and shares_options:
        library, reason = None, "session options of the caller are used"
    if library is None:
        _LOGGER.info("using ONNX Runtime's kernels only: %s", reason)
        return KernelChoice(None, options)
    if mode == STRICT or (mode == ON and not is_trusted(capability)):
        operators = None if folder is None else _operators(folder)
        formats = formats_of_types(name for part in components for name in part.get("quantized") or ())
        faults = run(lambda: kernel_faults(device.index, library, operators, formats, limit_s=limit_s))
        if mode == STRICT:
            _require_none(faults, "our own")
        if faults:
            _LOGGER.info("using ONNX Runtime's kernels only: our own %s", _first_of(faults))
            warning = (
                f"our own kernels are not used, as {_first_of(faults)}; expected correct ones; ONNX Runtime's are "
                "used, which are slower; run sdonnx doctor, which checks all, or set SDONNX_KERNELS=0 to do without"
            )
            return KernelChoice(None, options, warning)
    _LOGGER.info("using our own kernels of %s", library.path)
    return KernelChoice(library.path, options)


def _operators(folder: Path) -> set[str]:
    """Return the operators of a folder's graphs with ours, and a few other words: the run-time has no onnx."""
    contents = (path.read_bytes() for path in folder.glob(f"*/{own_kernel_graph('*')}"))
    found = (match.groups() for content in contents for match in _OPERATOR.finditer(content))
    return {name[: length[0]].decode() for length, name in found if len(name) >= length[0]}


def _first_of(faults: list[str]) -> str:
    return faults[0] + (f", and {len(faults) - 1} more" if faults[1:] else "")


def _require_none(faults: list[str], owner: str) -> None:
    if faults:
        raise ProviderError(
            f"of {owner} kernels, {_first_of(faults)}",
            "correct ones, as SDONNX_SELF_CHECK is strict",
            "run sdonnx doctor, which shows all cases, or unset SDONNX_SELF_CHECK",
        )
