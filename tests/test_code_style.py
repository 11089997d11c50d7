"""Code style rules that ruff does not check."""

from __future__ import annotations

import ast
from pathlib import Path

import sdonnx

_PACKAGE = Path(sdonnx.__file__).parent

_MAX_ASSERTS_FOR_TYPES = 6


def _asserts_that_a_value_is_present(path: Path) -> list[str]:
    """Return the places of asserts with `x is not None`, by file and line."""
    return [
        f"{path.relative_to(_PACKAGE)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and any(map(_is_presence, ast.walk(node.test)))
    ]


def _is_presence(node: ast.AST) -> bool:
    """Return whether a node is `x is not None`."""
    return isinstance(node, ast.Compare) and ast.unparse(node).endswith(" is not None")


def test_optional_values_are_read_with_accessors() -> None:
    """`sdonnx.graph.edit` has `required`, `input_of`, `producer_node` and others, which name the missing part."""
    found = [place for path in sorted(_PACKAGE.rglob("*.py")) for place in _asserts_that_a_value_is_present(path)]
    assert len(found) <= _MAX_ASSERTS_FOR_TYPES, "\n".join(found)


def _bound_twice(path: Path) -> list[str]:
    """Return the names that a module's statements bind twice, by file; a read between both sees the other value."""
    found = list[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        found += [name.id for name in names if isinstance(name.ctx, ast.Store)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
            found.append(node.name)
    return sorted({f"{path.relative_to(_PACKAGE)}: {name}" for name in found if found.count(name) > 1})


def test_modules_bind_a_name_once() -> None:
    assert [name for path in sorted(_PACKAGE.rglob("*.py")) for name in _bound_twice(path)] == []
