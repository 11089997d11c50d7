"""Processes that are started while a pipeline is loaded: one line after fork(), images with spawn."""

from __future__ import annotations

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
"""


def _run(code: str, folder: Path, tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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


def test_spawned_process_generates(micro_cpu: Path, tmp_path: Path) -> None:
    assert _run(SPAWNED, micro_cpu, tmp_path) == ["True"]
