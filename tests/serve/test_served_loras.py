"""LoRAs that requests name: images, batches, changes, and requests that cannot be served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from support.control_networks import picture
from support.drawing import MIN_PSNR_DB
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.plain_lora import write_plain_lora
from support.serving import Recorder, Running, file_of, opened, serving

from sdonnx import AsyncPipeline, ImageRequest, OrtDiffusionPipeline, ServeLimits
from sdonnx.errors import OptionError, WeightsError
from sdonnx.lora.lora_folder import list_loras
from sdonnx.metrics import psnr
from sdonnx.quantization.quantization_config import QuantizationConfig
from sdonnx.serve import served_loras
from sdonnx.serve.image_service import ServeObserver
from sdonnx.serve.prometheus_metrics import PrometheusMetrics
from sdonnx.serve.ray_proxy import RayOptions
from sdonnx.serve.remote_pipeline import RemotePipeline, replica_events
from sdonnx.serve.serve_settings import ServeSettings
from sdonnx.serve.served_loras import plan_loras

SMALL: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2}
ONE = {"prompt": "a fox", "size": "48x64", "seed": 4, "num_inference_steps": 2}
LIMITS = ServeLimits(batch_wait_ms=500)
PATHS = ("/v1/images/generations", "/v1/images/edits")
DIFFERENT_DB = 40
NAMES = {"style": 0.5}, {"face": -1.0}, {"style": 0.8, "face": 0.3}, {"style": 1}, None


@pytest.fixture(scope="module")
def folder(micro_cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA files: two that fit, and two that do not."""
    root = tmp_path_factory.mktemp("loras")
    write_plain_lora(micro_cpu, root / "style.safetensors", 0)
    write_plain_lora(micro_cpu, root / "people" / "face.safetensors", 1)
    write_plain_lora(micro_cpu, root / "wide.safetensors", 2, widen=3)
    (root / "broken.safetensors").write_bytes(b"no safetensors")
    (root / "notes.txt").touch()
    return root


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    return list_loras(folder)


