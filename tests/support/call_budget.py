"""Count the calls that take most of a test run, and hold them to a budget.

The time of a run depends on the machine; the number of exports, optimizations and compilations does not. Each call that
returns appends a line to a file that the processes of a run share. pytest names the running test in the environment, so
calls in processes that the tests fork count as well.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from support.import_hooks import after_import

__all__ = ["BUDGET", "COUNTS", "count_calls", "counted_calls", "report", "start_counting"]

BUDGET: Mapping[str, int] = {"export": 200, "optimize": 102, "compile": 122}
"""The highest numbers of calls of a run without `--weekly`. They only fall, or the commit says why."""

COUNTS = "SDONNX_TEST_CALLS"
"""Environment variable that names the file of calls."""

_COUNTED = {
    "torch.export": ("export", "export"),
    "sdonnx.optimize.optimizer": ("optimize_folder", "optimize"),
    "sdonnx.compiler.module_graph": ("build_model", "compile"),
}


def start_counting(file: Path) -> None:
    """Create the file of calls, and let this process and those that it starts count."""
    file.touch()
    os.environ[COUNTS] = str(file)


def count_calls() -> None:
    """Count the calls of this process, if its environment names a file of calls."""
    if COUNTS in os.environ:
        for module, (name, kind) in _COUNTED.items():
            after_import(module, functools.partial(_count, name, kind))


def _count(name: str, kind: str, module: ModuleType) -> None:
    function: Callable[..., Any] = getattr(module, name)

    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)  # a refusal takes no time
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").split("::")[0]
        with open(os.environ[COUNTS], "a", encoding="utf-8") as stream:
            stream.write(f"{kind}\t{test}\n")
        return result

    setattr(module, name, counted)


def counted_calls(file: Path) -> Counter[tuple[str, str]]:
    """Return the number of calls by kind and test file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return Counter((kind, test) for kind, _, test in (line.partition("\t") for line in lines))


def report(calls: Mapping[tuple[str, str], int], budget: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the lines of a table of calls by test file, and a line for each kind that exceeds its budget."""
    kinds = tuple(budget)
    totals = {kind: sum(count for (each, _), count in calls.items() if each == kind) for kind in kinds}
    files = sorted(
        {test for _, test in calls}, key=lambda test: (-sum(calls.get((kind, test), 0) for kind in kinds), test)
    )
    rows = [*((test, [calls.get((kind, test), 0) for kind in kinds]) for test in files), ("total", [*totals.values()])]
    rows.append(("budget", [*budget.values()]))
    table = [f"{'':64}" + "".join(f"{kind:>10}" for kind in kinds)]
    table += [f"{name:64}" + "".join(f"{count:10}" for count in counts) for name, counts in rows]
    over = [
        f"{totals[kind]} calls of {kind}; the budget is {limit} (tests/support/call_budget.py)"
        for kind, limit in budget.items()
        if totals[kind] > limit
    ]
    return table, over
