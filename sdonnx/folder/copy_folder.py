"""Copy a folder with entries of any kind."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from sdonnx.errors import FolderError

__all__ = ["copy_folder"]

_TEXT_FILES = (".json", ".txt")  # of a pipeline; a folder of such a name is a broken copy


def copy_folder(source: Path, target: Path, ignore: Callable[[str, list[str]], Iterable[str]] | None = None) -> None:
    """Copy the files of a folder and follow links; `target` may exist.

    Args:
        source: the folder.
        target: the copy.
        ignore: returns the names to leave out, as in `shutil.copytree`.

    Raises:
        FolderError: an entry of `source` cannot be read as a file: it is a pipe, a link in a circle, a folder instead
            of a file, or without permission.
    """
    for at, folders, files in os.walk(source):
        for name in (*folders, *files):
            if (reason := _why_unreadable(Path(at, name))) is not None:
                raise FolderError(f"{Path(at, name)} cannot be read ({reason})", "a file", "copy the folder again")
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)


def _why_unreadable(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(mode):
        if path.is_symlink() and Path(os.path.realpath(path)) in Path(os.path.realpath(path.parent), "x").parents:
            return "it is a link to a folder that contains it"
        return "it is a folder" if path.suffix in _TEXT_FILES else None
    if not stat.S_ISREG(mode):
        return "it is not a file"
    return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
