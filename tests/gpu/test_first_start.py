"""A new process with an empty cache: the time to its first image, with our own kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sdonnx.doctor.first_check import SELF_CHECK
from sdonnx.doctor.kernel_library import is_trusted, usable_library
from sdonnx.optimize.optimizer import optimize_folder
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.runtime.device.device import device_for

LIMIT_S = 600

# Prints the seconds from the start of the caller's clock to the first image, the time of the next one, the graph of a
# step, and whether images of one seed are equal. CLOCK_MONOTONIC is one clock for all processes of a machine.
#
# The parts of a start: the import, ONNX Runtime's sessions, the first runs of graphs, their captures, and of the first
# runs what our kernels need to open cuBLASLt and cuDNN, time cuBLASLt's algorithms, and plan cuDNN's convolutions.
PROGRAM = """
import ctypes, json, sys, time
from collections import defaultdict
from sdonnx import OrtDiffusionPipeline
from sdonnx.doctor.kernel_library import find_kernel_library
from sdonnx.models.spec import Role
from sdonnx.runtime.device.cuda import Cuda
from sdonnx.runtime.device.session import Graph, Run
start, folder, steps, scheduler = float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
parts = {"import_s": time.monotonic() - start}
calls = defaultdict(list)

def note_calls(owner, name, part):
    method = getattr(owner, name)
    def noted(*arguments):
        before = time.monotonic()
        result = method(*arguments)
        calls[part].append((before, time.monotonic()))
        return result
    setattr(owner, name, noted)

def covered(spans):
    seconds = end = 0.0
    for before, after in sorted(spans):
        seconds, end = seconds + max(0.0, after - max(before, end)), max(end, after)
    return seconds

note_calls(Graph, "_load", "sessions_s")  # in several threads
note_calls(Run, "prepare", "first_runs_s")
note_calls(Cuda, "capture", "captures_s")
pipeline = OrtDiffusionPipeline.from_pretrained(folder)
pipeline.scheduler = scheduler
loaded = time.monotonic()
def image():
    return pipeline("a fox in the snow", num_inference_steps=steps, seed=0).images[0].tobytes()
images = [image()]
first = time.monotonic()
seconds = (ctypes.c_double * 3)()
ctypes.CDLL(str(find_kernel_library())).sdonnx_kernels_start_seconds(seconds)
parts |= {part: covered(spans) for part, spans in calls.items()}
parts |= dict(zip(("handles_s", "algorithms_s", "plans_s"), seconds))
images.append(image())
second = time.monotonic()
row = {"graph": pipeline._graphs.path(Role.DENOISER).name, "loaded_s": loaded - start, "first_image_s": first - start}
row |= {"second_image_s": second - first, "images_are_equal": len(set(images)) == 1}
row["parts"] = {name: round(part, 4) for name, part in parts.items()}
print(json.dumps(row))
"""


def load_into_page_cache(folder: Path) -> None:
    """Read all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 26):
                    pass


def started(
    folder: Path, steps: int, scheduler: str, cache: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Generate two images in a new process, and return what `PROGRAM` prints.

    Args:
        folder: the optimized folder.
        steps: denoising steps of an image.
        scheduler: the name of the scheduler.
        cache: the user's cache.
        variables: environment variables.
    """
    environment = {name: value for name, value in os.environ.items() if name != SELF_CHECK}
    environment |= {"SDONNX_CACHE": str(cache), **variables}
    command = [sys.executable, "-P", "-c", PROGRAM, str(time.monotonic()), str(folder), str(steps), scheduler]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    return row


@pytest.mark.parametrize(
    ("arch", "quantization", "steps", "scheduler", "limit_s"),
    [
        ("tiny", None, 4, "euler", 4.0),
        pytest.param("sd15", None, 50, "pndm", 4.0, marks=pytest.mark.weekly),
        pytest.param("sdxl", None, 20, "euler", 6.0, marks=pytest.mark.weekly),
        pytest.param("sdxl", "fp8_e4m3_e4m3_dynamic", 20, "euler", 6.0, marks=pytest.mark.weekly),
    ],
)
def test_the_first_image_of_a_trusted_gpu_has_our_kernels(
    arch: str,
    quantization: str | None,
    steps: int,
    scheduler: str,
    limit_s: float,
    build: Any,
    made: Any,
    tmp_path: Path,
    note: Any,
) -> None:
    """The folder is in the page cache. Nothing is checked and nothing is cached, except in the mode strict."""
    capability = device_for("cuda").capability()
    library, reason = usable_library(capability)
    if library is None or capability is None or not is_trusted(capability):
        pytest.skip(reason or "a GPU that is not trusted")
    folder = build(arch)[1]
    if quantization is not None:
        exported, config = folder.with_name("onnx"), QuantizationConfig(TYPES[quantization])
        make = partial(optimize_folder, exported, float16=True, quantization=config)
        folder = made(f"{arch}-{quantization}", lambda work: make(work / "made")) / "made"
    load_into_page_cache(folder)
    call = (folder, steps, scheduler)
    started(*call, tmp_path / "warm-up")  # loads CUDA's libraries from the disk
    rows = {
        "empty cache": started(*call, tmp_path / "cache"),
        "later process": started(*call, tmp_path / "cache"),
        "strict": started(*call, tmp_path / "strict", {SELF_CHECK: "strict"}),
    }
    for start, row in rows.items():
        note(
            "first start",
            {"arch": arch, "quantization": quantization, "steps": steps, "scheduler": scheduler, "start": start, **row},
        )
    assert {row["graph"] for row in rows.values()} == {"step-kernels.onnx"}
    assert all(row["images_are_equal"] for row in rows.values())
    assert list((tmp_path / "cache").glob("kernels-*")) == []
    assert len(list((tmp_path / "strict").glob("kernels-*.json"))) == 2
    assert rows["empty cache"]["first_image_s"] <= limit_s
    assert rows["empty cache"]["second_image_s"] <= 1.03 * rows["later process"]["second_image_s"]
