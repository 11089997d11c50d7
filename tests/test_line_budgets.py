"""The lines of each package have a limit, `tests/support/line_budgets.json`, which only falls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).parent / "support" / "line_budgets.json"
SLACK = 0.02  # of a limit: what may stay free before the limit has to fall
BUDGETS: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))


def lines(name: str) -> int:
    """Return the lines of Python files below a folder, of a package without its subpackages for `sdonnx`."""
    pattern = "*.py" if name == "sdonnx" else "**/*.py"
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / name).glob(pattern))


def test_every_package_has_a_limit() -> None:
    packages = {f"sdonnx/{path.name}" for path in (ROOT / "sdonnx").iterdir() if (path / "__init__.py").is_file()}
    assert set(BUDGETS) == packages | {"sdonnx", "tests", "scripts", "lab", "examples"}


@pytest.mark.parametrize("name", BUDGETS)
def test_lines_are_within_the_limit(name: str) -> None:
    """A commit that raises a limit says why. One that frees lines lowers it, so that they stay free."""
    found, limit = lines(name), BUDGETS[name]
    assert found <= limit, f"{name} has {found} lines, {found - limit} more than its limit in {FILE.name}"
    assert found >= limit - max(20, SLACK * limit), (
        f"{name} has {found} lines; lower its limit of {limit} in {FILE.name}"
    )
