"""Version and target of an optimized folder, and the warnings and errors raised on a mismatch.

`format` in `sdonnx.json` is raised when the run-time can no longer use folders of the previous format; the rules are
in docs/decisions/0105-folder-format-2.md.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sdonnx
from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder.folder_kind import missing_report
from sdonnx.folder.pipeline_folder import REPORT, read_json

__all__ = ["FORMAT", "RebuildWarning", "command_for", "notices", "read_report", "require_provider"]

FORMAT = 2
"""Format of the folders that this version writes and reads."""

# Folders of the first versions have no format.
_UNNUMBERED = 0

# The first generation of GPUs on which attention is fastest unpacked (measured on an H200). No other
# property of the GPU changes a folder.
_UNPACKED_FROM = (9, 0)

_WORD = re.compile(r"[\w.:*,/=-]+")


class RebuildWarning(UserWarning):
    """A folder can be used, but optimizing again would improve it for this version or this GPU."""


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report of an optimized folder, the content of `sdonnx.json`.

    Raises:
        FolderError: the report is missing or broken, or the folder has another format than `FORMAT`.
    """
    if not (folder / REPORT).is_file():
        raise missing_report(folder)
    report = read_json(folder / REPORT)
    found = report.get("format", _UNNUMBERED)
    if found == FORMAT and isinstance(found, int):
        return report
    is_older = isinstance(found, int) and not isinstance(found, bool) and _UNNUMBERED <= found < FORMAT
    raise FolderError(
        f"{folder} has format {found!r} of sdonnx {report.get('sdonnx')}",
        f"format {FORMAT}, which sdonnx {sdonnx.__version__} reads",
        f"{'' if is_older else 'install the newer sdonnx, or '}rebuild it: {command_for(report)}",
    )


def require_provider(folder: Path, report: Mapping[str, Any], provider: str) -> None:
    """Raise unless the folder was optimized for an execution provider.

    Raises:
        ProviderError: it was optimized for another one.
    """
    if (made_for := report.get("provider")) != provider:
        raise ProviderError(
            f"{folder} was optimized for {made_for}",
            f"a folder for {provider}",
            f"rebuild it: {command_for(report, provider=provider)}",
        )


def notices(report: Mapping[str, Any], capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield one line for each reason to optimize the folder again.

    Args:
        report: the report of the folder (`read_report`).
        capability: compute capability of the GPU, major and minor; None for the CPU.
    """
    if (version := report.get("sdonnx")) != sdonnx.__version__:
        yield (
            f"written by sdonnx {version}, and this is {sdonnx.__version__}: it generates the same images as before; "
            f"to use the optimizations of this version, rebuild it: {command_for(report)}"
        )
    layout = report.get("attention_layout")
    if capability is not None and isinstance(layout, str):
        best = "unpacked" if capability >= _UNPACKED_FROM else "packed_qkv"
        if (layout == "unpacked") != (best == "unpacked"):
            yield (
                f"made with the attention layout {layout}, and this GPU is sm_{capability[0]}{capability[1]}: it "
                f"generates the same images; for the layout that is faster there, rebuild it: "
                f"{command_for(report, layout=best)}"
            )


def command_for(report: Mapping[str, Any], provider: str | None = None, layout: str | None = None) -> str:
    """Return the command that makes a folder again with the same options.

    Args:
        report: content of `sdonnx.json`. It is not trusted: values that are not valid options are left out.
        provider: another execution provider; None for the folder's provider.
        layout: another attention layout; None for the folder's layout.
    """
    chosen = _word(provider or report.get("provider"))
    words = ["sdonnx", "optimize", "-i", "EXPORTED", "-o", "OUT"]
    options = report.get("options")
    options = options if isinstance(options, Mapping) else {}
    if chosen != "cpu" and report.get("precision") == "float16":
        words.append("--float16")
        kept = [word for word in map(_word, _listed(options.get("force_fp32_ops"))) if word]
        words += ["--force_fp32_ops", *kept] if kept else []
        scales = [word for word in map(_word, _listed(options.get("norm_scale"))) if word]
        words += ["--norm_scale", *scales] if scales else []
        words += ["--bfloat16"] if options.get("bfloat16") is True else []
        words += ["--kernels", "none"] if options.get("kernels") == "none" else []
    if quantize := _quantization(options.get("quantize")):
        words += ["--quantize_config", quantize]
        words += ["--calibration", "CALIBRATION"] if "_static" in quantize else []
        words += ["--export_qdq"] if options.get("export_qdq") is True else []
    if chosen:
        words += ["--provider", chosen]
    if chosen != "cpu" and (reads := _word(layout or report.get("attention_layout"))) not in ("", "unpacked"):
        words += ["--attention_layout", reads]
    words += [f"--disable_{word}" for word in map(_word, _listed(report.get("disabled"))) if word]
    return shlex.join(words)


def _quantization(value: object) -> str:
    """Return a quantization configuration as JSON; "" if any name in it is not safe as a word of a command."""
    if not isinstance(value, Mapping):
        return ""
    modules = value.get("modules")
    names = [*modules, *modules.values()] if isinstance(modules, Mapping) else []
    names += [*value, value.get("quant_type"), *_listed(value.get("submodules"))]
    return json.dumps(value) if all(map(_word, names)) else ""


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _word(value: object) -> str:
    """Return a value that is safe as a word of a command, or "" for any other value."""
    return value if isinstance(value, str) and len(value) < 200 and _WORD.fullmatch(value) else ""