@pytest.fixture(scope="module")
def expected(micro_cpu: Path, files: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Images of the pipeline without a queue, through the methods of diffusers."""
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        pipeline.set_progress_bar_config(disable=True)

        def generate(loras: Mapping[str, float] | None, seed: int, **arguments: Any) -> Any:
            pipeline.unload_lora_weights()
            for name in loras or ():
                pipeline.load_lora_weights(files[name], adapter_name=name)
            if loras:
                pipeline.set_adapters(sorted(loras), [loras[name] for name in sorted(loras)])
            return pipeline("a fox", **{**SMALL, **arguments}, seed=seed, output_type="np").images[0]

        yield generate


def run(micro_cpu: Path, files: Mapping[str, Path], body: Callable[[AsyncPipeline], Any], **options: Any) -> Any:
    async def all_of_it() -> Any:
        async with AsyncPipeline.from_pretrained({"micro": micro_cpu}, loras=files, **options) as queue:
            return await body(queue)

    return asyncio.run(all_of_it())


def request_with(loras: Mapping[str, float] | None, seed: int) -> ImageRequest:
    return ImageRequest("a fox", loras=loras, seed=seed, output_type="np", **SMALL)


def test_mixed_requests_have_their_own_loras(
    micro_cpu: Path, files: dict[str, Path], expected: Callable[..., Any]
) -> None:
    requests = [request_with(loras, seed) for seed in range(3) for loras in NAMES]
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> list[Any]:
        assert queue.loras == ["broken", "face", "style", "wide"]
        return [result.images[0] for result in await asyncio.gather(*map(queue.submit, requests))]

    images = run(micro_cpu, files, body, limits=LIMITS, observer=recorder)
    for request, image in zip(requests, images, strict=True):
        alone = expected(request.loras, request.seed)
        assert alone.std() > 0.02
        assert psnr(image, alone) > MIN_PSNR_DB
    for first in range(len(NAMES)):
        for second in range(first):
            assert psnr(images[first], images[second]) < DIFFERENT_DB
    assert sum(recorder.batches) == len(requests)
    assert len({key.loras for key in recorder.keys}) == len(NAMES)
    assert max(recorder.batches) > 1
    # Lanes with the LoRAs that are set come first, so each set is used once, and no LoRAs at the start.
    assert len(NAMES) - 1 <= len(recorder.changes) <= len(NAMES)
    assert all(seconds > 0 for seconds in recorder.changes)


def test_folders_with_weights_in_8_bits(pipelines: PipelineCache, micro_exported: Path, files: dict[str, Path]) -> None:
    config = QuantizationConfig.from_flags("int8_weightonly", "{}")
    folder = pipelines.optimized(micro_exported, provider="cpu", quantization=config)
    pipeline = OrtDiffusionPipeline.from_pretrained(folder)
    plain = pipeline("a fox", **SMALL, seed=1, output_type="np").images[0]
    pipeline.load_lora_weights(files["style"])
    styled = pipeline("a fox", **SMALL, seed=1, output_type="np").images[0]

    async def body(queue: AsyncPipeline) -> list[Any]:
        requests = [request_with(loras, 1) for loras in (None, {"style": 1.0}, None)]
        return [(await queue.submit(each)).images[0] for each in requests]

    images = run(folder, files, body, limits=LIMITS)
    assert psnr(plain, styled) < DIFFERENT_DB
    for image, expected in zip(images, (plain, styled, plain), strict=True):
        assert psnr(image, expected) > MIN_PSNR_DB


def test_equal_loras_share_a_batch(micro_cpu: Path, files: dict[str, Path]) -> None:
    given: list[dict[str, float]] = [
        {"style": 1, "face": 0.5},
        {"face": 0.5, "style": 1.0},
        {"face": 0.5, "style": 1.0, "wide": 0.0},
        {},
        {"broken": -0.0},
    ]
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> None:
        await asyncio.gather(*(queue.generate(request_with(each, 0)) for each in given))

    run(micro_cpu, files, body, limits=LIMITS, observer=recorder)
    both = (("face", 0.5), ("style", 1.0))
    loras = [key.loras for key in recorder.keys]
    assert sorted(zip(loras, recorder.batches, strict=True)) == [((), 2), (both, 1), (both, 2)]
    assert len(recorder.changes) == 1 + (loras[0] == both)  # none if requests without come first


def test_unusable_files_change_nothing(micro_cpu: Path, files: dict[str, Path], expected: Callable[..., Any]) -> None:
    recorder = Recorder()

    async def body(queue: AsyncPipeline) -> Any:
        first = await queue.generate(request_with({"style": 0.5}, 0))
        jobs = [queue.submit(request_with({"style": 1.0, bad: 0.5}, 0)) for bad in ("broken", "wide", "wide")]
        for job, part in zip(jobs, ("broken.safetensors", "shape", "shape"), strict=True):
            with refused(WeightsError, part, "the LoRA", "cannot be used"):
                await job
        second = await queue.generate(request_with({"style": 0.5}, 0))
        assert np.array_equal(first.images[0], second.images[0])
        return second.images[0]

    image = run(micro_cpu, files, body, limits=LIMITS, observer=recorder)
    assert psnr(image, expected({"style": 0.5}, 0)) > MIN_PSNR_DB
    assert len(recorder.changes) == 1


def test_messages_name_no_path(micro_cpu: Path, files: dict[str, Path], folder: Path) -> None:
    async def body(queue: AsyncPipeline) -> None:
        for name in ("broken", "wide"):
            with pytest.raises(WeightsError) as caught:
                await queue.generate(request_with({name: 1.0}, 0))
            assert name in str(caught.value)
            assert "/" not in str(caught.value)
            assert str(folder) not in str(caught.value)

    run(micro_cpu, files, body)


def test_files_are_read_once_while_they_are_kept(
    micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {str(seed): write_plain_lora(micro_cpu, tmp_path / f"{seed}.safetensors", seed) for seed in range(3)}
    monkeypatch.setattr(served_loras, "_MAX_FILES", 2)
    read: list[str] = []
    original = OrtDiffusionPipeline.read_lora_weights

    def counted(self: OrtDiffusionPipeline, path: str | Path) -> Any:
        read.append(Path(path).stem)
        return original(self, path)

    monkeypatch.setattr(OrtDiffusionPipeline, "read_lora_weights", counted)

    async def body(queue: AsyncPipeline) -> None:
        for name in "0101201":
            await queue.generate(request_with({name: 1.0}, 0))

    run(micro_cpu, files, body)
    assert read == ["0", "1", "2", "0", "1"]


def test_adapters_of_the_caller_are_replaced_only_if_loras_are_served(
    micro_cpu: Path, files: dict[str, Path], expected: Callable[..., Any]
) -> None:
    for loras, name in ((None, {"style": 1.0}), ({"face": files["face"]}, None)):
        pipeline = OrtDiffusionPipeline.from_pretrained(micro_cpu)
        pipeline.load_lora_weights(files["style"])

        async def body(pipeline: OrtDiffusionPipeline = pipeline, loras: Any = loras) -> Any:
            async with AsyncPipeline(pipeline, loras=loras) as queue:
                return (await queue.generate(request_with(None, 3))).images[0]

        assert psnr(asyncio.run(body()), expected(name, 3)) > MIN_PSNR_DB


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"none": 1.0}, ["the LoRA 'none' is unknown"]),
        ({"../style": 1.0}, ["is unknown"]),
        ({"/etc/passwd": 1.0}, ["is unknown"]),
        ({1: 1.0}, ["the LoRA 1 is unknown"]),
        ({"style": float("nan")}, ["weight of the LoRA style is nan", "-10 to 10"]),
        ({"style": float("inf")}, ["inf"]),
        ({"style": 10.5}, ["10.5"]),
        ({"style": -(10**400)}, ["-10 to 10"]),
        ({"style": True}, ["True"]),
        ({"style": "1"}, ["'1'"]),
        ({"style": None}, ["None"]),
        (["style"], ["loras is a list"]),
        ("style", ["loras is a str"]),
        ({str(index): 1.0 for index in range(9)}, ["9 entries", "at most 8"]),
    ],
)
def test_values_that_cannot_be_used(given: Any, parts: list[str]) -> None:
    with refused(OptionError, *parts):
        plan_loras(given, ["style", "face"])


def test_without_files_loras_are_refused() -> None:
    with refused(OptionError, "no LoRA files are served"):
        plan_loras({"style": 1.0}, [])
    assert plan_loras({}, []) == plan_loras(None, []) == ()
    with refused(OptionError, "does not exist"):
        served_loras.ServedLoras({"style": Path("/missing.safetensors")})
    with refused(OptionError, "is empty"):
        served_loras.ServedLoras({"": Path("/missing.safetensors")})


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with refused(OptionError, "has no LoRA files"):
        list_loras(tmp_path)
    for missing in (tmp_path / "missing", Path("x" * 5000), Path("a\0b")):
        with pytest.raises(OptionError, match="is no folder"):
            list_loras(missing)
    (tmp_path / "more").mkdir()
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "a.b.safetensors").touch()
    (tmp_path / "folder.safetensors").mkdir()
    assert list(list_loras(tmp_path)) == ["a.b", "a"]
    (tmp_path / "more" / "a.safetensors").touch()
    with refused(OptionError, "the LoRA name 'a' occurs twice"):
        list_loras(tmp_path)
    (tmp_path / "more" / "a.safetensors").rename(tmp_path / "more" / "b\n.safetensors")
    with refused(OptionError, "a name that cannot be shown"):
        list_loras(tmp_path)


@pytest.mark.parametrize("file", [LORA_WEIGHT_NAME_SAFE, SAFETENSORS_WEIGHTS_NAME])
def test_files_that_libraries_named_have_the_names_of_their_folders(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("style", "face", "face/checkpoint-500"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "other.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    named = {name: str(path) for name, path in list_loras(Path()).items()}
    assert named == {
        "checkpoint-500": f"face/checkpoint-500/{file}",
        "face": f"face/{file}",
        "other": "other.safetensors",
        "style": f"style/{file}",
    }
    monkeypatch.chdir(tmp_path / "style")
    assert list(list_loras(Path())) == ["style"]
    (tmp_path / "face" / "style").mkdir()
    (tmp_path / "face" / "style" / file).touch()
    with refused(OptionError, "the LoRA name 'style' occurs twice"):
        list_loras(tmp_path)


def test_option_of_ray(folder: Path, files: dict[str, Path]) -> None:
    options = RayOptions.read({"folder": "fast", "lora_folder": str(folder)})
    assert options.loras() == {name: str(path) for name, path in files.items()}
    assert RayOptions.read({"folder": "fast"}).loras() == {}
    with refused(OptionError, "is no folder"):
        RayOptions.read({"folder": "fast", "lora_folder": "/missing"}).loras()


def test_replicas_use_the_loras_of_requests(
    micro_cpu: Path, files: dict[str, Path], expected: Callable[..., Any]
) -> None:
    async def body(replica: AsyncPipeline) -> Any:
        observer = ServeObserver()
        calls = {"micro": lambda request: replica_events(replica, request)}
        remote = RemotePipeline(calls, lambda _: False, LIMITS, observer, replica.loras)
        assert remote.loras == replica.loras
        with refused(OptionError, "the LoRA 'none' is unknown"):
            await remote.accept(request_with({"none": 1.0}, 0))
        job = await remote.accept(request_with({"style": 0.5}, 2))
        return (await job).images[0]

    assert psnr(run(micro_cpu, files, body), expected({"style": 0.5}, 2)) > MIN_PSNR_DB


@pytest.fixture(scope="module")
def server(micro_cpu: Path, files: dict[str, Path]) -> Iterator[Running]:
    metrics = PrometheusMetrics()
    pipeline = AsyncPipeline.from_pretrained({"micro": micro_cpu}, loras=files, observer=metrics)
    with serving(pipeline, metrics, ServeSettings()) as running:
        yield running
        assert running.pipeline.failure is None
        assert running.post(**ONE).status_code == 200


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def assert_same(text: str, expected: Any) -> None:
    """Compare all levels of an image in an answer with an array."""
    found = np.asarray(opened(text).convert("RGB")).astype(int)
    assert np.abs(found - np.round(expected * 255)).max() <= 1


def test_generations(client: openai.OpenAI, expected: Callable[..., Any]) -> None:
    for loras in ({"style": 0.5, "face": 1}, None):
        fields = {"seed": 4, "num_inference_steps": 2, "loras": loras}
        response: Any = client.images.generate(prompt="a fox", size="48x64", extra_body=fields)
        assert_same(response.data[0].b64_json, expected(loras, 4))


def test_edits(server: Running, client: openai.OpenAI, expected: Callable[..., Any]) -> None:
    image = picture(9, (48, 64))
    fields = {"seed": 4, "num_inference_steps": 4, "strength": 0.9, "loras": {"style": 0.5, "face": 1}}
    response: Any = client.images.edit(image=("a.png", file_of(image)), prompt="a fox", extra_body=fields)
    wanted = expected(fields["loras"], 4, num_inference_steps=4, image=image, strength=0.9)
    assert_same(response.data[0].b64_json, wanted)
    data = {"prompt": "a fox", **fields, "loras": json.dumps(fields["loras"])}
    by_text = server.client.post(PATHS[1], data=data, files={"image": ("a.png", file_of(image))})
    assert_same(by_text.json()["data"][0]["b64_json"], wanted)


def test_listing(server: Running) -> None:
    listed = server.client.get("/v1/loras").json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["broken", "face", "style", "wide"]
    assert all(each.keys() == {"id", "object", "created", "owned_by"} for each in listed["data"])


def test_openapi_document_describes_the_field(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    fields = document["components"]["schemas"]["GenerationFields"]["properties"]
    mapping = fields["loras"]["anyOf"][0]
    assert (mapping["type"], mapping["maxProperties"]) == ("object", 8)
    assert mapping["additionalProperties"] == {"type": "number", "minimum": -10, "maximum": 10}
    form = document["paths"][PATHS[1]]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["loras"]["anyOf"][0]["type"] == "object"
    assert "/v1/loras" in document["paths"]


def test_metrics(server: Running) -> None:
    def changes() -> tuple[float, float]:
        name = "sdonnx_lora_change_seconds"
        return server.value(f"{name}_count", model="micro"), server.value(f"{name}_sum", model="micro")

    server.post(**ONE)
    before = changes()
    for _ in range(2):
        assert server.post(**ONE, loras={"style": 0.25}).status_code == 200
    count, seconds = changes()
    assert count == before[0] + 1
    assert seconds > before[1]


def message_of(response: httpx.Response, *statuses: int) -> str:
    assert response.status_code in statuses, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("loras", "status", "words"),
    [
        ('{"none": 1}', 404, "the LoRA 'none' is unknown; expected a name that /v1/loras lists"),
        ('{"../style": 1}', 404, "is unknown"),
        ('{"style.safetensors": 1}', 404, "is unknown"),
        ('{"\\u0000": 1}', 404, "is unknown"),
        ('{"": 1}', 422, "loras"),
        (json.dumps({"x" * 256: 1}), 422, "loras"),
        ('{"style": NaN}', 422, "loras.style: input should be a finite number"),
        ('{"style": Infinity}', 422, "loras.style"),
        ('{"style": 1e999}', 422, "loras.style"),
        ('{"style": 10.01}', 422, "less than or equal to 10"),
        ('{"style": -11}', 422, "greater than or equal to -10"),
        ('{"style": true}', 422, "loras.style: input should be a valid number"),
        ('{"style": [1]}', 422, "loras.style"),
        ('{"style": null}', 422, "loras.style"),
        ('["style"]', 422, "loras: input should be a valid dictionary"),
        ('"style"', 422, "loras: input should be a valid dictionary"),
        ("1", 422, "loras: input should be a valid dictionary"),
        (json.dumps({str(index): 1 for index in range(9)}), 422, "loras"),
        ('{"broken": 1}', 422, "the LoRA broken cannot be used: broken.safetensors"),
        ('{"style": 1, "wide": 1}', 422, "the LoRA wide cannot be used"),
    ],
)
def test_fields_that_cannot_be_used(server: Running, loras: str, status: int, words: str) -> None:
    body = f'{{"prompt": "a", "num_inference_steps": 1, "size": "48x64", "loras": {loras}}}'
    headers = {"Content-Type": "application/json"}
    assert words in message_of(server.client.post(PATHS[0], content=body, headers=headers), status)
    data = {"prompt": "a", "num_inference_steps": "1", "loras": loras}
    file = {"image": ("a.png", file_of(picture(1, (48, 64))))}
    assert words in message_of(server.client.post(PATHS[1], data=data, files=file), status)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"loras[style]": "x"}, "loras.style"),
        ({"loras[style]": "nan"}, "loras.style"),
        ({"loras[style]": ["1", "2"]}, "loras: "),
        ({"loras[style]": "1", "loras": "{}"}, "loras: "),
        ({"loras": ["{}", "{}"]}, "loras: "),
        ({"loras": "{"}, "loras: "),
        ({"loras": "[" * 50_000}, "loras: "),
        ({"loras[style": "1"}, "is not a parameter"),
        ({f"loras[{index}]": "1" for index in range(9)}, "loras: "),
        ({"loras[]": "1"}, "loras"),
    ],
)
def test_forms_that_cannot_be_used(server: Running, data: dict[str, Any], words: str) -> None:
    file = {"image": ("a.png", file_of(picture(1, (48, 64))))}
    response = server.client.post(PATHS[1], data={"prompt": "a", "num_inference_steps": "1", **data}, files=file)
    assert words in message_of(response, 422)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(max_size=10) | st.sampled_from(["style", "broken"]), st.floats() | st.integers(), max_size=3
    )
    | st.recursive(st.none() | st.booleans() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3))
)
def test_any_value(server: Running, value: Any) -> None:
    content = json.dumps({"prompt": "a", "num_inference_steps": 1, "size": "48x64", "loras": value}).encode()
    response = server.client.post(PATHS[0], content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    json.loads(response.text)


def test_a_stream_ends_with_the_error(server: Running) -> None:
    response = server.post(**ONE, loras={"broken": 1}, stream=True)
    assert response.status_code == 200
    assert "event: error" in response.text
    assert "the LoRA broken cannot be used" in response.text


def test_a_server_without_files(micro_cpu: Path) -> None:
    metrics = PrometheusMetrics()
    pipeline = AsyncPipeline.from_pretrained({"micro": micro_cpu}, observer=metrics)
    with serving(pipeline, metrics, ServeSettings()) as running:
        words = "loras given, but no LoRA files are served"
        assert words in message_of(running.post(**ONE, loras={"style": 1}), 422)
        assert running.post(**ONE, loras={}).status_code == 200
        assert running.client.get("/v1/loras").json()["data"] == []
