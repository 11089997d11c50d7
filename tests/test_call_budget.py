"""The budget of exports, optimizations and compilations of a test run."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import call_budget
from support.call_budget import BUDGET, COUNTS, count_calls, counted_calls, report, start_counting

MODULE = "counted_module"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of calls of a process that counts the calls of a module, which it has not imported yet."""
    (tmp_path / f"{MODULE}.py").write_text("def work(value):\n    return 2 / value\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(call_budget, "_COUNTED", {MODULE: ("work", "export")})
    monkeypatch.setenv(COUNTS, "")
    start_counting(tmp_path / "calls")
    count_calls()
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path / "calls"


def test_counts_calls_by_file(calls: Path) -> None:
    module = importlib.import_module(MODULE)
    assert [module.work(each) for each in (1, 2)] == [2, 1]
    with pytest.raises(ZeroDivisionError):  # what fails has not done the work
        module.work(0)
    assert counted_calls(calls) == Counter({("export", "tests/test_call_budget.py"): 2})


def test_a_run_that_exceeds_the_budget_fails() -> None:
    calls = Counter({("export", "tests/a.py"): 2, ("export", "tests/b.py"): 3, ("compile", "tests/a.py"): 1})
    table, over = report(calls, {"export": 4, "optimize": 0, "compile": 1})
    assert [line.split() for line in table] == [
        ["export", "optimize", "compile"],
        ["tests/a.py", "2", "0", "1"],
        ["tests/b.py", "3", "0", "0"],
        ["total", "5", "0", "1"],
        ["budget", "4", "0", "1"],
    ]
    assert over == ["5 calls of export; the budget is 4 (tests/support/call_budget.py)"]
    assert report(calls, {"export": 5, "optimize": 0, "compile": 1})[1] == []


def test_the_run_counts_what_the_package_has() -> None:
    """A renamed function would no longer be counted."""
    for module, (name, kind) in call_budget._COUNTED.items():
        assert hasattr(getattr(importlib.import_module(module), name), "__wrapped__"), name
        assert kind in BUDGET
