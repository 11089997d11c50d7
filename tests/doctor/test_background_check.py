"""The check of a GPU in another process, which is a small program here."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctor import FOUND

from sdonnx.doctor.background_check import BackgroundCheck, check_command
from sdonnx.doctor.cache import verdict_as_json
from sdonnx.doctor.verdict import Verdict

LIMIT_S = 60

# Waits for a file, if given, and prints a report; notes its process id in a folder.
CHECKER = """
import os, pathlib, sys, time
folder, report, awaited = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(folder / f"started-{os.getpid()}").touch()
while awaited and not (folder / awaited).exists():
    time.sleep(0.01)
print(report, flush=True)
(folder / "ended").touch()
"""


def checker(folder: Path, report: str = "", awaited: str = "") -> Callable[[int], Sequence[str]]:
    report = report or json.dumps({"verdict": verdict_as_json(FOUND)})
    return lambda index: [sys.executable, "-c", CHECKER, str(folder), report, awaited]


def verdict_of(check: BackgroundCheck) -> Verdict | None:
    return check.verdict


def process_ids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("started-*")]


def test_reads_the_verdict_once(tmp_path: Path) -> None:
    check = BackgroundCheck(0, checker(tmp_path))
    assert verdict_of(check) is None
    check.join()  # not started
    for _ in range(3):
        check.start()
    check.join(LIMIT_S)
    assert verdict_of(check) == FOUND
    check.start()
    (process,) = process_ids(tmp_path)
    assert not Path(f"/proc/{process}").exists()  # no zombie


@pytest.mark.parametrize("own", [None, replace(FOUND, key={"kernel_sources": "c0ffee"})])
def test_reads_the_verdict_on_our_own_kernels(own: Verdict | None, tmp_path: Path) -> None:
    """A GPU that cannot use them has none."""
    report = {"verdict": verdict_as_json(FOUND)} | ({} if own is None else {"own_kernels": verdict_as_json(own)})
    check = BackgroundCheck(0, checker(tmp_path, json.dumps(report)))
    assert check.own_verdict is None
    check.start()
    check.join(LIMIT_S)
    assert (check.verdict, check.own_verdict) == (FOUND, own)


def test_start_does_not_wait(tmp_path: Path) -> None:
    check = BackgroundCheck(0, checker(tmp_path, awaited="go"))
    check.start()
    check.join(0.1)
    assert verdict_of(check) is None
    (tmp_path / "go").touch()
    check.join(LIMIT_S)
    assert verdict_of(check) == FOUND


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([sys.executable, "-c", "raise SystemExit('no memory\\n')"], "no memory"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "status -9"),
        ([sys.executable, "-c", "print('{\"verdict\": 1}')"], "status 0"),
        (["/nowhere/python"], "No such file"),
    ],
)
def test_a_failure_is_one_line_in_the_log(command: list[str], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    check = BackgroundCheck(3, lambda index: command)
    with caplog.at_level(logging.INFO):
        check.start()
        check.join(LIMIT_S)
    assert verdict_of(check) is None
    (line,) = caplog.messages
    assert line.startswith("the kernels of GPU 3 were not checked in the background (")
    assert reason in line
    assert "\n" not in line
    assert line.endswith("run sdonnx doctor --quick once")


def test_the_check_outlives_the_process(tmp_path: Path) -> None:
    """A process that ends after its first image does not wait, and its check still ends by itself."""
    code = f"""
import sys
from sdonnx.doctor.background_check import BackgroundCheck
BackgroundCheck(0, lambda index: {checker(tmp_path, awaited="go")(0)!r}).start()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "go").touch()
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_real_command_checks_the_gpu(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it ends without a verdict. It imports this package although the current folder has another one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = check_command(2)
    assert command[-2:] == ["--json", "-"]
    assert command[command.index("--device") + 1] == "2"
    check = BackgroundCheck(2)
    check.start()
    check.join(LIMIT_S)
    assert verdict_of(check) is None
    assert "requirement is missing" in caplog.messages[0]


def test_the_process_has_a_low_priority_and_a_time_limit() -> None:
    program = check_command(0)[3].replace("from sdonnx.__main__ import main", "main = lambda _: None")
    shown = f"{program.partition('sys.exit')[0]}\nprint(os.nice(0), signal.alarm(0))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    nice, limit_s = map(int, done.stdout.split())
    assert nice == min(19, os.nice(0) + 10)
    assert 60 < limit_s <= 300
