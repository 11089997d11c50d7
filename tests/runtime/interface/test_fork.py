"""Processes that are started while a pipeline is loaded: one line after fork(), images with spawn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The script forks in a process of its own: the test process has threads, and Python 3.12 warns about forking it.
FORKED = """
import os, sys, time, warnings
from sdonnx import OrtDiffusionPipeline, SdonnxError

usual = dict(height=32, width=32, num_inference_steps=1, output_type="np", seed=0)
pipeline = OrtDiffusionPipeline.from_pretrained(sys.argv[1])
first = pipeline("fox", **usual).images
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    start = time.monotonic()
    uses = (
        lambda: pipeline("fox", **usual),
        lambda: pipeline.warmup([(1, 32, 32)]),
        lambda: pipeline.captured_sizes,
    )
    for use in uses:
        try:
            use()
        except SdonnxError as error:
            print(error, flush=True)
    pipeline.close()
    assert time.monotonic() - start < 5
    with OrtDiffusionPipeline.from_pretrained(sys.argv[1]) as own:
        print((own("fox", **usual).images == first).all(), flush=True)
    os._exit(7)  # as multiprocessing ends its processes
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
print(os.waitstatus_to_exitcode(status))
print((pipeline("fox", **usual).images == first).all())
"""

# Children that end as any program does. Text of C is written when its buffer is flushed.
ENDED = """
import atexit, ctypes, multiprocessing, os, signal, sys, warnings
from sdonnx import OrtDiffusionPipeline

usual = dict(height=32, width=32, num_inference_steps=1, output_type="np", seed=0)
pipeline = OrtDiffusionPipeline.from_pretrained(sys.argv[1])
pipeline("fox", **usual)
warnings.simplefilter("ignore", DeprecationWarning)

def begin(how):
    signal.alarm(60)
    atexit.register(print, how, "handler")
    ctypes.CDLL(None).printf(b"%s C\\n", how.encode())
    print(how, "Python")

def work():
    begin("multiprocessing")
    sys.exit(4)

process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
print("multiprocessing", process.exitcode, flush=True)
for how in ("falls off", "exits", "deletes", "loads"):
    child = os.fork()
    if child == 0:
        begin(how)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    how = "parent"
if how == "exits":
    sys.exit(3)
if how == "deletes":
    del pipeline
if how == "loads":
    pipeline = OrtDiffusionPipeline.from_pretrained(sys.argv[1])
    pipeline("fox", **usual)
    grandchild = os.fork()
    if grandchild:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    signal.alarm(60)
    sys.exit(5)
"""

SPAWNED = """
import multiprocessing, sys

def generate(folder):
    from sdonnx import OrtDiffusionPipeline

    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        return pipeline("fox", height=32, width=32, num_inference_steps=1, output_type="np", seed=0).images

if __name__ == "__main__":
    here = generate(sys.argv[1])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print((pool.apply(generate, (sys.argv[1],)) == here).all())
        # Leaving the block terminates workers: one that frees the lock of tqdm just then leaves a warning.
        pool.close()
        pool.join()
"""


def _run(code: str, folder: Path, tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_forked_process_gets_one_line(micro_cpu: Path, tmp_path: Path) -> None:
    *errors, own, status, parent = _run(FORKED, micro_cpu, tmp_path)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("the pipeline was loaded before fork()")
        assert 'load it after the fork, or start processes with "spawn"' in error
    assert (own, status, parent) == ("True", "7", "True")


def test_forked_processes_end_with_their_status(micro_cpu: Path, tmp_path: Path) -> None:
    """Destructors of the inherited sessions would crash or wait for threads that do not exist."""
    lines = _run(ENDED, micro_cpu, tmp_path)
    statuses = {"multiprocessing": 4, "falls off": 0, "exits": 3, "deletes": 0, "loads": 5}
    assert [line for line in lines if line[-1].isdigit()] == [f"{how} {status}" for how, status in statuses.items()]
    for how in statuses.keys() - {"multiprocessing", "loads"}:
        assert sorted(line for line in lines if line.startswith(how)) == sorted(
            f"{how} {each}" for each in ("C", "Python", "handler", statuses[how])
        )
    assert "multiprocessing Python" in lines  # which ends its processes without exit handlers
    assert lines.count("loads Python") == 2  # by both processes, as the text was not written when the second began


def test_spawned_process_generates(micro_cpu: Path, tmp_path: Path) -> None:
    assert _run(SPAWNED, micro_cpu, tmp_path) == ["True"]
