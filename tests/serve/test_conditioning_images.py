"""Requests with images for ControlNets, T2I-Adapters and IP-Adapters, in process and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from support.control_networks import picture, write_adapter, write_controlnet
from support.drawing import MIN_PSNR_DB
from support.pipeline_cache import PipelineCache
from support.pipelines import refused
from support.serving import Recorder, Running, file_of, opened, serving_folder

from sdonnx import AsyncPipeline, ImageRequest, OrtDiffusionPipeline, ServeLimits
from sdonnx.errors import OptionError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import psnr
from sdonnx.runtime.inputs.conditioning_images import CONDITIONING_ARGUMENTS, ConditioningValues, offered_inputs
from sdonnx.serve.http.uploaded_images import read_conditioning
from sdonnx.serve.serve_settings import ServeSettings

# Images next to the prompt are left out of a call to compare it.
pytestmark = pytest.mark.filterwarnings("ignore:image is given without")

SMALL: dict[str, Any] = {"height": 64, "width": 48, "num_inference_steps": 2}
LIMITS = ServeLimits(batch_wait_ms=200)
PATHS = ("/v1/images/generations", "/v1/images/edits")
_MAX_PIXELS = 256 * 256


@pytest.fixture(scope="module")
def controlled(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion with two ControlNets, one of them for grayscale images."""
    source, work = pipelines.micro(), tmp_path_factory.mktemp("controlnets")
    nets = [
        write_controlnet(source, work / "one", 1),
        write_controlnet(source, work / "two", 2, conditioning_channels=1),
    ]
    return pipelines.optimized(pipelines.exported(source, controlnets=nets), provider="cpu")


@pytest.fixture(scope="module")
def union(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion XL with a ControlNet-Union."""
    source = pipelines.micro("sdxl-tiny")
    net = write_controlnet(source, tmp_path_factory.mktemp("union") / "union", 1, union=True)
    return pipelines.optimized(pipelines.exported(source, controlnets=[net]), provider="cpu")


@pytest.fixture(scope="module")
def adapted(pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion with a T2I-Adapter."""
    source = pipelines.micro()
    net = write_adapter(source, tmp_path_factory.mktemp("adapter") / "adapter", 1)
    return pipelines.optimized(pipelines.exported(source, t2i_adapters=[net]), provider="cpu")


@pytest.fixture(scope="module")
def prompted(pipelines: PipelineCache) -> Path:
    """Stable Diffusion with two IP-Adapters."""
    return pipelines.optimized(pipelines.adapted(pipelines.micro("tiny-ip-adapter")), provider="cpu")


@pytest.fixture(scope="module")
def server(controlled: Path) -> Iterator[Running]:
    with serving_folder(controlled, settings=ServeSettings(max_upload_pixels=_MAX_PIXELS)) as running:
        yield running


def alone(pipeline: OrtDiffusionPipeline, **arguments: Any) -> Any:
    """Return the image of a call without a queue, and check that the images next to the prompt change it."""
    found = pipeline(**arguments).images[0]
    plain = {name: value for name, value in arguments.items() if not name.startswith(("control", "adapter", "guess"))}
    if "ip_adapter_image" in plain:
        plain["ip_adapter_scale"] = 0.0
    assert np.std(found) > 0.02
    assert psnr(found, pipeline(**plain).images[0]) < 45
    return found


def images_of(folder: Path, requests: list[dict[str, Any]]) -> tuple[list[Any], list[int]]:
    """Return the images of requests that arrive at once, and the sizes of their batches."""
    recorder = Recorder()

    async def body() -> list[Any]:
        async with AsyncPipeline.from_pretrained({"model": folder}, limits=LIMITS, observer=recorder) as queue:
            jobs = [await queue.accept(ImageRequest(**each)) for each in requests]
            return [(await job).images[0] for job in jobs]

    return asyncio.run(body()), recorder.batches


def requests_with(count: int = 3, **fields: Any) -> list[dict[str, Any]]:
    common = {"prompt": "a fox", "output_type": "np", **SMALL, **fields}
    return [{**common, "seed": index, "guidance_scale": 3.0 + index} for index in range(count)]


def assert_equal_alone(folder: Path, requests: list[dict[str, Any]], images: list[Any]) -> None:
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        for request, image in zip(requests, images, strict=True):
            assert psnr(image, alone(pipeline, **request)) > MIN_PSNR_DB


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"controlnet_conditioning_scale": [0.8, 0.4], "control_guidance_end": [1.0, 0.5], "guess_mode": True},
        {"image": picture(9), "strength": 0.9},
    ],
    ids=["defaults", "weights", "image"],
)
def test_control_images_differ_within_a_batch(controlled: Path, fields: dict[str, Any]) -> None:
    requests = requests_with(**fields)
    for index, request in enumerate(requests):  # of other sizes, and one with transparency
        sizes = ((90, 70), (48, 64), (30, 20))
        request["control_image"] = [
            picture(index, sizes[index]).convert("RGBA" if index else "RGB"),
            picture(10 + index),
        ]
    images, batches = images_of(controlled, requests)
    assert batches == [2, 1]
    assert_equal_alone(controlled, requests, images)
    assert psnr(images[0], images[1]) < 45


