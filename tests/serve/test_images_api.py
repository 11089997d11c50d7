"""The HTTP server with OpenAI's own client: images, edits, streams, models, errors, health and metrics."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from support.serve_load import CAPTIONS
from support.serving import TIMEOUT_S, Running, file_of, opened, serving_folder, until

from sdonnx import OrtDiffusionPipeline, ServeLimits
from sdonnx.serve.image_request import BatchKey
from sdonnx.serve.serve_settings import ServeSettings, read_api_keys

KEY = "secret-of-a-test"
STEPS = {"num_inference_steps": 3}


@pytest.fixture(scope="module")
def server(shapes_cpu: Path) -> Iterator[Running]:
    with serving_folder(shapes_cpu, ServeLimits(max_waiting=8)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def pipeline(shapes_cpu: Path) -> Iterator[OrtDiffusionPipeline]:
    """The same folder, without a server."""
    with OrtDiffusionPipeline.from_pretrained(shapes_cpu) as loaded:
        loaded.set_progress_bar_config(disable=True)
        yield loaded


def same(one: Image.Image, other: Image.Image, tolerance: int = 1) -> bool:
    """Return whether no value of two images, which are not flat, differs by more than rounding."""
    pair = [np.asarray(image.convert("RGB")).astype(int) for image in (one, other)]
    assert pair[0].std() > 10
    return pair[0].shape == pair[1].shape and int(np.abs(pair[0] - pair[1]).max()) <= tolerance


def picture() -> Image.Image:
    image = Image.new("RGB", (64, 48), "white")
    image.paste("red", (16, 16, 48, 40))
    return image


def test_images_are_those_of_the_pipeline(client: openai.OpenAI, pipeline: OrtDiffusionPipeline) -> None:
    fields = {"negative_prompt": "blur", "seed": 5, "guidance_scale": 4.0, "scheduler": "euler", **STEPS}
    response: Any = client.images.generate(prompt=CAPTIONS[1], n=2, size="64x48", model="shapes", extra_body=fields)
    assert [each.seed for each in response.data] == [5, 6]
    assert response.size == "64x48"
    before = pipeline.scheduler_config
    pipeline.scheduler = "euler"
    for index, each in enumerate(response.data):
        expected = pipeline(CAPTIONS[1], 48, 64, 3, 4.0, "blur", seed=5 + index).images[0]
        assert same(opened(each.b64_json), expected)
    pipeline.scheduler_config = before


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_formats_of_files(client: openai.OpenAI, kind: Any) -> None:
    sizes = []
    for quality in (10, 95):
        response = client.images.generate(
            prompt="a circle",
            output_format=kind,
            output_compression=quality,
            extra_body={"seed": 1, "num_inference_steps": 1},
        )
        assert response.data is not None
        assert opened(response.data[0].b64_json).format == kind.upper()
        sizes.append(len(response.data[0].b64_json or ""))
    assert (sizes[0] < sizes[1]) == (kind != "png")


def test_stream_has_previews_and_the_image(client: openai.OpenAI, pipeline: OrtDiffusionPipeline) -> None:
    fields = {"seed": 5, "stream_progress": True, "num_inference_steps": 8}
    stream = client.images.generate(prompt=CAPTIONS[0], stream=True, partial_images=2, extra_body=fields)
    events: list[Any] = list(stream)
    types = [event.type.partition(".")[2] for event in events]
    assert types.count("progress") == 8
    assert [kind for kind in types if kind != "progress"] == ["partial_image", "partial_image", "completed"]
    assert [event.partial_image_index for event in events if event.type.endswith("partial_image")] == [0, 1]
    assert [(event.step, event.steps) for event in events if event.type.endswith("progress")][-1] == (8, 8)
    assert same(opened(events[-1].b64_json), pipeline(CAPTIONS[0], num_inference_steps=8, seed=5).images[0])
    assert events[-1].seed == 5


def test_edit_starts_from_the_image(client: openai.OpenAI, pipeline: OrtDiffusionPipeline) -> None:
    response: Any = client.images.edit(
        image=("photo.png", file_of(picture())),
        prompt=CAPTIONS[1],
        extra_body={"seed": 2, "strength": 0.5, "num_inference_steps": 6},
    )
    expected = pipeline(CAPTIONS[1], num_inference_steps=6, image=picture(), strength=0.5, seed=2).images[0]
    assert response.size == "64x48"
    assert same(opened(response.data[0].b64_json), expected)


@pytest.mark.parametrize("form", ["transparent", "white", "of the image"])
def test_mask_keeps_the_rest(client: openai.OpenAI, pipeline: OrtDiffusionPipeline, form: str) -> None:
    white = Image.new("L", (64, 48), 0)
    white.paste(255, (32, 0, 64, 48))
    image, mask = picture(), white.convert("RGB")
    if form == "transparent":
        mask = picture().convert("RGBA")
    holder = image.convert("RGBA") if form == "of the image" else mask
    if form != "white":
        holder.putalpha(white.point(lambda value: 255 - value))
    arguments: dict[str, Any] = {"image": ("a.png", file_of(image if form != "of the image" else holder))}
    if form != "of the image":
        arguments["mask"] = ("b.png", file_of(mask if form == "white" else holder))
    response: Any = client.images.edit(prompt=CAPTIONS[1], extra_body={"seed": 2, **STEPS}, **arguments)
    expected = pipeline(CAPTIONS[1], 48, 64, num_inference_steps=3, image=picture(), mask_image=white, seed=2).images[0]
    assert same(opened(response.data[0].b64_json), expected)


def test_edit_streams_and_resizes(client: openai.OpenAI) -> None:
    stream: Any = client.images.edit(
        image=("photo.jpg", file_of(picture().resize((200, 100)), "JPEG")),
        prompt="a circle",
        size="64x32",
        stream=True,
        partial_images=1,
        extra_body=STEPS,
    )
    events = list(stream)
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert opened(events[-1].b64_json).size == (64, 32)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert client.models.retrieve("shapes").owned_by == "sdonnx"
    with pytest.raises(openai.NotFoundError, match="expected one of shapes"):
        client.models.retrieve("../../etc/passwd")


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"model": "other"}, openai.NotFoundError, "the model is unknown"),
        ({"size": "1x"}, openai.UnprocessableEntityError, "size is '1x'"),
        (
            {"size": "99999x99999"},
            openai.UnprocessableEntityError,
            "height is 99999; expected a whole number from 1 to",
        ),
        ({"size": "62x62"}, openai.UnprocessableEntityError, "multiple of 4"),
        (
            {"n": 11},
            openai.UnprocessableEntityError,
            "^(?!.*num_images).*n is 11; expected a whole number from 1 to 10",
        ),
        ({"response_format": "url"}, openai.UnprocessableEntityError, "the server keeps no files; leave the field out"),
        ({"extra_body": {"num_inference_steps": 99999}}, openai.UnprocessableEntityError, "from 1 to 150"),
        ({"extra_body": {"lora": "x"}}, openai.UnprocessableEntityError, "lora: is not a parameter"),
        ({"extra_body": {"scheduler": "x"}}, openai.UnprocessableEntityError, "x"),
        ({"stream": True, "extra_body": {"n": 1.5}}, openai.UnprocessableEntityError, "n: "),
    ]
    for fields, error, words in cases:
        with pytest.raises(error, match=words) as caught:
            client.images.generate(prompt="a circle", **fields)
        assert caught.value.type == "invalid_request_error"


def test_calls_of_the_client_that_are_not_offered(client: openai.OpenAI) -> None:
    files = [("a.png", file_of(picture())), ("b.png", file_of(picture()))]
    with pytest.raises(openai.UnprocessableEntityError, match="the form has 2 files named image; expected one, since"):
        client.images.edit(image=files, prompt="a circle")
    words = "is not part of this server; expected POST /v1/images/generations or /v1/images/edits"
    with pytest.raises(openai.NotFoundError, match=f"POST /v1/images/variations {words}"), pytest.warns(match="depr"):
        client.images.create_variation(image=files[0])
    with pytest.raises(openai.NotFoundError, match=f"POST /v1/chat/completions {words}"):
        client.chat.completions.create(model="shapes", messages=[])


def test_an_empty_prompt(client: openai.OpenAI, pipeline: OrtDiffusionPipeline) -> None:
    response: Any = client.images.generate(prompt="", extra_body={"seed": 1, "num_inference_steps": 8})
    expected = pipeline("", num_inference_steps=8, seed=1).images[0]
    found = np.asarray(opened(response.data[0].b64_json).convert("RGB")).astype(int)
    assert int(np.abs(found - np.asarray(expected)).max()) <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_image(server: Running, stream: bool) -> None:
    body = json.dumps({"prompt": "a circle", "num_inference_steps": 150, "n": 4, "stream": stream}).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    def cancelled() -> float:
        return server.value("sdonnx_requests_total", model="shapes", outcome="cancelled")

    def steps() -> float:
        return server.value("sdonnx_steps_total", model="shapes")

    before = cancelled(), steps()
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(b"POST /v1/images/generations HTTP/1.1\r\n" + head.encode() + body)
        until(lambda: steps() > before[1] + 1)
    until(lambda: cancelled() == before[0] + 1)
    assert server.post(**STEPS).status_code == 200
    assert steps() < before[1] + 100


@contextlib.contextmanager
def held_batch(server: Running) -> Iterator[None]:
    """Hold the next batch after its first step, however slow the machine is, until the block ends."""
    observer, released = server.pipeline.observer, threading.Event()
    steps = itertools.count()
    stepped = observer.stepped

    def hold(key: BatchKey, images: int) -> None:
        stepped(key, images)
        if next(steps) == 1:
            released.wait(TIMEOUT_S)

    with mock.patch.object(observer, "stepped", hold):
        try:
            yield
        finally:
            released.set()


def test_overload_is_refused_and_recovers(server: Running) -> None:
    with (
        held_batch(server),
        httpx.Client(base_url=server.url) as leaving,
        leaving.stream(
            "POST",
            "/v1/images/generations",
            json={"prompt": "a circle", "num_inference_steps": 150, "n": 8, "stream": True, "stream_progress": True},
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == "event: image_generation.progress"
        until(lambda: server.pipeline.waiting == 4)  # the first half runs and the second half waits
        refused = server.post(n=5)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.client.get("/health/ready").status_code == 200
    until(lambda: server.pipeline.waiting == 0)
    assert server.post(**STEPS).status_code == 200


def test_metrics_add_up(server: Running) -> None:
    names = {"model": "shapes"}
    before = {
        name: server.value(name, **names)
        for name in ("sdonnx_batch_images_sum", "sdonnx_image_steps_total", "sdonnx_queue_seconds_count")
    }
    completed = server.value("sdonnx_requests_total", outcome="completed", **names)
    assert server.post(n=3, **STEPS).status_code == 200
    assert server.value("sdonnx_requests_total", outcome="completed", **names) == completed + 1
    assert server.value("sdonnx_batch_images_sum", **names) == before["sdonnx_batch_images_sum"] + 3
    assert server.value("sdonnx_queue_seconds_count", **names) == before["sdonnx_queue_seconds_count"] + 3
    assert server.value("sdonnx_image_steps_total", **names) == before["sdonnx_image_steps_total"] + 9
    assert server.value("sdonnx_queue_images") == 0
    assert server.value("sdonnx_captured_shapes", **names) >= 1
    assert server.value("process_resident_memory_bytes") > 10**7
    assert server.value("sdonnx_stage_seconds_count", stage="encode_file", **names) >= 3
    assert server.value("sdonnx_http_responses_total", path="/v1/images/generations", status="200") >= 1


def test_health_of_a_failed_pipeline(server: Running) -> None:
    for path in ("/health/live", "/health/ready"):
        assert server.client.get(path).json() == {"status": "ok"}
    worker = server.pipeline._worker
    worker.failure = "RuntimeError: the GPU is lost"
    try:
        for path in ("/health/live", "/health/ready"):
            response = server.client.get(path)
            assert response.status_code == 503
            assert "the GPU is lost" in response.json()["error"]["message"]
        assert server.post(**STEPS).status_code == 503
    finally:
        worker.failure = None


def test_openapi_document_names_every_field(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/images/generations", "/v1/images/edits", "/v1/models", "/v1/models/{model}", "/v1/loras",
        "/health/live", "/health/ready", "/metrics",
    }  # fmt: skip
    fields = document["components"]["schemas"]["GenerationFields"]["properties"]
    assert {"prompt", "n", "size", "negative_prompt", "seed", "guidance_scale", "scheduler"} <= fields.keys()
    form = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"prompt", "image", "mask", "strength"} <= form["properties"].keys()
    assert form["required"] == ["prompt", "image"]
    errors = document["paths"]["/v1/images/generations"]["post"]["responses"]
    assert {"400", "401", "404", "408", "413", "422", "429", "503"} <= errors.keys()


def test_api_keys(shapes_cpu: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n{KEY}\nother\n")
    keys = read_api_keys(file, "third, fourth")
    assert keys == ("third", "fourth", KEY, "other")
    with serving_folder(shapes_cpu, settings=ServeSettings(api_keys=keys)) as server:
        for authorization in ("", KEY, "Bearer wrong", f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", "Bearer \xe9"):
            response = server.client.get("/v1/models", headers={b"Authorization": authorization.encode("latin-1")})
            assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer"), authorization
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/health/live").status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["shapes"]
        with (
            pytest.raises(openai.AuthenticationError),
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        ):
            client.images.generate(prompt="a circle")
