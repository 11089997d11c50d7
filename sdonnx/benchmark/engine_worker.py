"""`python -m sdonnx.benchmark.engine_worker`: run one engine in a separate process.

The process reads a job, one line of JSON, from standard input. It writes events, lines of JSON, to standard output:
progress messages, measurements and, at the end, "done" or the reason of a failure. The output of libraries goes to
standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.engines import find_engine
from sdonnx.benchmark.measure import (
    measure_kernels,
    measure_resolutions,
    measure_round,
    measure_start,
    measure_throughput,
)
from sdonnx.benchmark.operator_times import generate_and_count_flops, matrix_rates
from sdonnx.errors import SdonnxError
from sdonnx.installation import installed_version
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload
from sdonnx.terminal import INTERRUPTED

__all__ = ["main", "perform"]

Emit = Callable[[str, Any], None]


def perform(job: dict[str, Any], emit: Emit) -> None:
    """Run a job.

    Args:
        job: `task`; `engine`, for `find_engine`; `options` of the engine; `workload`; `prompts`;
            `batch_count`; `warm_ups`; `images`, the file that the images of all prompts are written to (npy); and
            `sizes`, for the task "resolutions".
        emit: callback `(event, value)`.

    Raises:
        SdonnxError: the engine failed.
    """
    options = EngineOptions(**(job["options"] | {"folder": Path(job["options"]["folder"])}))
    workload = Workload(**job["workload"])
    prompts, count = job["prompts"], job["batch_count"]
    if job["task"] == "reference":
        _generate_reference(options, workload, job, emit)
        return
    engine = find_engine(job["engine"])(options)

    def on_progress(text: str) -> None:
        emit("progress", text)

    if job["task"] == "round":
        measured, images, fault = measure_round(
            engine, workload, prompts, count, warm_ups=job["warm_ups"], on_progress=on_progress
        )
        _write(images, job["images"])
        emit("round", dataclasses.asdict(measured))
        emit("fault", fault)
        try:
            emit("stages", dataclasses.asdict(engine.stages(prompts[0], workload)))
        except Exception as error:  # the timed runs remain valid
            emit("unstaged", _reason(error))
    elif job["task"] == "start":
        emit("start", measure_start(engine, workload))
    elif job["task"] == "throughput":
        emit("points", measure_throughput(engine, workload, prompts[0], count, on_progress))
    elif job["task"] == "resolutions":
        visited = measure_resolutions(engine, workload, prompts[0], job["sizes"], on_progress)
        emit("visited", [dataclasses.asdict(size) for size in visited])
    else:
        emit("kernels", measure_kernels(engine, workload, prompts[0]))
    emit("engine", _described(engine))


def _generate_reference(options: EngineOptions, workload: Workload, job: dict[str, Any], emit: Emit) -> None:
    """Generate the reference images, and count the operations of a denoiser call."""
    source = DiffusersPipeline(
        options.folder, options.provider, adapters=options.adapters, safety_checker=options.safety_checker
    )
    source.load(workload)
    first, *others = job["prompts"]
    images, flops = generate_and_count_flops(source, first, workload)
    for prompt in others:
        images += source.generate(prompt, workload)
    _write(images, job["images"])
    emit("flops", flops)
    emit("matrix_rates", matrix_rates(options.provider))


def _write(images: list[Any], path: str) -> None:
    np.save(path, np.stack([np.asarray(image.convert("RGB")) for image in images]))


def _described(engine: Engine) -> dict[str, Any]:
    options = dataclasses.asdict(engine.options)
    packages = [name for names in engine.distributions for name in names]
    return {
        "name": engine.name,
        "version": engine.version,
        "device": engine.device,
        "provider": engine.provider,
        "precision": engine.precision,
        **{name: options[name] for name in ("compile_mode", "compiler_config", "regional", "xformers")},
        "io_binding": engine.io_binding,
        "safety_checker": engine.options.safety_checker,
        "ip_adapters": list(engine.options.adapters),
        "scheduler": engine.scheduler,
        "folder": str(engine.folder.path),
        "family": engine.family.name,
        "packages": {name: version for name in packages if (version := installed_version(name))},
    }


def main() -> int:
    """Run the job from standard input."""
    stream = _reserve_output()

    def emit(event: str, value: Any) -> None:
        stream.write(json.dumps({"event": event, "value": value}) + "\n")
        stream.flush()

    try:
        perform(json.loads(sys.stdin.readline()), emit)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SdonnxError as error:
        emit("failed", str(error))
        return 1
    except Exception as error:  # an error of one engine's library is reported in its row; the others continue
        traceback.print_exc()
        emit("failed", _reason(error))
        return 1
    emit("done", None)
    return 0


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, SdonnxError) else f"{type(error).__name__}: {text[:300]}"


def _reserve_output() -> TextIO:
    """Return a stream to standard output for events, and redirect all other output to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


if __name__ == "__main__":
    sys.exit(main())
