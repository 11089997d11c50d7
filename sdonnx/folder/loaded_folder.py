"""The folder of a loaded pipeline, of which files are read later: its files have to stay as they are."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.folder.pipeline_folder import PipelineFolder

__all__ = ["LoadedFolder"]

# Time of the last change in nanoseconds, and size in bytes. Inodes say no more about a copy, and file systems of
# object stores give a file another one at any time.
_Stamp = tuple[int, int]


@dataclass(frozen=True)
class LoadedFolder(PipelineFolder):
    """A pipeline folder; its files have to stay as they were when it was opened.

    Graphs and weights are read on first use, and weights again for adapters. From a folder that was replaced, they
    would make a mixture of two models. Configurations that were read stay in memory.
    """

    _stamps: dict[str, _Stamp] = field(default_factory=dict, init=False, repr=False, compare=False)
    _configs: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for at, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(at, name)
                stamp = _stamp(path)
                if stamp is not None and name not in (CERTIFICATE, CERTIFICATE_PAGE):  # written for a loaded folder
                    self._stamps[path] = stamp

    @classmethod
    def open(cls, path: Path | str) -> LoadedFolder:
        """Open the pipeline folder at `path`, remember which files it has, and read the configurations of components.

        Raises:
            FolderError: the folder is missing, is not a pipeline, or its index is broken.
        """
        opened = PipelineFolder.open(path)
        folder = cls(opened.path, opened.index)
        for file in sorted(folder.path.glob("*/config.json")):
            with contextlib.suppress(FolderError):  # raised again if it is read
                folder.config(file.parent.name)
        return folder

    def require_unchanged(self, name: str = "") -> None:
        """Raise FolderError unless the files of a component, by default of the whole folder, are as they were.

        Files that were added do not matter.
        """
        place = os.path.join(self.path, name, "")
        for path, stamp in self._stamps.items():
            if not path.startswith(place):
                continue
            if _stamp(path) != stamp:
                found = f"{path} has changed since the pipeline was loaded"
                if not self.path.is_dir():
                    found = (
                        f"{self.path} was moved or deleted, and the pipeline that was loaded has to read a file of it"
                    )
                raise FolderError(found, "the folder as it was loaded", "load the pipeline again")

    def component(self, name: str) -> Path:
        """Return the folder of the component `name`.

        Raises:
            FolderError: the folder does not exist, has changed since it was opened, or a link in it leads out of the
                pipeline folder.
        """
        self.require_unchanged(name)
        return super().component(name)

    def config(self, name: str, file: str = "config.json") -> dict[str, Any]:
        """Return a copy of a configuration of the component `name`, which is read once.

        Raises:
            FolderError: the component or its configuration is missing or broken.
        """
        key = (name, file)
        if key not in self._configs:
            self._configs[key] = super().config(name, file)
        return copy.deepcopy(self._configs[key])


def _stamp(path: str) -> _Stamp | None:
    """Return the stamp of a file, links followed; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
