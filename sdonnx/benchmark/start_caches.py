"""Folders for the caches of the engines' processes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from sdonnx.benchmark.processes import make_caches
from sdonnx.benchmark.rivals import Rival
from sdonnx.benchmark.workload import Workload
from sdonnx.folder.cache_root import CACHE, cache_folder

__all__ = ["StartCaches"]


class StartCaches:
    """Compiler caches and temporary files: a folder for each engine and workload, empty for the first process.

    Results of checks of the GPU's kernels, which belong to the machine, are copied into each folder.

    Args:
        root: folder for the folders.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._numbers = root, itertools.count()
        self._folders: dict[tuple[Rival | None, Workload], Path] = {}

    def folder(self, rival: Rival | None, workload: Workload) -> Path:
        """Return the folder of an engine and a workload; None is the reference."""
        key = rival, workload
        if key not in self._folders:
            self._folders[key] = folder = self._root / f"caches-{next(self._numbers)}"
            folder.mkdir()
            own = Path(make_caches(folder)[CACHE])
            for path in cache_folder().glob("kernels-*.json"):
                shutil.copy(path, own)
        return self._folders[key]

    def delete(self, workload: Workload) -> None:
        """Delete the folders of a workload."""
        for key in [key for key in self._folders if key[1] == workload]:
            shutil.rmtree(self._folders.pop(key), ignore_errors=True)