@pytest.mark.weekly
def test_images_of_a_union_share_no_batch(union: Path) -> None:
    """Its transformer attends over the batch, as in diffusers."""
    requests = requests_with(2, control_mode=[2, 0], controlnet_conditioning_scale=[1.0, 0.5])
    for index, request in enumerate(requests):
        request["control_image"] = [picture(index), picture(10 + index)]
    images, batches = images_of(union, requests)
    assert batches == [1, 1]
    assert_equal_alone(union, requests, images)


def test_images_of_adapters_differ_within_a_batch(adapted: Path) -> None:
    requests = requests_with(2, height=64, width=64, adapter_conditioning_scale=0.9, adapter_conditioning_factor=0.6)
    for index, request in enumerate(requests):
        request["adapter_image"] = picture(index)
    images, batches = images_of(adapted, requests)
    assert batches == [2]
    assert_equal_alone(adapted, requests, images)


def test_only_equal_weights_and_image_prompts_share_a_batch(controlled: Path, prompted: Path) -> None:
    pair = [picture(1), picture(2)]
    changes: list[dict[str, Any]] = [
        {"control_image": pair},
        {"control_image": pair, "controlnet_conditioning_scale": 0.5},
        {"control_image": pair, "control_guidance_start": 0.5},
        {"control_image": pair, "guess_mode": True},
        {},
        {"control_image": pair, "controlnet_conditioning_scale": 1.0, "guess_mode": False},  # the defaults
    ]
    common = {"prompt": "a fox", "num_inference_steps": 1, "height": 64, "width": 48}
    _, batches = images_of(controlled, [{**common, **change} for change in changes])
    assert sorted(batches) == [1, 1, 1, 1, 2]
    same = [picture(1), picture(2)]
    changes = [{"ip_adapter_image": each} for each in (pair, pair[::-1], same)]
    changes += [{"ip_adapter_image": pair, "ip_adapter_scale": 0.5}, {}]
    _, batches = images_of(prompted, [{**common, **change} for change in changes])
    assert sorted(batches) == [1, 1, 1, 2]


def test_image_prompts(prompted: Path) -> None:
    requests = requests_with(2, ip_adapter_image=[picture(1), picture(2)], ip_adapter_scale=[0.7, 0.4])
    images, batches = images_of(prompted, requests)
    assert batches == [2]
    assert_equal_alone(prompted, requests, images)


def test_folders_with_ip_adapters_serve_requests_without_images(prompted: Path) -> None:
    async def body() -> Any:
        async with AsyncPipeline.from_pretrained({"model": prompted}, limits=ServeLimits(max_batch_size=1)) as queue:
            await asyncio.to_thread(queue.warmup, [(64, 48)])
            await queue.check()
            return (await queue.generate("a fox", seed=1, output_type="np", **SMALL)).images[0]

    image = asyncio.run(body())
    with OrtDiffusionPipeline.from_pretrained(prompted) as pipeline:
        off = pipeline(
            "a fox", seed=1, output_type="np", ip_adapter_image=[picture(1)] * 2, ip_adapter_scale=0, **SMALL
        )
    assert image.std() > 0.02
    assert psnr(image, off.images[0]) > MIN_PSNR_DB


