"""Threads of a session: no more than the cores that the process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from support.graphs import graph

from sdonnx.runtime.device import session
from sdonnx.runtime.device.device import device_for

# Prints the number of threads before and after a graph is loaded on the given core.
LOADED = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {int(sys.argv[2])})
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
Graph(Path(sys.argv[1]), device_for("cpu"))
print(before, count(), *os.sched_getaffinity(0))
"""


@pytest.mark.parametrize(("usable", "cores", "threads"), [(1, 8, 1), (3, 8, 3), (8, 8, 0), (1, 1, 0)])
def test_threads_are_those_of_the_usable_cores(
    usable: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    options = session._session_options(device_for("cpu"), session.SessionSettings())
    assert options.intra_op_num_threads == threads


def test_own_options_stay() -> None:
    import onnxruntime

    own = onnxruntime.SessionOptions()
    own.intra_op_num_threads = 5
    settings = session.SessionSettings(session_options=own)
    assert session._session_options(device_for("cpu"), settings).intra_op_num_threads == 5


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: no other could be used")
def test_a_process_on_one_core_starts_no_thread(tmp_path: Path) -> None:
    ir.save(graph("float[2] x", "float[2] y", "y = Neg(x)"), tmp_path / "model.onnx")
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", LOADED, str(tmp_path / "model.onnx"), core]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after, *affinity = done.stdout.split()
    assert before == after
    assert affinity == [core]
