"""What commands print, and how a signal ends them, also where the exception is dropped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from sdonnx import terminal
from sdonnx.terminal import INTERRUPTED, TERMINATED

PROGRAM = """
import argparse, sys, time
from sdonnx.terminal import INTERRUPTED, guarded, interruption_handled

def dropped(_):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except BaseException:
        pass
    time.sleep(60)

def cleaned(_):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(1.2)
        print("cleaned")

def continued(_):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        interruption_handled()
    time.sleep(1.2)
    print("continued")
    return INTERRUPTED

sys.exit(guarded(globals()[sys.argv[1]], argparse.Namespace(debug=False)))
"""

LINE = "interrupted; no partial output was left; run the command again\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
@pytest.mark.parametrize(
    ("command", "output", "errors"),
    [("dropped", "", LINE), ("cleaned", "cleaned\n", LINE), ("continued", "continued\n", "")],
)
def test_interrupted_command(command: str, output: str, errors: str, number: int, status: int) -> None:
    # A test run in the background ignores SIGINT, and its children would inherit that.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    arguments = [sys.executable, "-c", start + PROGRAM, command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        found = process.communicate(timeout=30)
    assert (process.returncode, *found) == (status, output, errors)


def test_a_long_phase_is_printed_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a line, where the output is a log: tracing takes a minute without a sign of life."""
    monkeypatch.setattr(terminal, "LOG_INTERVAL_S", 0.05)
    with terminal.tensor_progress() as progress:
        progress("unet: tracing", 0, 0)
        progress("unet: tracing", 0, 0)
        time.sleep(0.5)
        progress("unet: writing", 1, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "unet: tracing"
    assert lines[-1] == "unet: writing"
    assert "unet: tracing, 0 s" in lines[1:-1]


def test_fallbacks_of_transformers_are_no_line() -> None:
    code = """
from sdonnx.terminal import log_to_stderr
with log_to_stderr("info"):
    from transformers import CLIPImageProcessor
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
