"""Each guarantee of the security page is one sentence, and names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "reference" / "security.md").read_text(encoding="utf-8")
GUARANTEES = PAGE.partition("## Guarantees")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in GUARANTEES.splitlines() if line.startswith("| ")]
SENTENCES = [(sentence, tests) for sentence, tests in ROWS if sentence not in ("guarantee", "---")]


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("sentence", "tests"), SENTENCES, ids=[sentence[:50] for sentence, _ in SENTENCES])
def test_a_guarantee_is_one_sentence_with_a_test(sentence: str, tests: str) -> None:
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
    named = re.findall(r"`([^`]+)`", tests)
    assert named
    assert ", ".join(f"`{each}`" for each in named) == tests
    for each in named:
        file, _, function = each.partition("::")
        assert function in functions(file)


def test_there_are_no_other_promises() -> None:
    """Between the tables are headings, and the sentence that introduces them."""
    prose = [line for line in GUARANTEES.splitlines() if line and not line.startswith(("|", "###"))]
    assert prose == ["Each names its tests."]
    assert len(SENTENCES) > 30