PAIR = [picture(1), picture(2)]
BAD: list[tuple[str, dict[str, Any], list[str]]] = [
    ("micro_cpu", {"control_image": PAIR}, ["control_image given", "a folder with ControlNets"]),
    ("micro_cpu", {"adapter_image": PAIR}, ["adapter_image given", "a folder with T2I-Adapters"]),
    ("micro_cpu", {"ip_adapter_image": PAIR}, ["ip_adapter_image given", "a pipeline with IP-Adapters"]),
    ("micro_cpu", {"guess_mode": True}, ["guess_mode given", "a folder with ControlNets"]),
    ("controlled", {"control_image": PAIR[0]}, ["1 images in control_image", "2, one for each ControlNet"]),
    ("controlled", {"control_image": PAIR * 5}, ["control_image has 10 images", "1 to 8"]),
    ("controlled", {"control_image": []}, ["control_image has 0 images"]),
    ("controlled", {"control_image": "/etc/passwd"}, ["control_image is a str"]),
    ("controlled", {"control_image": [PAIR[0], np.zeros((4, 4, 3))]}, ["control_image is a ndarray"]),
    ("controlled", {"guess_mode": True}, ["guess_mode without control_image"]),
    ("controlled", {"control_image": PAIR, "guess_mode": 1}, ["guess_mode is 1"]),
    ("controlled", {"control_image": PAIR, "controlnet_conditioning_scale": [1, 2, 3]}, ["3 values"]),
    ("controlled", {"control_image": PAIR, "controlnet_conditioning_scale": float("nan")}, ["nan"]),
    ("controlled", {"control_image": PAIR, "control_guidance_start": 1.0}, ["a start before the end"]),
    ("controlled", {"control_image": PAIR, "control_mode": 1}, ["control_mode is 1", "a ControlNet-Union"]),
    ("controlled", {"adapter_image": PAIR}, ["adapter_image given"]),
    ("prompted", {"ip_adapter_image": PAIR[0]}, ["1 entries of ip_adapter_image", "2, one for each"]),
    ("prompted", {"ip_adapter_image": PAIR, "ip_adapter_scale": "x"}, ["ip_adapter_scale"]),
    ("prompted", {"ip_adapter_scale": 0.5}, ["ip_adapter_scale without ip_adapter_image"]),
]


@pytest.mark.parametrize(("name", "fields", "words"), BAD, ids=[f"{name} {str(f)[:30]}" for name, f, _ in BAD])
def test_values_that_cannot_be_used(
    name: str, fields: dict[str, Any], words: list[str], request: pytest.FixtureRequest
) -> None:
    async def body() -> None:
        async with AsyncPipeline.from_pretrained({"model": request.getfixturevalue(name)}) as queue:
            with refused(OptionError, *words):
                queue.submit("a fox", **SMALL, **fields)
            assert queue.waiting == 0

    asyncio.run(body())


def text_of(image: Image.Image, *, url: bool = False) -> str:
    text = base64.b64encode(file_of(image)).decode()
    return f"data:image/png;base64,{text}" if url else text


def assert_same(response: httpx.Response, expected: Image.Image) -> None:
    """Compare all levels of an image in an answer with the pipeline's own image."""
    assert response.status_code == 200, response.text
    found = opened(response.json()["data"][0]["b64_json"])
    pair = [np.asarray(image.convert("RGB")).astype(int) for image in (found, expected)]
    assert pair[0].std() > 5
    assert np.abs(pair[0] - pair[1]).max() <= 1


def test_control_images_over_http(server: Running, controlled: Path) -> None:
    weights = {"controlnet_conditioning_scale": [0.8, 0.4], "control_guidance_end": 0.9, "guess_mode": True}
    generated = server.post(
        prompt="a fox",
        size="48x64",
        seed=4,
        num_inference_steps=2,
        control_image=[text_of(PAIR[0]), text_of(PAIR[1], url=True)],
        **weights,
    )
    edited = server.client.post(
        PATHS[1],
        data={
            "prompt": "a fox",
            "seed": "4",
            "num_inference_steps": "4",
            "controlnet_conditioning_scale[]": ["0.8", "0.4"],
            "control_guidance_end": "0.9",
            "guess_mode": "true",
        },
        files=[
            ("image", ("a.png", file_of(picture(9, (48, 64))))),
            ("control_image[]", ("b.png", file_of(PAIR[0]))),
            ("control_image[]", ("c.png", file_of(PAIR[1]))),
        ],
    )
    with OrtDiffusionPipeline.from_pretrained(controlled) as pipeline:
        common: dict[str, Any] = {"prompt": "a fox", "seed": 4, "control_image": PAIR, **weights}
        assert_same(generated, pipeline(**common, **SMALL).images[0])
        assert_same(edited, pipeline(**common, num_inference_steps=4, image=picture(9, (48, 64))).images[0])


def test_image_prompts_over_http(prompted: Path) -> None:
    with serving_folder(prompted) as server, OrtDiffusionPipeline.from_pretrained(prompted) as pipeline:
        fields = {"prompt": "a fox", "size": "48x64", "seed": 4, "num_inference_steps": 2}
        found = server.post(**fields, ip_adapter_image=[text_of(each) for each in PAIR], ip_adapter_scale=0.6)
        expected = pipeline("a fox", seed=4, ip_adapter_image=PAIR, ip_adapter_scale=0.6, **SMALL).images[0]
        assert_same(found, expected)
        refused_one = server.post(**fields, control_image=text_of(PAIR[0]))
        assert refused_one.status_code == 422
        assert "expected a folder with ControlNets" in refused_one.json()["error"]["message"]


