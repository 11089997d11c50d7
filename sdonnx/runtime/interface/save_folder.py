"""Copies of an optimized folder with another scheduler configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OutputError, SdonnxError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.folder.copy_folder import copy_folder
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, atomic_folder

__all__ = ["changed_files", "save_folder", "stale_files"]

_SCHEDULER = "scheduler/scheduler_config.json"


def changed_files(folder: PipelineFolder, scheduler_config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the files that another scheduler configuration changes, by path with `/`."""
    if folder.config("scheduler", "scheduler_config.json") == dict(scheduler_config):
        return {}
    index = {**folder.index, "scheduler": ["diffusers", scheduler_config["_class_name"]]}
    contents = {_SCHEDULER: scheduler_config, MODEL_INDEX: index}
    return {name: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode() for name, content in contents.items()}


def stale_files(changed: Mapping[str, bytes]) -> frozenset[str]:
    """Return the files that do not belong into a changed copy: the certificate holds the hash of every file."""
    return frozenset({CERTIFICATE, CERTIFICATE_PAGE}) if changed else frozenset()


def save_folder(
    folder: PipelineFolder, out: Path | str, scheduler_config: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Write a copy of an optimized folder; on failure, nothing is left.

    Args:
        folder: the folder to copy.
        out: the folder to write.
        scheduler_config: content of the copy's `scheduler_config.json`.
        overwrite: whether to replace a pipeline folder at `out`.

    Raises:
        OutputError: `out` exists, overlaps `folder`, or cannot be written.
        FolderError: a file of `folder` cannot be read.
    """
    if not isinstance(out, str | Path) or not str(out):
        raise OutputError(f"the output is {out!r}", "a path", "pass the folder to write")
    changed = changed_files(folder, scheduler_config)
    stale = stale_files(changed)

    def ignored(at: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(at) == folder.path and (name in stale or name.startswith("."))]

    try:
        with atomic_folder(Path(out), overwrite=overwrite, inputs=[folder.path]) as partial:
            copy_folder(folder.path, partial, ignored)
            for name, content in changed.items():
                (partial / name).write_bytes(content)
    except SdonnxError as error:
        if "pass --overwrite" in error.remedy:
            raise type(error)(error.found, error.expected, "pass overwrite=True to replace it") from None
        raise
    except OSError as error:
        raise FolderError(f"{folder.path} cannot be copied ({error.strerror or error})", "readable files") from error
