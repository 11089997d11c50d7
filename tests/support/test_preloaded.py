"""Processes that are forked with torch imported behave like ones that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.preloaded import interpreter, python

SHOWN = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("SDONNX_SHOWN"), sys.path[0], __name__, sys.orig_argv[1:])
print(sys.stdin.read(), end="")
print("an error", file=sys.stderr)
sys.exit(7)
"""
WAITING = """
import os, sys, time
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SHOWN)
    return path


def test_behaves_like_a_process_of_python(script: Path, tmp_path: Path) -> None:
    environment = os.environ | {"SDONNX_SHOWN": "yes"}

    def ended(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input="typed\n", capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    expected = ended(sys.executable, str(script), "a", "b c")
    assert expected[0] == 7
    assert ended(*python(str(script), "a", "b c")) == expected
    assert ended(str(interpreter(tmp_path / "python")), str(script), "a", "b c") == expected


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals_reach_the_process(number: signal.Signals, status: int, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    with subprocess.Popen(python(str(tmp_path / "waiting.py")), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        assert forked != process.pid
        process.send_signal(number)
        assert process.wait(20) == status
    deadline = time.monotonic() + 20
    while Path(f"/proc/{forked}").exists():
        assert time.monotonic() < deadline, "the process goes on without its client"
        time.sleep(0.01)
