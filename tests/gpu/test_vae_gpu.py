"""Decoding and encoding in slices and tiles on a GPU: captured graphs, the limit of ONNX Runtime, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from PIL import Image

from sdonnx.metrics import psnr
from sdonnx.models.spec import Role
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.vae import split

Build = Callable[[str], tuple[Path, Path]]

USUAL: dict[str, Any] = {"height": 256, "width": 256, "num_inference_steps": 2, "output_type": "np", "seed": 0}
# Largest tensor of an image of that size in the tiny pipelines: 32 channels of the whole image.
IMAGE = 32 * 256 * 256
# Two runs of one image differ by the order of fp16 sums.
SAME_DB = 45


@contextmanager
def captured_runs(pipeline: Any) -> Iterator[dict[Role, Counter[int]]]:
    """Count the launches of each captured graph, by the role of its graph."""
    launched: dict[Role, Counter[int]] = {}

    @contextmanager
    def note(role: Role, run: Run) -> Iterator[None]:
        assert run._replay is not None, f"{role} is not captured"
        launched.setdefault(role, Counter())[id(run._replay)] += 1
        yield

    pipeline.observe(note)
    yield launched
    pipeline.observe(None)


@pytest.mark.parametrize("arch", ["sdxl-tiny", "pixart-tiny"])
def test_slices_replay_one_captured_graph(arch: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [Image.fromarray(np.full((256, 256, 3), 40 * seed, np.uint8)) for seed in range(5)]
    calls = [USUAL, USUAL | {"image": images, "strength": 0.6, "num_inference_steps": 4}]
    with OrtDiffusionPipeline.from_pretrained(build(arch)[1]) as whole:
        calls = calls[: 1 + whole._graphs.family.has(Role.IMAGE_ENCODER)]
        expected = [whole(["a fox"] * 5, **call).images for call in calls]
    monkeypatch.setattr(split, "MAX_ELEMENTS", 2 * IMAGE + IMAGE // 2)
    with OrtDiffusionPipeline.from_pretrained(build(arch)[1]) as pipeline:
        for _ in range(2):
            for call, images_of_call in zip(calls, expected, strict=True):
                with captured_runs(pipeline) as launched:
                    found = pipeline(["a fox"] * 5, **call).images
                assert psnr(found, images_of_call) > SAME_DB
                assert list(launched[Role.IMAGE_DECODER].values()) == [3]
                if "image" in call:
                    assert list(launched[Role.IMAGE_ENCODER].values()) == [3]


def test_onnxruntime_refuses_a_larger_resize() -> None:
    """The limit that slices keep: a nearest Resize with 2^31 elements fails, and the same with one row less runs."""
    nodes = [
        helper.make_node(
            "Resize", ["x", "", "scales"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric"
        ),
        helper.make_node("ReduceMax", ["y"], ["out"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 256, "h", 512])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT16, [1, 1, 1, 1])],
        [
            helper.make_tensor("scales", TensorProto.FLOAT, [4], [1, 1, 2, 2]),
            helper.make_tensor("start", TensorProto.INT64, [4], [0] * 4),
            helper.make_tensor("end", TensorProto.INT64, [4], [1] * 4),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    device_for("cuda")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
    for rows, fits in ((511, True), (512, False)):
        pixels = np.zeros((8, 256, rows, 512), np.float16)
        assert (pixels.size * 4 <= split.MAX_ELEMENTS) == fits
        if fits:
            session.run(None, {"x": pixels})
        else:
            with pytest.raises(Exception, match="Resize"):
                session.run(None, {"x": pixels})


def test_batches_beyond_the_limit_of_onnxruntime(build: Build) -> None:
    """65 images of 1024x1024 exceed 2^31 - 1 elements in the last Resize of a decoder with 32 channels."""
    arguments: dict[str, Any] = {"num_inference_steps": 1, "guidance_scale": 1, "output_type": "np", "seed": 0}
    with OrtDiffusionPipeline.from_pretrained(build("sdxl-tiny")[1]) as pipeline, captured_runs(pipeline) as launched:
        images = pipeline("a fox", 1024, 1024, num_images_per_prompt=65, **arguments).images
    assert images.shape == (65, 1024, 1024, 3)
    assert list(launched[Role.IMAGE_DECODER].values()) == [2]
    assert images.std(axis=(1, 2, 3)).min() > 0.02


@pytest.mark.full
@pytest.mark.parametrize("batch", [7, 8, 16])
def test_sdxl_at_1024_in_batches(batch: int, build: Build, note: Any) -> None:
    import time

    arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
    with OrtDiffusionPipeline.from_pretrained(build("sdxl")[1]) as pipeline:
        noise = np.random.default_rng(0).standard_normal((batch, 4, 128, 128)).astype(np.float32)
        pipeline("a fox", num_images_per_prompt=batch, latents=noise, **arguments)
        start = time.perf_counter()
        images = pipeline("a fox", num_images_per_prompt=batch, latents=noise, **arguments).images
        note("sdxl_batches", {"batch": batch, "seconds_of_2_steps": time.perf_counter() - start})
        for index in (0, batch - 1):
            single = pipeline("a fox", latents=noise[index : index + 1], **arguments).images
            assert psnr(images[index : index + 1], single) > SAME_DB
