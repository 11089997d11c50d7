"""Load scripts, which are in no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load_script"]

_ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """Return `scripts/NAME.py`, or `lab/NAME.py`, as the module NAME."""
    (path,) = (path for folder in ("scripts", "lab") if (path := _ROOT / folder / f"{name}.py").is_file())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
