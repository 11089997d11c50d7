"""Engine processes: events, failures, and ending all children."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sdonnx.benchmark.processes import WorkerError, run_worker

JOB: dict[str, Any] = {
    "task": "round",
    "engine": "onnxruntime",
    "options": {"folder": "nowhere", "provider": "cpu"},
    "workload": {"steps": 2},
    "prompts": ["a fox"],
    "batch_count": 1,
}


def silent(text: str) -> None:
    """Ignore a message."""


def script(folder: Path, *lines: str) -> str:
    """Write a shell script that replaces the Python interpreter."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def event(name: str, value: str) -> str:
    return f"""echo '{{"event": "{name}", "value": {value}}}'"""


def test_events_are_passed_on_and_returned(tmp_path: Path) -> None:
    messages: list[str] = []
    noise = ["echo activating", "echo '[1, 2]'", "echo"]  # output of the environment, before the worker starts
    lines = [event("progress", '"half"'), event("points", "[[1, 2.5]]"), event("done", "null")]
    python = script(tmp_path, *noise, *lines)
    assert run_worker(JOB, messages.append, python=python) == {"points": [[1, 2.5]], "done": None}
    assert messages == ["half"]


def test_reported_failure() -> None:
    with pytest.raises(WorkerError, match=r"^nowhere does not exist; expected "):
        run_worker(JOB, silent)


def test_other_exceptions_are_one_line() -> None:
    with pytest.raises(WorkerError, match=r"^TypeError: Workload.* unexpected keyword argument 'stages'$"):
        run_worker(JOB | {"workload": {"stages": 2}}, silent)


def test_ignores_output_of_libraries(micro_cpu: Path) -> None:
    """Output of libraries on standard output is not an event."""
    job = JOB | {"options": {"folder": str(micro_cpu), "provider": "cpu"}, "task": "throughput"}
    job |= {"workload": {"steps": 2, "height": 64, "width": 64}}
    values = run_worker(job, print)
    assert [steps for steps, _ in values["points"]] == [1, 2]
    assert values["engine"]["scheduler"] == "PNDMScheduler"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["kill -9 $$"], "ended by SIGKILL, possibly because memory ran out"),
        (["kill -SEGV $$"], "ended by SIGSEGV"),
        (["echo first >&2", "echo 'No module named x' >&2", "exit 3"], "ended with status 3: No module named x"),
        (["exit 0"], "ended with status 0"),
    ],
)
def test_process_that_ends_without_a_result(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        run_worker(JOB, silent, python=script(tmp_path, *lines))
    assert str(caught.value) == message


def test_missing_interpreter() -> None:
    with pytest.raises(WorkerError, match="nowhere/python could not be started"):
        run_worker(JOB, silent, python="nowhere/python")


@pytest.mark.parametrize("line", ["exec sleep 60", "sleep 60", "sleep 60 & sleep 60"])
def test_ends_a_process_and_its_children_at_the_time_limit(line: str, tmp_path: Path) -> None:
    before, start = psutil.Process().children(), time.monotonic()
    with pytest.raises(WorkerError, match=r"^not done within 0\.3 s$"):
        run_worker(JOB, silent, python=script(tmp_path, line), timeout_s=0.3)
    assert time.monotonic() - start < 20
    assert psutil.Process().children() == before


def test_temporary_files_go_to_the_scratch_folder(tmp_path: Path) -> None:
    lines = [
        'echo "$TMPDIR $TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR $CUDA_CACHE_PATH $SDONNX_CACHE" >folders',
        event("done", "null"),
    ]
    (scratch := tmp_path / "scratch").mkdir()
    python = script(tmp_path, f"cd {tmp_path}", *lines)
    run_worker(JOB, silent, python=python, scratch=scratch)
    folders = [Path(folder) for folder in (tmp_path / "folders").read_text().split()]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.parent == scratch for folder in folders)


def test_interruption_ends_the_process(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        run_worker(JOB, interrupt, python=script(tmp_path, event("progress", '"here"'), "sleep 60"))
    assert psutil.Process().children() == before
