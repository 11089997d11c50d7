"""The kind of a pipeline folder, and the next command for a folder of the wrong kind."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, REPORT

__all__ = ["FolderKind", "folder_kind", "missing_report", "require_diffusers", "require_exported"]

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


def missing_report(path: Path) -> FolderError:
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
