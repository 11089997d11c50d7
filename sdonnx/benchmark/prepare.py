"""The folders that engines read: those that were given, and those that are made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from sdonnx.benchmark.engine import FolderKind, kind_of_folder
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder import PipelineFolder

__all__ = ["folders_of", "label_of", "prepared"]

Progress = Callable[[], AbstractContextManager[Any]]


def folders_of(paths: Sequence[Path]) -> dict[FolderKind, Path]:
    """Return the given folders by kind.

    Raises:
        FolderError: one is no pipeline.
        OptionError: two are of one kind.
    """
    folders: dict[FolderKind, Path] = {}
    for path in paths:
        kind = kind_of_folder(PipelineFolder.open(path))
        if kind in folders:
            raise OptionError(f"{folders[kind]} and {path} are both {kind}", "one folder of each kind", "leave one out")
        folders[kind] = path
    return folders


def label_of(folders: dict[FolderKind, Path], arch: str | None) -> str:
    """Return what the model is called where the user does not say."""
    return arch or next(folders[kind] for kind in FolderKind if kind in folders).resolve().name


def prepared(
    given: dict[FolderKind, Path],
    wanted: Collection[FolderKind],
    *,
    arch: str | None,
    work: Path,
    provider: str,
    progress: Progress,
    told: Callable[[str], None],
    ip_adapters: Sequence[str] = (),
) -> dict[FolderKind, Path]:
    """Return a folder for each kind that is wanted; what is missing is made in the work folder.

    A sample is written for `arch`, a diffusers folder is exported, an exported one optimized; on a GPU what is
    optimized is float16, and so is the exported folder that ONNX Runtime runs as it is. What an earlier run left in
    the work folder is made anew: it could be another version's.

    Args:
        given: see `folders_of`.
        wanted: kinds that engines read.
        arch: a sample pipeline to start from.
        work: where folders are made.
        provider: "cuda" or "cpu".
        progress: a context manager that yields what phases are told to.
        told: told what is made.
        ip_adapters: what the pipeline is exported with.

    Raises:
        SdonnxError: a folder cannot be made.
    """
    folders = dict(given)
    exporting = partial(_export, ip_adapters=ip_adapters, progress=progress, told=told)
    name = re.sub(r"[^\w.-]", "_", label_of(given, arch))
    float16 = provider == "cuda"
    if arch is not None and FolderKind.DIFFUSERS not in folders:
        from sdonnx.sample import write_sample

        told(f"sample pipeline {arch} -> {work / name}")
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
            from sdonnx.optimize import optimize_folder

            out = work / f"{name}-optimized-{provider}"
            told(f"optimize for {provider} -> {out}")
            with progress() as phases:
                optimize_folder(exported, out, provider=provider, float16=float16, overwrite=True, progress=phases)
            folders[FolderKind.OPTIMIZED] = out
    if FolderKind.EXPORTED in wanted and FolderKind.EXPORTED not in folders and source is not None:
        dtype = "float16" if float16 else "float32"
        folders[FolderKind.EXPORTED] = exporting(source, work / f"{name}-onnx-{dtype}", dtype)
    return folders


def require_folder(folders: dict[FolderKind, Path], kind: FolderKind, engine: str, remedy: str) -> None:
    """Raise FolderError where no folder of that kind was given or could be made."""
    if kind not in folders:
        found = ", ".join(f"{path} is {given}" for given, path in folders.items())
        raise FolderError(found, f"{kind} for the engine {engine}", remedy)


def _export(
    source: Path, out: Path, dtype: str, *, ip_adapters: Sequence[str], progress: Progress, told: Callable[[str], None]
) -> Path:
    from sdonnx.export.pipeline import export_pipeline

    told(f"export in {dtype} -> {out}")
    with progress() as phases:
        adapters = [Path(path) for path in ip_adapters]
        export_pipeline(source, out, dtype=dtype, overwrite=True, ip_adapters=adapters, progress=phases)
    return out
