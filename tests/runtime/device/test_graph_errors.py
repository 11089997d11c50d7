"""Errors of ONNX Runtime leave a pipeline as one line, and other errors as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf
from support.pipelines import refused

from sdonnx.errors import FolderError
from sdonnx.runtime.cuda_graph_cache import CapturedShape
from sdonnx.runtime.device.device import device_for, graph_errors
from sdonnx.runtime.device.session import Graph

CPU = device_for("cpu")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A graph of a fixed size."""
    path = tmp_path_factory.mktemp("fixed") / "model.onnx"
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x) => (float[2,4] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    return Graph(path, CPU)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda graph: graph.run({"x": np.zeros((3, 4), np.float32)}), "Got: 3 Expected: 2"),
        (lambda graph: CPU.upload(np.array([object()])), "RuntimeError: Creation of OrtValues"),
    ],
)
def test_an_error_of_onnxruntime(use: Callable[[Graph], object], words: str, graph: Graph) -> None:
    with (
        refused(FolderError, "a graph of FOLDER", words, "optimize the exported pipeline again"),
        graph_errors("FOLDER"),
    ):
        use(graph)


def by_own_session() -> None:
    onnxruntime.InferenceSession(b"no graph")


def by_raise() -> None:
    raise RuntimeError("protobuf parsing failed")


@pytest.mark.parametrize(("fails", "error"), [(by_own_session, InvalidProtobuf), (by_raise, RuntimeError)])
def test_an_error_of_the_callers_code_passes_through(fails: Callable[[], None], error: type[Exception]) -> None:
    with pytest.raises(error, match="protobuf parsing failed"), graph_errors("FOLDER"):
        fails()


def test_no_error_of_onnxruntime_leaves_a_call(ours: Any, micro_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"prompt": "a fox", "height": 32, "width": 32, "num_inference_steps": 1, "seed": 1, "output_type": "np"}
    image = ours(**call).images
    put = CapturedShape.put
    with monkeypatch.context() as patch:
        patch.setattr(CapturedShape, "put", lambda self, name, values: put(self, name, np.repeat(values, 2, axis=0)))
        with refused(FolderError, f"a graph of {micro_cpu}", "RuntimeError"):
            ours(**call)
    np.testing.assert_array_equal(ours(**call).images, image)

    def fail(*_: Any) -> Any:
        raise RuntimeError("of a callback")

    with pytest.raises(RuntimeError, match="of a callback"):
        ours(**call, callback_on_step_end=fail)
