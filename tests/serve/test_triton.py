"""The example for Triton: its configuration as Triton parses it, and its model without Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from PIL import Image
from support.control_networks import picture, write_controlnet
from support.pipeline_cache import PipelineCache
from support.plain_lora import write_plain_lora
from support.serve_load import CAPTIONS
from support.serving import file_of

from sdonnx import ImageRequest, OrtDiffusionPipeline, ServeLimits
from sdonnx.runtime.inputs.conditioning_images import CONDITIONING_IMAGES
from sdonnx.serve.http.request_fields import LISTED_FIELDS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "triton"


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
def config(protobuf: Any) -> Any:
    return text_format.Parse((EXAMPLE / "config.pbtxt").read_text(), protobuf.ModelConfig())


def test_configuration_is_one_of_triton(config: Any, protobuf: Any) -> None:
    """Each input is a field of a request, with the shape that the model reads."""
    assert (config.name, config.backend) == ("fast", "python")
    required, *others = config.input
    assert (required.name, required.optional) == ("prompt", False)
    assert all(each.optional for each in others)
    assert {each.name for each in config.input} <= {each.name for each in fields(ImageRequest)}
    lists = {each.name for each in config.input if list(each.dims) == [-1]}
    assert all(list(each.dims) == [1] for each in config.input if each.name not in lists)
    assert lists == LISTED_FIELDS | set(CONDITIONING_IMAGES)
    assert [(each.name, list(each.dims)) for each in config.output] == [("image", [-1, -1, 3]), ("used_seed", [1])]
    assert config.output[0].data_type == protobuf.TYPE_UINT8
    assert config.instance_group[0].kind == protobuf.ModelInstanceGroup.KIND_GPU
    limits = ServeLimits(**json.loads(config.parameters["limits"].string_value))
    assert limits.max_batch_size == config.max_batch_size
    assert limits.batch_wait_ms == config.dynamic_batching.max_queue_delay_microseconds / 1000


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
def loaded(config: Any, **parameters: str) -> Iterator[Any]:
    """Yield the model of the example, as Triton loads it: the file, and the configuration as JSON."""
    described = json.loads(json_format.MessageToJson(config, preserving_proto_field_name=True))
    described["parameters"] |= {name: {"string_value": value} for name, value in parameters.items()}
    with mock.patch.dict(sys.modules, {"triton_python_backend_utils": stand_in()}):
        made = loaded_module("model", EXAMPLE / "model.py").TritonPythonModel()
        made.initialize(
            {
                "model_config": json.dumps(described),
                "model_instance_kind": "CPU",
                "model_instance_device_id": "0",
                "model_repository": str(EXAMPLE),
                "model_version": "1",
                "model_name": "fast",
            }
        )
    yield made
    made.finalize()


@pytest.fixture(scope="module")
def model(config: Any, shapes_cpu: Path) -> Iterator[Any]:
    with loaded(config, folder=str(shapes_cpu)) as made:
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


def test_control_images_and_loras(controlled: Path, loras: Path, config: Any) -> None:
    """Images are the same as the pipeline's."""
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
    style = json.dumps({"style": str(loras / "style.safetensors")})
    with loaded(config, folder=str(controlled), loras=style) as made:
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
