"""New processes that generate images, with the verdicts that a test lets ship, and the seconds to their images."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sdonnx
from sdonnx.doctor.first_use import SELF_CHECK
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE

__all__ = ["cached_verdicts", "load_into_page_cache", "of_other_versions", "package_with", "started", "verdict_file"]

LIMIT_S = 600

# Prints the seconds from the start of the caller's clock to the first image, those of the next ones, the graph of a
# step, and the state of the check. CLOCK_MONOTONIC is one clock for all processes of a machine.
PROGRAM = """
import json, sys, time
from sdonnx import OrtDiffusionPipeline
start, folder, steps, scheduler = float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
pipeline = OrtDiffusionPipeline.from_pretrained(folder)
pipeline.scheduler = scheduler
pipeline.set_progress_bar_config(disable=True)
loaded = time.monotonic()
def image():
    return pipeline("a fox in the snow", num_inference_steps=steps, seed=0).images[0].tobytes()
images = [image()]
first = time.monotonic()
images.append(image())
second = time.monotonic()
from sdonnx.doctor.background_check import background_check
from sdonnx.models.spec import Role
check = background_check(0)
check.join(300)
ended = time.monotonic()
images.append(image())
third = time.monotonic()
sound = [found and found.sound for found in (check.verdict, check.own_verdict)]
row = {"graph": pipeline._graphs.path(Role.DENOISER).name, "loaded_s": loaded - start, "first_image_s": first - start}
row |= {"second_image_s": second - first, "check_s": ended - first, "third_image_s": third - ended}
row |= {"sound": sound[0], "own_kernels_sound": sound[1], "images_are_equal": len(set(images)) == 1}
print(json.dumps(row))
"""


def load_into_page_cache(folder: Path) -> None:
    """Read all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 26):
                    pass


def verdict_file(verdicts: Sequence[Any]) -> str:
    """Return the content of a file of shipped verdicts, from JSON objects."""
    return json.dumps({"verdicts": [{"source": "a test", "verdict": each} for each in verdicts], "left_out": []})


def cached_verdicts(cache: Path) -> list[Any]:
    """Return the verdicts of a cache, as JSON objects."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(cache.glob("kernels-*.json"))]


def of_other_versions(verdict: Any) -> Any:
    """Return a verdict, as a JSON object, as if it had been measured with another driver and other libraries."""
    key = verdict["key"]
    numbers = {name: str(int(key[name]) + 1) for name in ("cudnn", "cublas") if name in key}
    return {**verdict, "key": {**key, **numbers, "driver": "1.2.3"}}


def package_with(content: str, folder: Path) -> Path:
    """Copy the package to a folder with another file of shipped verdicts, and return the folder.

    Its modules are compiled, as those of an installed package are.
    """
    package = Path(sdonnx.__file__).resolve().parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    assert compileall.compile_dir(folder / package.name, quiet=1)
    (folder / MEASURED_VERDICTS_FILE.relative_to(package.parent)).write_text(content, encoding="utf-8")
    return folder


def started(
    package: Path,
    folder: Path,
    steps: int,
    scheduler: str,
    cache: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Generate three images in a new process, and return what `PROGRAM` prints.

    Args:
        package: the folder that contains the package.
        folder: the optimized folder.
        steps: denoising steps of an image.
        scheduler: the name of the scheduler.
        cache: the folder of cached verdicts.
        variables: environment variables.
    """
    environment = {name: value for name, value in os.environ.items() if name != SELF_CHECK}
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    environment |= {"SDONNX_CACHE": str(cache), "PYTHONPATH": path, **variables}
    command = [sys.executable, "-P", "-c", PROGRAM, str(time.monotonic()), str(folder), str(steps), scheduler]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    return row
