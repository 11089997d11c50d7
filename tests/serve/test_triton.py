"""The repository for Triton: its configuration as Triton parses it, and its model without Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from PIL import Image
from support.control_networks import picture, write_adapter, write_controlnet
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.plain_lora import write_plain_lora
from support.serve_load import CAPTIONS

from sdonnx import OrtDiffusionPipeline, ServeLimits
from sdonnx.cli import serve
from sdonnx.cli.command_line import CommandParser
from sdonnx.errors import FolderError, OptionError, OutputError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.serve.conditioning_images import offered_inputs
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


@contextlib.contextmanager
def loaded(folder: Path, config: Any) -> Iterator[Any]:
    """Yield the model of a repository, as Triton loads it: the file, and the configuration as JSON."""
    with mock.patch.dict(sys.modules, {"triton_python_backend_utils": stand_in()}):
        made = loaded_module("model", folder / "1" / "model.py").TritonPythonModel()
        made.initialize(
            {
                "model_config": json_format.MessageToJson(config, preserving_proto_field_name=True),
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
                "model_repository": str(folder),
                "model_version": "1",
                "model_name": folder.name,
            }
        )
    yield made
    made.finalize()


@pytest.fixture(scope="module")
def model(repository: Path, config: Any) -> Iterator[Any]:
    with loaded(repository / NAME, config) as made:
        yield made
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sdonnx-triton")]


@pytest.fixture(scope="module")
def controlled(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion with two ControlNets."""
    source, work = pipelines.micro(), tmp_path_factory.mktemp("controlnets")
    nets = [write_controlnet(source, work / f"net-{seed}", seed) for seed in (1, 2)]
    return pipelines.optimized(pipelines.exported(source, controlnets=nets), provider="cpu")


@pytest.fixture(scope="module")
def loras(micro_cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    write_plain_lora(micro_cpu, folder / "style.safetensors", 0)
    return folder


def file_of(image: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_control_images_and_loras(
    controlled: Path, loras: Path, protobuf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only models that offer them have these inputs, and images are the same as the pipeline's."""
    monkeypatch.chdir(loras.parent)
    write_triton_repository(tmp_path, {"m": str(controlled)}, LIMITS, {"style": Path(loras.name, "style.safetensors")})
    config = text_format.Parse((tmp_path / "m" / "config.pbtxt").read_text(), protobuf.ModelConfig())
    names = [
        "loras", "control_image", "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end",
        "guess_mode",
    ]  # fmt: skip
    assert [each.name for each in config.input][8:] == names
    assert [list(each.dims) for each in config.input][8:] == [[1], [-1], [-1], [-1], [-1], [1]]
    pictures = [[picture(2 * row), picture(2 * row + 1)] for row in range(2)]
    files = [[file_of(first), file_of(second, "WEBP")] for first, second in pictures]
    usual: dict[str, Any] = {"height": [64] * 2, "width": [48] * 2, "num_inference_steps": [2] * 2}
    usual["prompt"] = ["a fox", "an owl"]
    asked = Request.of(**usual, seed=[1, 2], loras=['{"style": 0.5}', ""], guess_mode=[True, False])
    weights = np.array([[0.5, 0.75]] * 2, np.float32)
    asked.tensors |= {
        "control_image": Tensor("control_image", np.array(files, object)),
        "controlnet_conditioning_scale": Tensor("controlnet_conditioning_scale", weights),
        "control_guidance_end": Tensor("control_guidance_end", np.array([[0.5], [1.0]], np.float32)),
    }
    one = {name: values[:1] for name, values in usual.items()}
    broken = Request.of(**one, control_image=[b"no image"])
    unknown, invalid = Request.of(**one, loras=['{"other": 1}']), Request.of(**one, loras=["{"])
    with loaded(tmp_path / "m", config) as made:
        answer, *refusals = made.execute([asked, broken, unknown, invalid])
    assert answer.error is None
    for refusal, words in zip(refusals, ("control_image cannot be decoded", "LoRA 'other'", "no JSON"), strict=True):
        assert words in str(refusal.error)
    with OrtDiffusionPipeline.from_pretrained(controlled) as pipeline:
        pipeline.set_progress_bar_config(disable=True)
        for row, (end, guesses) in enumerate([(0.5, True), (1.0, False)]):
            pipeline.unload_lora_weights()
            if not row:
                pipeline.load_lora_weights(loras / "style.safetensors", adapter_name="style")
                pipeline.set_adapters("style", 0.5)
            expected = pipeline(
                usual["prompt"][row], height=64, width=48, num_inference_steps=2, seed=row + 1,
                control_image=[_lossy(image) for image in files[row]], control_guidance_end=end,
                controlnet_conditioning_scale=[0.5, 0.75], guess_mode=guesses,
            ).images[0]  # fmt: skip
            found = answer.values("image")[row].astype(int)
            assert found.std() > 5
            assert int(np.abs(found - np.asarray(expected)).max()) <= 1


def _lossy(content: bytes) -> Image.Image:
    """Return an image as its file has it: WebP loses some of it."""
    return Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("union", ["control_image", "control_mode"]),
        ("adapter", ["adapter_image"]),
        ("prompt", ["ip_adapter_image"]),
        ("none", []),
    ],
)
def test_inputs_are_those_that_the_folder_offers(
    kind: str, names: list[str], pipelines: PipelineCache, tmp_path: Path
) -> None:
    if kind == "union":
        xl = pipelines.micro("sdxl-tiny")
        exported = pipelines.exported(xl, controlnets=[write_controlnet(xl, tmp_path / "net", 1, union=True)])
    elif kind == "adapter":
        source = pipelines.micro()
        exported = pipelines.exported(source, t2i_adapters=[write_adapter(source, tmp_path / "net", 1)])
    elif kind == "prompt":
        exported = pipelines.adapted(pipelines.micro("tiny-ip-adapter"))
    else:
        exported = pipelines.exported(pipelines.micro())
    assert offered_inputs(PipelineFolder.open(exported)) == names


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
