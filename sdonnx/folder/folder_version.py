"""Kind, version and target of a pipeline folder, and the warnings and errors raised on a mismatch.

`format` in `sdonnx.json` is raised when the run-time can no longer use folders of the previous format; the rules are
in docs/decisions/0105-folder-format-2.md.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sdonnx._version import __version__
from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, REPORT, read_json

__all__ = [
    "FORMAT",
    "FolderKind",
    "RebuildWarning",
    "command_for",
    "folder_kind",
    "notices",
    "read_report",
    "require_diffusers",
    "require_exported",
    "require_provider",
]

# File of the denoiser's graph in an optimized folder: `sdonnx.models.abi.STEP`.
_STEP = "step.onnx"


class FolderKind(StrEnum):
    """The kind of a pipeline folder; the value is its name in messages."""

    DIFFUSERS = "a diffusers pipeline"
    EXPORTED = "an exported pipeline, not optimized"
    OPTIMIZED = "an optimized pipeline"


def folder_kind(path: Path) -> FolderKind:
    """Return the kind of a pipeline folder."""
    if (path / REPORT).is_file():
        return FolderKind.OPTIMIZED
    return FolderKind.EXPORTED if any(path.glob(f"*/{ONNX_MODEL}")) else FolderKind.DIFFUSERS


def require_diffusers(path: Path) -> None:
    """Raise FolderError if a pipeline folder is exported or optimized already."""
    kind = folder_kind(path)
    if kind is FolderKind.EXPORTED:
        raise FolderError(f"{path} is ONNX already", FolderKind.DIFFUSERS, f"optimize it: {_optimize(path)}")
    if kind is FolderKind.OPTIMIZED:
        remedy = f"generate images with it: sdonnx generate -m {path} -p PROMPT -o image.png"
        raise FolderError(f"{path} is optimized already", FolderKind.DIFFUSERS, remedy)


def require_exported(path: Path) -> None:
    """Raise FolderError if a pipeline folder is not exported, or optimized already."""
    kind = folder_kind(path)
    if kind is FolderKind.DIFFUSERS:
        remedy = f"export it first: sdonnx export -m {path} -o EXPORTED"
        raise FolderError(f"{path} is a diffusers pipeline without ONNX graphs", "an exported pipeline", remedy)
    if kind is FolderKind.OPTIMIZED:
        raise FolderError(f"{path} is optimized already", "an exported pipeline", "pass the exported folder")


def _missing_report(path: Path) -> FolderError:
    """Return the error about a pipeline folder that is not optimized, or has lost its report."""
    found, expected = f"{path} has no {REPORT}", "an optimized pipeline"
    if any(path.glob(f"*/{_STEP}")):
        return FolderError(f"{found}, but {_STEP}", expected, "copy the folder again, or optimize again")
    if folder_kind(path) is FolderKind.EXPORTED:
        return FolderError(f"{found}: it is exported, not optimized", expected, f"optimize it: {_optimize(path)}")
    remedy = f"export and optimize it: sdonnx export -m {path} -o EXPORTED, then {_optimize('EXPORTED')}"
    return FolderError(f"{found}: it is {FolderKind.DIFFUSERS}", expected, remedy)


def _optimize(path: Path | str) -> str:
    return f"sdonnx optimize -i {path} -o OPTIMIZED --float16 (without a GPU: --provider cpu)"


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
        raise _missing_report(folder)
    report = read_json(folder / REPORT)
    found = report.get("format", _UNNUMBERED)
    if found == FORMAT and isinstance(found, int):
        return report
    is_older = isinstance(found, int) and not isinstance(found, bool) and _UNNUMBERED <= found < FORMAT
    raise FolderError(
        f"{folder} has format {found!r} of sdonnx {report.get('sdonnx')}",
        f"format {FORMAT}, which sdonnx {__version__} reads",
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
    if (version := report.get("sdonnx")) != __version__:
        yield (
            f"written by sdonnx {version}, and this is {__version__}: it generates the same images as before; "
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
