"""The verdict that the run-time draws with: what is kept, or a check at a GPU's first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from sdonnx.doctor.cache import read_verdict, write_verdict
from sdonnx.doctor.gpu import identity
from sdonnx.doctor.kernels import CORNERS_FILE, CornerSet, digest_of, read_corners
from sdonnx.doctor.sessions import Open, open_on
from sdonnx.doctor.verdict import Verdict, judge

__all__ = ["LIMIT_S", "SELF_CHECK", "KernelWarning", "complaint", "first_use", "is_wanted"]

SELF_CHECK = "SDONNX_SELF_CHECK"
"""The environment variable that leaves the check out where it is 0."""

LIMIT_S = 10.0
"""Seconds after which the check at a first use begins nothing more; the libraries are loaded before."""

# What to optimize a folder without, where an operator's kernel lies (`sdonnx.fusions.DISABLING`).
_WITHOUT = {
    "GroupNorm": "--disable_group_norm",
    "SkipGroupNorm": "--disable_skip_group_norm",
    "BiasSplitGelu": "--disable_bias_splitgelu",
    "BiasAdd": "--disable_bias_add",
    "FastGelu": "--disable_fast_gelu",
    "NhwcConv": "--disable_nhwc_conv",
    "SkipLayerNormalization": "--disable_skip_layer_norm",
    "SkipSimplifiedLayerNormalization": "--disable_skip_layer_norm",
    "MultiHeadAttention": "--disable_attention",
}


class KernelWarning(UserWarning):
    """A kernel of ONNX Runtime gives wrong numbers on this GPU, or could not be checked."""


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether kernels are to be checked at all."""
    return environment.get(SELF_CHECK, "1") != "0"


def first_use(
    index: int,
    *,
    folder: Path | None = None,
    corners: Path = CORNERS_FILE,
    open_kernel: Open | None = None,
    identify: Callable[[int, str], Mapping[str, str]] = identity,
    read: Callable[[Path], CornerSet] = read_corners,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Return the verdict on a GPU: the one that is kept, or that of a quick check, which is kept then.

    With a verdict that is kept this reads two files. A folder that cannot be written costs the check each time.

    Args:
        index: the number of the GPU.
        folder: where verdicts are kept, by default the user's cache.
        corners: the file of corners.
        open_kernel: what opens graphs on the GPU.
        identify: what tells the machine, of the GPU's number and the digest of the corners.
        read: what reads the corners.
        limit_s: seconds after which no corner is begun.

    Raises:
        FolderError: the corners cannot be read.
    """
    key = identify(index, digest_of(corners))
    kept = read_verdict(key, folder)
    if kept is not None:
        return kept
    corner_set, open_kernel = read(corners), open_kernel or open_on("cuda", index)
    _load_libraries(corner_set, open_kernel)
    verdict, _ = judge(corner_set, open_kernel, key, full=False, limit_s=limit_s)
    if verdict.lasting:
        write_verdict(verdict, folder)
    return verdict


def _load_libraries(corners: CornerSet, open_kernel: Open) -> None:
    """Open one graph, which loads gigabytes of libraries: from a cold disk that takes longer than the check."""
    check = next(check for check in corners.checks if check.first and not check.corner.weights)
    with suppress(Exception):  # the check itself will say
        open_kernel(corners.graphs[check.kernels["float16"]], {}, 0)


def complaint(verdict: Verdict, operators: Collection[str]) -> str:
    """Return one line on what a user has to know before a folder is drawn with, "" where there is nothing.

    Args:
        verdict: the verdict on the GPU.
        operators: what the folder's graphs hold; another operator's kernel does it no harm.
    """
    wrong = sorted({row.operator for row in verdict.faults} & set(operators))
    gpu = verdict.key.get("gpu") or "this GPU"
    if wrong:
        flags = " ".join(dict.fromkeys(_WITHOUT[name] for name in wrong if name in _WITHOUT))
        mend = f"optimize the folder again with {flags}" if flags else "use another version of onnxruntime-gpu"
        return (
            f"ONNX Runtime's {', '.join(wrong)} gives wrong numbers on {gpu}; expected those of its reference; "
            f"{mend}, or see python -m sdonnx doctor"
        )
    if not verdict.lasting:
        lost = [f"; {row.operator} did not run ({row.failure})" for row in verdict.unavailable[:1]]
        return (
            f"the kernels of {gpu} were not all checked in {verdict.seconds:.0f} s{''.join(lost)}; "
            "expected a check of all; run python -m sdonnx doctor once"
        )
    return ""
