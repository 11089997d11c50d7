"""Change modules right after they are imported, without importing them earlier.

A patch of a module that is not imported yet would import it, and most workers never need torch. Names that other
modules import from it later are the changed ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["after_import"]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.changes: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changes = self.changes.get(name)
        if changes is None:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` as soon as a module is imported, or now if it is imported already."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.changes.setdefault(name, []).append(change)
