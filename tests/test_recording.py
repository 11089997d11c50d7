"""Measurements of tests: one record of the file for each run, also if the run is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.recording import recorded

ROOT = Path(__file__).parent.parent

TESTS = """
import os
import signal
from pathlib import Path

import pytest
from support.recording import recorded

@pytest.fixture(scope="session")
def note():
    with recorded("some", Path("results.json")) as take:
        yield take

def test_first(note):
    note("times", {"s": 1.5})

def test_second(note):
    note("times", {"s": float("nan")})
    note("sizes", {"bytes": 3})

def test_third(note):
    if KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    note("times", {"s": 2.5})
"""


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("killed", [True, False])
def test_rows_are_written_by_each_test(killed: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.replace("KILLED", str(killed)))
    (tmp_path / "results.json").write_text('{"tests": "before"}')  # without a line end
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "test_it.py"]
    path = f"{ROOT}:{ROOT / 'tests'}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "SDONNX_COMMIT": "abc"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode == 0) is not killed, ran.stdout + ran.stderr
    before, record = lines(tmp_path / "results.json")
    assert before == {"tests": "before"}
    times = [{"s": 1.5}, {"s": None}, *([] if killed else [{"s": 2.5}])]
    assert record["measured"] == {"times": times, "sizes": [{"bytes": 3}]}
    assert (record["tests"], record["environment"]["git"]) == ("some", {"commit": "abc"})
    assert "test_it.py" in record["command"]
    assert {each.name for each in tmp_path.iterdir()} <= {"test_it.py", "results.json", "__pycache__"}


def test_failed_writes_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    with recorded("one", path) as note:
        note("a", {"n": 1})
        content = path.read_bytes()

        def failing(*_: object) -> None:
            raise OSError("no space")

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", failing)
            with pytest.raises(OSError, match="no space"):
                note("a", {"n": 2})
        assert path.read_bytes() == content
        assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert lines(path)[0]["measured"] == {"a": [{"n": 1}, {"n": 2}]}
