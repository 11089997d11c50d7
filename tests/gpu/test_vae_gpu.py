"""Decoding and encoding in slices and tiles on a GPU: captured graphs, the limit of ONNX Runtime, and memory."""

from __future__ import annotations

import subprocess
import sys
import time
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
from sdonnx.runtime.vae import vae_tiling

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
    monkeypatch.setattr(vae_tiling, "MAX_ELEMENTS", 2 * IMAGE + IMAGE // 2)
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
        assert (pixels.size * 4 <= vae_tiling.MAX_ELEMENTS) == fits
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


def test_tiles_replay_captured_graphs(build: Build) -> None:
    """Each size of tiles is captured: 40 x 32 latents in tiles of 16 have 16 and 4 rows, and 16 and 8 columns."""
    arguments = USUAL | {"height": 320, "width": 256}
    with OrtDiffusionPipeline.from_pretrained(build("sdxl-tiny")[1]) as pipeline:
        pipeline.enable_vae_tiling(128)
        first = pipeline("a fox", **arguments).images
        with captured_runs(pipeline) as launched:
            second = pipeline("a fox", **arguments).images
    assert psnr(first, second) > SAME_DB
    assert sorted(launched[Role.IMAGE_DECODER].values()) == [1, 2, 3, 6]


# Runs the code of its second argument, which defines `work`, and prints the peak of the memory that NVML counts for the
# device, in bytes.
WATCHED = """
import sys, threading, time
import numpy as np, pynvml
from sdonnx.environment_record import open_gpu
from sdonnx.models import abi
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.vae.vae_runs import ImageDecoder
handle = open_gpu()
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
before, peak, done = used(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, used() - before)
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
level = {"no": False, "yes": True, "offload": "offload"}[sys.argv[3]]
with OrtDiffusionPipeline.from_pretrained(sys.argv[1], low_memory=level) as pipeline:
    exec(sys.argv[2])
done.set()
watcher.join()
print(peak)
"""


def peak_bytes(folder: Path, code: str, level: str) -> int:
    command = [sys.executable, "-c", WATCHED, str(folder), code, level]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


# Decodes 4096x4096 pixels with the decoder of Stable Diffusion XL and nothing else.
LARGE = """
device, graphs = pipeline.device, pipeline._graphs
def decode():
    noise = np.random.default_rng(0).standard_normal((1, 1, 4, 512, 512)).astype(np.float32)
    buffers = {abi.STATE: device.upload(noise)}
    buffers[abi.IMAGES] = device.empty((1, 4096, 4096, 3), np.uint8)
    buffers[abi.SAMPLE] = device.empty((1, 4096, 4096, 3), np.float32)
    buffers[abi.FINITE] = device.empty((1,), np.bool_)
    split = pipeline._cache.splits.decoder(1, 512, 512)
    assert split.tile is not None
    ImageDecoder(graphs, split, (1, 4, 512, 512), 8, buffers).decode()
    assert buffers[abi.FINITE].numpy().all()
    assert buffers[abi.IMAGES].numpy().std() > 1
device_thread(device).run(decode)
"""
TWO_IMAGES = """
for _ in range(2):
    pipeline("a red fox in the snow", num_inference_steps=4)
"""


@pytest.mark.weekly
def test_4096_pixels_decode_within_24_gb(build: Build, note: Any) -> None:
    peak = peak_bytes(build("sdxl")[1], LARGE, "offload")
    note("decode_4096", {"peak_bytes": peak})
    assert peak < 24e9


# Generates two images and prints the peak of the memory that NVML counts for the device, in bytes.
OFFLOAD = """
import sys, threading, time
import pynvml
from sdonnx import OrtDiffusionPipeline
from sdonnx.environment_record import open_gpu
handle = open_gpu()
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
before, peak, done = used(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, used() - before)
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
level = {"no": False, "yes": True, "offload": "offload"}[sys.argv[2]]
with OrtDiffusionPipeline.from_pretrained(sys.argv[1], low_memory=level) as pipeline:
    for _ in range(2):
        pipeline("a red fox in the snow", num_inference_steps=4)
done.set()
watcher.join()
print(peak)
"""


@pytest.mark.parametrize("arch", ["sdxl-tiny", pytest.param("sdxl", marks=pytest.mark.weekly)])
def test_offloading_lowers_the_peak(arch: str, build: Build, note: Any) -> None:
    peaks = {level: peak_bytes(build(arch)[1], TWO_IMAGES, level) for level in ("no", "yes", "offload")}
    note("offload", {"pipeline": arch, "peak_bytes": peaks})
    assert peaks["offload"] <= 1.05 * peaks["yes"] <= 1.1 * peaks["no"]
    if arch == "sdxl":
        # The text encoders (1.6 GB in fp16) are not there with the denoiser.
        assert peaks["no"] - peaks["offload"] > 1.2e9


@pytest.mark.weekly
@pytest.mark.parametrize(("arch", "batch"), [("sdxl", 7), ("sdxl", 8), ("sdxl", 16), ("pixart-alpha", 8)])
def test_batches_at_1024(arch: str, batch: int, build: Build, note: Any) -> None:
    arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
    with OrtDiffusionPipeline.from_pretrained(build(arch)[1]) as pipeline:
        noise = np.random.default_rng(0).standard_normal((batch, 4, 128, 128)).astype(np.float32)
        pipeline("a fox", num_images_per_prompt=batch, latents=noise, **arguments)
        start = time.perf_counter()
        images = pipeline("a fox", num_images_per_prompt=batch, latents=noise, **arguments).images
        note("batches at 1024", {"arch": arch, "batch": batch, "seconds_of_2_steps": time.perf_counter() - start})
        for index in (0, batch - 1):
            single = pipeline("a fox", latents=noise[index : index + 1], **arguments).images
            assert psnr(images[index : index + 1], single) > SAME_DB
