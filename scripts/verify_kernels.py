"""Check our own kernels on a GPU in one run: tests, compute-sanitizer, and the two forms of optimized folders.

python scripts/verify_kernels.py --json docs/results/kernels-h200.json FOLDER...

Each FOLDER is the output of `sdonnx optimize --float16`. Build the library with `make -C kernels`,
unless SDONNX_KERNELS names it or sdonnx-kernels is installed. docs/explanation/kernels.md shows the numbers.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.doctor.kernel_library import KERNEL_LIBRARY, find_kernel_library
from sdonnx.environment_record import environment
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_version import read_report
from sdonnx.metrics import psnr, relative_error
from sdonnx.terminal import console, guarded

__all__ = ["forms", "main"]

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {
    "memcheck": "sanitized",
    "racecheck": "sanitized and not MatMul and not SelfAttention",
    "initcheck": "sanitized and not MatMul and not SelfAttention",
    "synccheck": "sanitized",
}
"""The tests that each tool of compute-sanitizer runs.

Kernels of MatMul are cuBLASLt's, and one of SelfAttention is cuDNN's: racecheck cannot run them, and initcheck, which
watches our kernels only, would report the results that they write as uninitialized.
"""
CHECKS = ("all", "tests", "sanitizer", "none")
TESTS = "tests/gpu/test_kernels_gpu.py"
BUILT = ROOT / "kernels" / "build" / "libsdonnx_kernels.so"

_ONLY_OURS = ("--kernel-name", "kernel_substring=sdonnx")  # the mangled names contain our namespace

_PROMPT, _SEED = "a red fox in the snow, photograph", 0
_STEPS = (10, 50)  # the difference of two runs is the time of 40 steps
_ROUNDS = 5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="optimized folders with both forms, to time")
    parser.add_argument("--json", type=Path, required=True, help="append the record to this file")
    parser.add_argument("--height", type=int, help="pixels (default: the pipeline's)")
    parser.add_argument("--width", type=int, help="pixels (default: the pipeline's)")
    parser.add_argument("-b", "--batch_size", type=int, default=1, help="images of a call (default: 1)")
    parser.add_argument(
        "--checks",
        choices=CHECKS,
        default="all",
        help="checks to run: the tests, compute-sanitizer, both or none (default: all)",
    )
    return parser


def _run(command: list[str]) -> dict[str, Any]:
    """Run a command with its output shown, and return its status and duration."""
    console().print(shlex.join(command), markup=False, highlight=False)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT).returncode
    return {"command": shlex.join(command), "status": status, "seconds": round(time.monotonic() - start, 1)}


def _checks(chosen: str) -> list[dict[str, Any]]:
    """Run the checks of a choice of CHECKS, and return their commands, statuses and durations.

    Raises:
        OptionError: compute-sanitizer is chosen by its name and not installed.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if chosen == "sanitizer" and sanitizer is None:
        raise OptionError("compute-sanitizer is not installed", "that of CUDA's toolkit", "pass --checks tests")
    pytest = [sys.executable, "-m", "pytest", "-q", TESTS]
    runs = [_run(pytest)] if chosen in ("all", "tests") else []
    if chosen == "all" and sanitizer is None:
        console().print("compute-sanitizer is not installed: left out")
    if chosen in ("all", "sanitizer") and sanitizer is not None:
        for tool, selected in TOOLS.items():
            options = ["--tool", tool, "--error-exitcode", "1", "--target-processes", "all", *_ONLY_OURS]
            runs.append(_run([sanitizer, *options, *pytest, "-k", selected]))
    return runs


def forms(folder: Path, library: str, sizes: Mapping[str, Any], provider: str | None = None) -> dict[str, Any]:
    """Time a denoising step of both forms of a folder, in turn, and compare their images.

    Args:
        folder: an optimized folder.
        library: the path of the library; "0" for none, which compares a form with itself.
        sizes: arguments of the call: height, width and number of images.
        provider: the execution provider; None for the folder's.

    Returns:
        By form ("onnxruntime", "own") the milliseconds of a step in each round and their median; the error of latents
        and the PSNR of images between the forms; whether each form repeats every byte.

    Raises:
        FolderError: the folder has one form only.
    """
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    if library != "0" and read_report(folder).get("options", {}).get("kernels") != "auto":
        found = f"{folder} has no graphs with our own operators"
        raise FolderError(found, "both forms", "optimize it with --float16, without --kernels none")
    pipelines = {}
    for name, value in (("onnxruntime", "0"), ("own", library)):
        with patch.dict(os.environ, {KERNEL_LIBRARY: value}):
            pipelines[name] = OrtDiffusionPipeline.from_pretrained(folder, provider)

    def call(name: str, steps: int, kind: str) -> Any:
        return pipelines[name](_PROMPT, num_inference_steps=steps, seed=_SEED, output_type=kind, **sizes).images

    for name in pipelines:
        call(name, 2, "latent")  # captures
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(_ROUNDS):
        for name, of_form in times.items():
            seconds = []
            for count in _STEPS:
                start = time.perf_counter()
                call(name, count, "latent")
                seconds.append(time.perf_counter() - start)
            of_form.append(round((seconds[1] - seconds[0]) / (_STEPS[1] - _STEPS[0]) * 1e3, 4))
    latents = {name: [np.asarray(call(name, _STEPS[0], "latent")) for _ in range(2)] for name in pipelines}
    images = {name: np.asarray(call(name, _STEPS[0], "np"), np.float32) for name in pipelines}
    return {
        "folder": folder.name,
        "sizes": dict(sizes),
        "step_ms": times,
        "median_step_ms": {name: statistics.median(each) for name, each in times.items()},
        "latents_relative_error": relative_error(latents["own"][0], latents["onnxruntime"][0]),
        "image_psnr_db": psnr(images["own"], images["onnxruntime"]),
        "repeats": {name: first.tobytes() == second.tobytes() for name, (first, second) in latents.items()},
    }


def _verify(options: argparse.Namespace) -> int:
    check_writable(options.json)
    library = find_kernel_library() or (BUILT if BUILT.is_file() else None)
    if library is None:
        raise FolderError(
            f"{BUILT} is missing", "the library of kernels", "run make -C kernels, or install sdonnx-kernels"
        )
    sizes = {"height": options.height, "width": options.width, "num_images_per_prompt": options.batch_size}
    given = {name: value for name, value in sizes.items() if value is not None}
    with patch.dict(os.environ, {KERNEL_LIBRARY: str(library)}):
        runs = _checks(options.checks)
    measured = [forms(folder, str(library), given) for folder in options.folders]
    for each in measured:
        medians = ", ".join(f"{name} {value:.3f} ms" for name, value in each["median_step_ms"].items())
        console().print(f"{each['folder']}: a step takes {medians}; images differ by {each['image_psnr_db']:.1f} dB")
    record = {"command": shlex.join(sys.orig_argv), "library": library.name, **environment()}
    append_json(options.json, record | {"checks": runs, "forms": measured})
    return int(any(run["status"] for run in runs))


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; status 0 if all passed."""
    options = _parser().parse_args(arguments)
    options.debug = False
    return guarded(_verify, options)


if __name__ == "__main__":
    sys.exit(main())
