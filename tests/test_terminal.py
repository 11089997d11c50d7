"""A command that a signal interrupts ends, also where the exception is dropped, and its cleanup is not interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
