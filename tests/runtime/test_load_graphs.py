"""The graphs of a pipeline are loaded at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from support.pipeline_cache import PipelineCache
from support.pipelines import linked, refused

from sdonnx.errors import FolderError
from sdonnx.runtime import graph_set
from sdonnx.runtime.device.session import Graph
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

FIRST = ["text.onnx", "step.onnx", "precompute.onnx", "decode.onnx"]  # before the first image of Stable Diffusion


@pytest.fixture
def folder(pipelines: PipelineCache) -> Path:
    return pipelines.optimized(pipelines.exported(pipelines.nano("tiny")), provider="cpu")


def test_graphs_are_loaded_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(FIRST), timeout=20)
    loaded: dict[str, int] = {}

    class Waiting(Graph):
        def __init__(self, path: Path, *arguments: Any, **options: Any) -> None:
            together.wait()  # raises BrokenBarrierError if one graph waits for another
            loaded[path.name] = threading.get_ident()
            super().__init__(path, *arguments, **options)

    monkeypatch.setattr(graph_set, "Graph", Waiting)
    OrtDiffusionPipeline.from_pretrained(folder).close()
    assert sorted(loaded) == sorted(FIRST)
    assert len(set(loaded.values())) == len(FIRST)


def test_options_of_the_caller_are_used_by_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    class Noted(Graph):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            threads.add(threading.get_ident())
            super().__init__(*arguments, **options)

    monkeypatch.setattr(graph_set, "Graph", Noted)
    OrtDiffusionPipeline.from_pretrained(folder, session_options=onnxruntime.SessionOptions()).close()
    assert len(threads) == 1


def test_the_error_of_the_first_component_is_raised(folder: Path, tmp_path: Path) -> None:
    broken = linked(folder, tmp_path / "broken")
    for file in ("text_encoder/text.onnx", "vae_decoder/decode.onnx"):
        (broken / file).unlink()
        (broken / file).write_bytes(b"no graph")
    for _ in range(3):  # threads may end in any order
        with refused(FolderError, "cannot load", "text.onnx"):
            OrtDiffusionPipeline.from_pretrained(broken)
