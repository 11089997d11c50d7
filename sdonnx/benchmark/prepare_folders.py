"""Prepare the folders that the engines read: export and optimize those that are missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_version import FolderKind, folder_kind
from sdonnx.folder.pipeline_folder import PipelineFolder

if TYPE_CHECKING:
    from sdonnx.optimize.optimize_request import OptimizeRequest

__all__ = ["default_label", "folders_by_kind", "prepare_folders"]

Progress = Callable[[], AbstractContextManager[Any]]


def folders_by_kind(paths: Sequence[Path]) -> dict[FolderKind, Path]:
    """Return the given folders by kind.

    Raises:
        FolderError: a folder is not a pipeline.
        OptionError: two folders are of one kind.
    """
    folders: dict[FolderKind, Path] = {}
    for path in paths:
        kind = folder_kind(PipelineFolder.open(path).path)
        if kind in folders:
            raise OptionError(f"{folders[kind]} and {path} are both {kind}", "one folder of each kind")
        folders[kind] = path
    return folders


def default_label(folders: dict[FolderKind, Path], arch: str | None) -> str:
    """Return the default label of the model."""
    return arch or next(folders[kind] for kind in FolderKind if kind in folders).resolve().name


def prepare_folders(
    given: dict[FolderKind, Path],
    wanted: Collection[FolderKind],
    *,
    arch: str | None,
    work: Path,
    provider: str,
    progress: Progress,
    on_progress: Callable[[str], None],
    adapters: Sequence[str] = (),
    complete: Callable[[Path, OptimizeRequest], OptimizeRequest] | None = None,
) -> dict[FolderKind, Path]:
    """Return a folder of each kind that the engines read. Missing folders are written to the work folder.

    For `arch` a sample pipeline is written. A diffusers folder is exported, and an exported folder optimized. On a
    GPU, the optimized folder and an exported folder that an engine reads are float16. Folders of an earlier run are
    overwritten, because they may be from another version.

    Args:
        given: see `folders_by_kind`.
        wanted: kinds that the engines read.
        arch: the sample pipeline to start from.
        work: folder for the written folders.
        provider: "cuda" or "cpu".
        progress: context manager that yields a progress callback of export and optimization.
        on_progress: callback for messages.
        adapters: image-prompt adapters to export.
        complete: returns the request to optimize an exported folder, such as with quantization, for the usual request.

    Raises:
        SdonnxError: a folder cannot be made.
    """
    folders = dict(given)
    exporting = partial(_export, adapters=adapters, progress=progress, on_progress=on_progress)
    name = re.sub(r"[^\w.-]", "_", default_label(given, arch))
    float16 = provider == "cuda"
    if arch is not None and FolderKind.DIFFUSERS not in folders:
        from sdonnx.sample.write_sample import write_sample

        on_progress(f"sample pipeline {arch} -> {work / name}")
        write_sample(arch, work / name, overwrite=True)
        folders[FolderKind.DIFFUSERS] = work / name
    source = folders.get(FolderKind.DIFFUSERS)
    if FolderKind.OPTIMIZED in wanted and FolderKind.OPTIMIZED not in folders:
        exported = folders.get(FolderKind.EXPORTED)
        if exported is None and source is not None:
            exported = exporting(source, work / f"{name}-onnx", "float32")
            if not float16:
                folders[FolderKind.EXPORTED] = exported
        if exported is not None:
            from sdonnx.optimize.optimize_request import OptimizeRequest
            from sdonnx.optimize.optimizer import optimize_request
            from sdonnx.precision.policy import Precision

            request = OptimizeRequest(provider, Precision("float16" if float16 else "float32"))
            if complete is not None:
                request = complete(exported, request)
            out = work / f"{name}-optimized-{provider}"
            on_progress(f"optimize for {provider} -> {out}")
            with progress() as phases:
                optimize_request(exported, out, request, True, phases)
            folders[FolderKind.OPTIMIZED] = out
    if FolderKind.EXPORTED in wanted and FolderKind.EXPORTED not in folders and source is not None:
        dtype = "float16" if float16 else "float32"
        folders[FolderKind.EXPORTED] = exporting(source, work / f"{name}-onnx-{dtype}", dtype)
    return folders


def require_folder(folders: dict[FolderKind, Path], kind: FolderKind, engine: str, remedy: str) -> None:
    """Raise FolderError if there is no folder of that kind."""
    if kind not in folders:
        found = ", ".join(f"{path} is {given}" for given, path in folders.items())
        raise FolderError(found, f"{kind} for the engine {engine}", remedy)


def _export(
    source: Path,
    out: Path,
    dtype: str,
    *,
    adapters: Sequence[str],
    progress: Progress,
    on_progress: Callable[[str], None],
) -> Path:
    from sdonnx.export.export_pipeline import export_pipeline

    on_progress(f"export in {dtype} -> {out}")
    with progress() as phases:
        files = [Path(path) for path in adapters]
        export_pipeline(source, out, dtype=dtype, overwrite=True, ip_adapters=files, progress=phases)
    return out