TEXT = text_of(PAIR[0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"control_image": "http://127.0.0.1/a.png"}, "control_image is no base64"),
        ({"control_image": "data:image/png,abc"}, "a data URL without base64"),
        ({"control_image": "é"}, "control_image is no base64"),
        ({"control_image": ""}, "control_image cannot be decoded"),
        ({"control_image": "aGVsbG8="}, "control_image cannot be decoded"),
        ({"control_image": {"url": TEXT}}, "control_image.0: input should be a valid string"),
        ({"control_image": [[TEXT]]}, "control_image.0: input should be a valid string"),
        ({"control_image": []}, "control_image: "),
        ({"control_image": [TEXT] * 9}, "control_image: "),
        ({"control_image": TEXT}, "one for each ControlNet"),
        ({"control_image": text_of(Image.new("L", (300, 300)))}, "control_image is 300x300 pixels"),
        ({"control_image": [text_of(Image.new("L", (256, 200)))] * 2}, "control_image is 256x200 pixels"),
        ({"control_image": [TEXT] * 2, "controlnet_conditioning_scale": "1"}, "controlnet_conditioning_scale.0: "),
        ({"control_image": [TEXT] * 2, "controlnet_conditioning_scale": [1, 2, 3]}, "3 values"),
        ({"control_image": [TEXT] * 2, "control_guidance_end": 2}, "control_guidance_end.0: "),
        ({"control_image": [TEXT] * 2, "control_guidance_start": 1}, "a start before the end"),
        ({"control_image": [TEXT] * 2, "control_mode": 1.5}, "control_mode.0: "),
        ({"guess_mode": 1}, "guess_mode: "),
        ({"adapter_image": TEXT}, "a folder with T2I-Adapters"),
        ({"ip_adapter_image": TEXT}, "a pipeline with IP-Adapters"),
    ],
)
def test_fields_that_cannot_be_used(server: Running, fields: dict[str, Any], words: str) -> None:
    response = server.post(num_inference_steps=1, **fields)
    assert response.status_code == 422, response.text
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        ({"control_image": "http://127.0.0.1/a.png"}, 0, "addresses are not opened"),
        ({}, 1, "one for each ControlNet"),
        ({}, 9, "control_image has 9 images"),
        ({}, 12, ""),
        ({"controlnet_conditioning_scale": ["x", "1"]}, 2, "controlnet_conditioning_scale.0: "),
        ({"controlnet_conditioning_scale": ["nan"]}, 2, "controlnet_conditioning_scale.0: "),
        ({"guess_mode": ["true", "true"]}, 2, "guess_mode is twice in the form"),
    ],
)
def test_forms_that_cannot_be_used(server: Running, data: dict[str, Any], count: int, words: str) -> None:
    file = file_of(picture(1, (48, 64)))
    files = [("image", ("a.png", file)), *[("control_image", ("b.png", file))] * count]
    response = server.client.post(PATHS[1], data={"prompt": "a fox", "num_inference_steps": "1", **data}, files=files)
    assert response.status_code in (400, 422), response.text
    assert words in response.json()["error"]["message"]


def test_openapi_document_describes_the_fields(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    fields = document["components"]["schemas"]["GenerationFields"]["properties"]
    kinds = [each["type"] for each in fields["control_image"]["anyOf"]]
    assert kinds == ["string", "array", "null"]
    form = document["paths"][PATHS[1]]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["control_image"]["items"] == {"type": "string", "format": "binary"}
    assert {"control_mode", "ip_adapter_scale"} <= form["properties"].keys() & fields.keys()


def test_uploads_keep_their_mode() -> None:
    gray = picture(1).convert("L")
    read = read_conditioning({"control_image": [file_of(gray), text_of(PAIR[0])]}, _MAX_PIXELS)
    assert [image.mode for image in read["control_image"]] == ["L", "RGB"]
    assert np.array_equal(np.asarray(read["control_image"][0]), np.asarray(gray))


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("controlled", ["control_image"]),
        ("union", ["control_image", "control_mode"]),
        ("adapted", ["adapter_image"]),
        ("prompted", ["ip_adapter_image"]),
        ("micro_cpu", []),
    ],
)
def test_inputs_are_those_that_the_folder_offers(folder: str, names: list[str], request: pytest.FixtureRequest) -> None:
    assert offered_inputs(PipelineFolder.open(request.getfixturevalue(folder))) == names


def test_every_value_is_an_argument() -> None:
    """A field that is missing from the table would be left out of calls without a word."""
    assert [each.name for each in dataclasses.fields(ConditioningValues)] == [
        each.name for each in CONDITIONING_ARGUMENTS
    ]
