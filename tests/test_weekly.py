"""The weekly command: its record covers the tests that CI leaves out, and it continues after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def weekly() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return load_script("weekly")


def test_every_test_that_ci_leaves_out_has_a_step(weekly: Any, weekly_tests: frozenset[str]) -> None:
    """A test that neither CI nor `make weekly` runs does not exist."""
    names = [step.name for step in weekly.steps()]
    assert len(names) == len(set(names))
    files = {test.split("::")[0] for test in weekly_tests}
    assert any(name.startswith("tests/") for name in names)
    assert sorted(files - set(names)) == []


def test_recorded_steps_passed(weekly: Any) -> None:
    records = weekly.read_record(weekly.RECORD)
    names = {step.name for step in weekly.steps()}
    assert [name for name, record in records.items() if record["outcome"] != "passed" or name not in names] == []
    skipped = [test for record in records.values() for test, count in record.get("tests", {}).items() if not count]
    assert [test for test in skipped if exists(test)] == [], "only skipped"


def exists(test: str) -> bool:
    """Return whether a recorded test is still in its file."""
    file, _, function = test.partition("::")
    return f"def {function}(" in (ROOT / file).read_text(encoding="utf-8") or function.startswith("tests.")


def test_every_mutation_has_one_place(weekly: Any) -> None:
    mutate = sys.modules["mutate"]
    for mutation in mutate.MUTATIONS:
        mutate.mutated(mutation, ROOT / "sdonnx")


CASES = """
import pytest
@pytest.mark.parametrize("a", [1, 2, "x::y[z]"])
def test_a(a): pass
@pytest.mark.parametrize("b", [1, 2])
def test_b(b): assert b == 1
def test_c(): pytest.skip("no GPU")
"""


def test_results_are_by_test(weekly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weekly, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text(CASES)
    found = weekly._run(weekly._pytest("it", "-c", "/dev/null", "--rootdir=.", "test_it.py", named=True))
    assert (found["outcome"], found["counts"]) == ("failed", {"passed": 4, "failed": 1, "skipped": 1})
    assert found["failed"] == ["test_it.py::test_b[2]"]
    assert found["tests"] == {"test_it.py::test_a": 3, "test_it.py::test_b": 1, "test_it.py::test_c": 0}


def test_a_command_without_a_result_fails(weekly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weekly, "ROOT", tmp_path)
    monkeypatch.setattr(weekly, "_LIMIT_S", 0.1)
    for code, read in (("pass", json.loads), ("import time; time.sleep(60)", dict)):
        found = weekly._run(weekly.Step("it", ("-c", code), read))
        assert found["outcome"] == "failed"
        assert found["seconds"] < 60


@pytest.fixture
def run(weekly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs two steps, which are Python code, in a repository of its own."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / ".gitignore").write_text("/build/\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(weekly, "ROOT", tmp_path)
    monkeypatch.setattr(weekly, "environment", dict)

    def run(first: str, second: str, *arguments: str) -> int:
        steps = [weekly.Step(name, ("-c", code), lambda text: {"text": text}) for name, code in
                 (("first", first), ("second", second))]  # fmt: skip
        monkeypatch.setattr(weekly, "steps", lambda: steps)
        return int(weekly.main(["--record", str(tmp_path / "record.json"), *arguments]))

    return run


def test_a_run_continues_after_a_kill(
    weekly: Any, run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> dict[str, str]:
        records = weekly.read_record(tmp_path / "record.json")
        return {name: f"{record['outcome']} {record['text']}".strip() for name, record in records.items()}

    command = weekly._run

    def killed(step: Any) -> Any:
        if step.name == "second":
            raise KeyboardInterrupt
        return command(step)

    with monkeypatch.context() as patch:
        patch.setattr(weekly, "_run", killed)
        with pytest.raises(KeyboardInterrupt):
            run("print(1)", "print(2)")
    assert texts() == {"first": "passed 1"}
    assert run("print(3)", "exit(4)") == 1  # the first is not run again
    assert texts() == {"first": "passed 1", "second": "failed"}
    assert run("print(5)", "print(6)") == 0
    assert texts() == {"first": "passed 1", "second": "passed 6"}
    assert run("print(7)", "print(8)", "--restart", "--only", "fir") == 0
    assert texts() == {"first": "passed 7", "second": "passed 6"}
    monkeypatch.setattr(weekly, "_FRESH", timedelta(0))  # a week has passed
    assert run("print(9)", "exit(1)") == 1
    assert texts() == {"first": "passed 9", "second": "failed"}
