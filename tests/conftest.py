"""Options, markers and what the whole session shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording import Note, recorded

# Read by huggingface_hub on import, so set before any test module is: no test may depend on a network.
os.environ["HF_HUB_OFFLINE"] = "1"


def _keep_to_own_cores() -> None:
    """Give each of pytest-xdist's workers, and what it starts, a share of the cores.

    Libraries' threads wait by spinning: beside another worker, a benchmark that takes 90 s alone took 545 with a thread
    for every core. torch's OpenMP counts its threads when it is imported, so this comes first.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % len(cores) :: count]
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))


_keep_to_own_cores()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests of full-size models")
    parser.addoption("--results", type=Path, default=None, help="file to append what tests measured to")
    parser.addoption("--made", type=Path, default=None, help="keep GPU tests' pipelines here, and use those that are")
    parser.addoption("--faults", type=int, default=0, help="inject each fault so many times (tests/test_faults.py)")
    parser.addoption("--hostile", type=int, default=0, help="so many inputs of each kind (tests/test_hostile.py)")
    parser.addoption("--seed", type=int, default=0, help="of the faults and the hostile inputs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `full` unless it is asked for; skip `gpu` where there is no CUDA provider.

    A `-m` in addopts would be lost as soon as the command line has one, hence a hook.
    """
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="ONNX Runtime has no CUDAExecutionProvider here"))


def _has_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Take measurements under a title; they are written to the file that --results names."""
    with recorded("tests", request.config.getoption("--results")) as take:
        yield take


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with a few channels, a diffusers folder; read it, never write to it."""
    from micro import write_micro

    return write_micro(tmp_path_factory.mktemp("micro") / "diffusers")


@pytest.fixture(scope="session")
def micro_exported(micro: Path) -> Path:
    """`micro` as float32 ONNX; read it, never write to it."""
    from sdonnx.export.pipeline import export_pipeline

    export_pipeline(micro, micro.parent / "onnx")
    return micro.parent / "onnx"


@pytest.fixture(scope="session")
def micro_cpu(micro_exported: Path) -> Path:
    """`micro` optimized for the CPU provider; read it, never write to it."""
    from sdonnx.optimize import optimize_folder

    optimize_folder(micro_exported, micro_exported.parent / "cpu", provider="cpu")
    return micro_exported.parent / "cpu"


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample pipeline `tiny`, a diffusers folder; read it, never write to it."""
    from sdonnx.sample import write_sample

    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    write_sample("tiny", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_exported(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` as float32 ONNX; read it, never write to it."""
    from sdonnx.export.pipeline import export_pipeline

    folder = tmp_path_factory.mktemp("exported") / "tiny"
    export_pipeline(tiny_pipeline, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_cpu(tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` optimized for the CPU provider; read it, never write to it."""
    from sdonnx.optimize import optimize_folder

    folder = tmp_path_factory.mktemp("optimized") / "tiny-cpu"
    optimize_folder(tiny_exported, folder, provider="cpu")
    return folder


@pytest.fixture(scope="session")
def tiny_cuda(tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` optimized for CUDA in float32, to be checked by lowering; read it, never write to it."""
    from sdonnx.optimize import optimize_folder

    folder = tmp_path_factory.mktemp("optimized") / "tiny-cuda"
    optimize_folder(tiny_exported, folder, provider="cuda")
    return folder


@pytest.fixture(scope="session")
def tiny_cuda_fp16(tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` optimized for CUDA in float16; read it, never write to it."""
    from sdonnx.optimize import optimize_folder

    folder = tmp_path_factory.mktemp("optimized") / "tiny-cuda-fp16"
    optimize_folder(tiny_exported, folder, provider="cuda", float16=True)
    return folder


@pytest.fixture(scope="session")
def tiny_torch(tiny_pipeline: Path) -> Any:
    """`tiny` as diffusers loads it, in float32; leave its scheduler as it was."""
    import diffusers
    import torch

    # Threads that wait by spinning, torch's beside ONNX Runtime's on a few shared cores, cost ten times the time.
    torch.set_num_threads(1)
    pipeline: Any = diffusers.StableDiffusionPipeline.from_pretrained(tiny_pipeline)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def loaded(tiny_cpu: Path) -> Any:
    """`tiny`, optimized for the CPU and loaded; use `ours`."""
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    return OrtDiffusionPipeline.from_pretrained(tiny_cpu)


@pytest.fixture
def ours(loaded: Any) -> Iterator[Any]:
    """This project's pipeline, with the folder's own scheduler at the start of each test."""
    before = loaded.scheduler_config
    yield loaded
    loaded.scheduler_config = before


@pytest.fixture
def theirs(tiny_torch: Any) -> Iterator[Any]:
    """diffusers' pipeline, likewise."""
    before = tiny_torch.scheduler
    yield tiny_torch
    tiny_torch.scheduler = before
