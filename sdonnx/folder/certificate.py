"""The certificate of an optimized folder, and the check that a loaded folder stays as it is.

A certificate is the result of `sdonnx verify` and the hashes of the files.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder, hash_file, read_json

__all__ = ["CERTIFICATE", "CERTIFICATE_PAGE", "FORMAT", "LoadedFolder", "certified_files", "require_certificate"]

CERTIFICATE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"

FORMAT = 1
"""Format of the certificate. Certificates of another format are refused."""

_VERIFY = "run sdonnx verify FOLDER --against ORIGINAL"
_SHOWN = 3


def certified_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and the SHA-256 of every file in a folder by its relative path, with `/` separators.

    The certificate and its page are left out, as are hidden files at the top, such as a partial certificate or the
    files of a file browser.

    Raises:
        FolderError: a file cannot be read.
    """
    paths = sorted(_files(folder))
    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL
        hashes = list(threads.map(hash_file, paths))
    return {
        path.relative_to(folder).as_posix(): {"bytes": size, "sha256": digest}
        for path, (size, digest) in zip(paths, hashes, strict=True)
    }


def require_certificate(folder: Path) -> Mapping[str, Any]:
    """Return the certificate of a folder, after a check that it passed and that the files are unchanged.

    Every file is read, at the speed of the disk or of SHA-256 (about 1 GB/s per core).

    Raises:
        FolderError: there is no certificate, it did not pass, or a file was added, removed or changed since.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise FolderError(f"{folder} has no {CERTIFICATE}", "a folder that was verified", _VERIFY)
    certificate = read_json(path)
    number, files = certificate.get("format"), certificate.get("files")
    if number != FORMAT or not isinstance(files, dict):
        raise FolderError(f"{path} has the format {number!r}", f"format {FORMAT}", _VERIFY)
    if certificate.get("passed") is not True:
        reasons = certificate.get("failures")
        first = f" ({reasons[0]})" if isinstance(reasons, list) and reasons else ""
        raise FolderError(f"{path} says that the folder failed{first}", "a certificate that passed", _VERIFY)
    found = certified_files(folder)
    changes = [
        *(f"{name} is new" for name in found.keys() - files.keys()),
        *(f"{name} is missing" for name in files.keys() - found.keys()),
        *(f"{name} has changed" for name in found.keys() & files.keys() if found[name] != files[name]),
    ]
    if changes:
        shown = ", ".join(sorted(changes)[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise FolderError(f"{folder} has changed since it was verified: {shown}{more}", "the verified files", _VERIFY)
    return certificate


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        place = path.relative_to(folder).parts
        if path.is_file() and not place[0].startswith(".") and place not in ((CERTIFICATE,), (CERTIFICATE_PAGE,)):
            yield path


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
