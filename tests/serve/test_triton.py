"""The repository for Triton: its configuration as Triton parses it, and its model without Triton."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from support.pipelines import refused
from support.serve_load import CAPTIONS

from sdonnx import OrtDiffusionPipeline, ServeLimits
from sdonnx.cli import serve
from sdonnx.cli.command_line import CommandParser
from sdonnx.errors import FolderError, OptionError, OutputError
from sdonnx.serve.triton_repository import write_triton_repository

NAME = 'förm "a"'
LIMITS = ServeLimits(max_batch_size=4, batch_wait_ms=5)


def loaded_module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def protobuf() -> Any:
    """Triton's own definition of a configuration, from tritonclient; its package would also import grpc."""
    files = metadata.distribution("tritonclient").files or []
    (found,) = [file for file in files if str(file) == "tritonclient/grpc/model_config_pb2.py"]
    return loaded_module("model_config_pb2", Path(str(found.locate())))


@pytest.fixture(scope="module")
def repository(shapes_cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    assert write_triton_repository(folder, {NAME: str(shapes_cpu)}, LIMITS) == [folder / NAME]
    return folder


@pytest.fixture(scope="module")
def config(repository: Path, protobuf: Any) -> Any:
    return text_format.Parse((repository / NAME / "config.pbtxt").read_text(), protobuf.ModelConfig())


def test_configuration_is_one_of_triton(config: Any, protobuf: Any, shapes_cpu: Path) -> None:
    assert (config.name, config.backend, config.max_batch_size) == (NAME, "python", 4)
    assert [(each.name, each.optional) for each in config.input][:2] == [("prompt", False), ("negative_prompt", True)]
    assert all(list(each.dims) == [1] for each in config.input)
    assert [(each.name, list(each.dims)) for each in config.output] == [("image", [-1, -1, 3]), ("used_seed", [1])]
    assert config.output[0].data_type == protobuf.TYPE_UINT8
    assert config.instance_group[0].kind == protobuf.ModelInstanceGroup.KIND_CPU
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert config.parameters["folder"].string_value == str(shapes_cpu.resolve())
    assert ServeLimits(**json.loads(config.parameters["limits"].string_value)) == LIMITS


@dataclass
class Tensor:
    """Triton's tensor."""

    name: str
    values: Any

    def as_numpy(self) -> Any:
        return self.values


@dataclass
class InferenceResponse:
    """Triton's response."""

    output_tensors: list[Tensor]
    error: Any = None

    def values(self, name: str) -> Any:
        (found,) = [tensor.values for tensor in self.output_tensors if tensor.name == name]
        return found


@dataclass
class Request:
    """Triton's request: texts are bytes in arrays of objects, of the shape (rows, 1)."""

    tensors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **columns: Any) -> Request:
        made = {}
        for name, values in columns.items():
            column = [value.encode() if isinstance(value, str) else value for value in values]
            kind: Any = object if isinstance(column[0], bytes) else None
            made[name] = Tensor(name, np.array(column, kind).reshape(-1, 1))
        return cls(made)


def stand_in() -> types.ModuleType:
    """Return the parts of `triton_python_backend_utils` that the model uses."""
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse = Tensor, InferenceResponse
    module.TritonError = type("TritonError", (Exception,), {})
    module.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
    return module  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(repository: Path, config: Any) -> Iterator[Any]:
    """The model of the repository, as Triton loads it: the file, and the configuration as JSON."""
    before = sys.modules.get("triton_python_backend_utils")
    assert before is None
    sys.modules["triton_python_backend_utils"] = stand_in()
    made = loaded_module("model", repository / NAME / "1" / "model.py").TritonPythonModel()
    made.initialize(
        {
            "model_config": json_format.MessageToJson(config, preserving_proto_field_name=True),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            "model_repository": str(repository / NAME),
            "model_version": "1",
            "model_name": NAME,
        }
    )
    yield made
    made.finalize()
    del sys.modules["triton_python_backend_utils"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sdonnx-triton")]


def test_requests_of_a_call_are_answered_in_order(model: Any, shapes_cpu: Path) -> None:
    usual = {"num_inference_steps": np.array([3], np.int32)}
    prompts = CAPTIONS[:3]
    requests = [Request.of(prompt=[prompt], seed=[index + 1], **usual) for index, prompt in enumerate(prompts)]
    requests.append(
        Request.of(
            prompt=prompts[:2], negative_prompt=["blur", ""], seed=[7, 8], guidance_scale=[3.0, 4.0],
            height=[32, 32], width=[64, 64], scheduler=["euler", "euler"], num_inference_steps=[2, 2],
        )
    )  # fmt: skip
    answers = model.execute(requests)
    assert [answer.error for answer in answers] == [None] * 4
    assert [answer.values("image").shape for answer in answers] == [(1, 64, 64, 3)] * 3 + [(2, 32, 64, 3)]
    assert answers[3].values("used_seed").tolist() == [[7], [8]]
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        for index, prompt in enumerate(prompts):
            expected = np.asarray(pipeline(prompt, num_inference_steps=3, seed=index + 1).images[0])
            found = answers[index].values("image")[0]
            assert expected.std() > 10
            assert int(np.abs(found.astype(int) - expected).max()) <= 1


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": [""]}, "prompt is empty"),
        ({"prompt": [b"\xff"]}, "no UTF-8"),
        ({"prompt": ["a"], "num_inference_steps": [0]}, "num_inference_steps is 0"),
        ({"prompt": ["a"], "guidance_scale": [float("nan")]}, "guidance_scale is nan"),
        ({"prompt": ["a", "b"], "seed": [1]}, r"[1, 2] rows"),
        ({"prompt": ["a"], "scheduler": ["x"]}, "x"),
    ],
)
def test_a_request_that_cannot_be_served_has_an_error(model: Any, columns: dict[str, Any], words: str) -> None:
    good = Request.of(prompt=["a circle"], num_inference_steps=[1])
    bad, other = model.execute([Request.of(**columns), good])
    assert words in str(bad.error)
    assert bad.output_tensors == []
    assert other.values("image").shape == (1, 64, 64, 3)


def test_writes_what_the_command_line_names(
    shapes_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = CommandParser(prog="sdonnx serve")
    serve.add_arguments(parser)
    folder = tmp_path / "repository"
    options = ["-m", f"one={shapes_cpu}", "-m", f"two={shapes_cpu}", "--write_triton", str(folder)]
    assert serve.run(parser.parse(options)) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "one"), str(folder / "two")]
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == [
        "one/1/model.py", "one/config.pbtxt", "two/1/model.py", "two/config.pbtxt",
    ]  # fmt: skip


def test_repositories_that_cannot_be_written(shapes_cpu: Path, tmp_path: Path) -> None:
    with refused(OptionError, "the name '..'"):
        write_triton_repository(tmp_path, {"..": str(shapes_cpu)}, LIMITS)
    with refused(FolderError):
        write_triton_repository(tmp_path, {"a": str(tmp_path)}, LIMITS)
    (tmp_path / "a").mkdir()
    with refused(OutputError, "exists"):
        write_triton_repository(tmp_path, {"a": str(shapes_cpu)}, LIMITS)
    (tmp_path / "file").write_text("")
    with refused(OutputError, "cannot be written"):
        write_triton_repository(tmp_path / "file", {"b": str(shapes_cpu)}, LIMITS)
    assert not (tmp_path / "b").exists()
