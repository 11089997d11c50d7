"""Code style rules that ruff does not check."""

from __future__ import annotations

import ast
from pathlib import Path

import sdonnx

_PACKAGE = Path(sdonnx.__file__).parent

_MAX_ASSERTS_FOR_TYPES = 6


def _asserts_that_a_value_is_present(path: Path) -> list[str]:
    """Return the places of `assert x is not None`, by file and line."""
    return [
        f"{path.relative_to(_PACKAGE)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.IsNot)
        and isinstance(node.test.comparators[0], ast.Constant)
        and node.test.comparators[0].value is None
    ]


def test_optional_values_are_read_with_accessors() -> None:
    """`sdonnx.graph.edit` has `required`, `input_of`, `producer_node` and others, which name the missing part."""
    found = [place for path in sorted(_PACKAGE.rglob("*.py")) for place in _asserts_that_a_value_is_present(path)]
    assert len(found) <= _MAX_ASSERTS_FOR_TYPES, "\n".join(found)
