"""Standard output that cannot be written ends a command with one line and status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdonnx.terminal import FAILURE

FULL = "error: standard output cannot be written (No space left on device); expected a file or a pipe that accepts it; "

PROGRAM = """
import argparse, sys
from pathlib import Path
from sdonnx.cli.write_images import STDOUT, Destination
from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import atomic_folder
from sdonnx.terminal import console, guarded

def image(_):
    Destination.of(STDOUT, 1, False).write(0, bytes(10**6))
    return 0

def inside_an_output(_):
    with atomic_folder(Path(sys.argv[2]) / "out"):
        console().print("unet: tracing")
    return 0

def other_error(_):
    print("text")
    raise OptionError("found", "expected", "remedy")

def other_oserror(_):
    Path("/proc/none/file").write_text("x")

sys.exit(guarded(globals()[sys.argv[1]], argparse.Namespace(debug=False)))
"""


def ended(arguments: list[str], output: str = "/dev/full") -> tuple[int, str]:
    with open(output, "w") as file:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["cache", "ls"], ["--help"], ["cache", "--help"]], ids=" ".join)
def test_a_command_with_a_full_output(arguments: list[str]) -> None:
    status, errors = ended(["-m", "sdonnx", *arguments])
    assert (status, errors.count("\n")) == (FAILURE, 1), errors
    assert errors.startswith(FULL)


@pytest.mark.parametrize("function", ["image", "inside_an_output", "other_error"])
def test_each_way_to_write(function: str, tmp_path: Path) -> None:
    status, errors = ended(["-c", PROGRAM, function, str(tmp_path)])
    assert (status, errors.count("\n")) == (FAILURE, 1), errors
    assert errors.startswith(FULL)
    assert list(tmp_path.iterdir()) == []


def test_another_error_is_reported_as_it_is() -> None:
    assert ended(["-c", PROGRAM, "other_error"], os.devnull) == (FAILURE, "error: found; expected expected; remedy\n")
    status, errors = ended(["-c", PROGRAM, "other_oserror"], os.devnull)
    assert status == 1
    assert "FileNotFoundError" in errors
