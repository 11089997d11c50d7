"""Calls that cannot succeed are refused before anything of their size is allocated, and others are not."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from support.pipelines import refused

from sdonnx.errors import DeviceMemoryError, OptionError
from sdonnx.runtime import request_limits
from sdonnx.runtime.device.device import Device, host_memory_errors, memory_errors
from sdonnx.runtime.pipeline import OrtDiffusionPipeline
from sdonnx.runtime.request_limits import RequestSize, denoiser_elements

USUAL: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "seed": 0}
GIGABYTE = 10**9


@contextmanager
def cheap() -> Iterator[None]:
    """Expect a second and 100 MB at most."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    yield
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


EMBEDDINGS = np.broadcast_to(np.zeros((1, 77, 64), np.float32), (10**8, 77, 64))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_images_per_prompt": 10**7},
        {"num_images_per_prompt": 10**12, "guidance_scale": 1},
        {"num_images_per_prompt": 10**9, "output_type": "latent"},
        {"height": 8 * 10**8},
        {"height": 8 * 10**8, "width": 8 * 10**8},
        {"width": 8 * 10**8, "output_type": "np"},
        {"prompt": ["a"] * 4_000_000, "height": 512, "width": 512},
        {"prompt": None, "prompt_embeds": EMBEDDINGS, "negative_prompt_embeds": EMBEDDINGS},
        {"num_images_per_prompt": 10**7, "image": np.zeros((64, 64, 3), np.float32)},
    ],
    ids=str,
)
def test_huge_calls_are_refused(arguments: dict[str, Any], ours: OrtDiffusionPipeline) -> None:
    given = {"prompt": "a"} | USUAL | arguments
    with cheap(), refused(DeviceMemoryError, f" of {given['height']}x{given['width']} need", "GB"):
        ours(**given)


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (7, 64), (64, 4), (0, 64), (64, 0), (-8, 64)], ids=str)
def test_sizes_without_latents_are_refused(size: tuple[int, int], ours: OrtDiffusionPipeline) -> None:
    name, value = next((name, edge) for name, edge in zip(("height", "width"), size, strict=True) if edge != 64)
    with refused(OptionError, f"{name} is {value}", "a multiple of 8"):
        ours("a", **USUAL | {"height": size[0], "width": size[1]})
    with refused(OptionError, f"{name} is {value}", "a multiple of 8"):
        ours.warmup([(1, *size)])


def test_the_smallest_size_is_generated(ours: OrtDiffusionPipeline) -> None:
    assert ours("a", **USUAL | {"height": 8, "width": 8}).images[0].size == (8, 8)


@pytest.mark.parametrize("shape", [(10**7, 64, 64), (1, 8 * 10**8, 64), (2, 8 * 10**7, 8 * 10**7)])
def test_huge_shapes_are_not_captured(shape: tuple[int, int, int], ours: OrtDiffusionPipeline) -> None:
    with cheap(), refused(DeviceMemoryError, f"{shape[1]}x{shape[2]}", "are available"):
        ours.warmup([shape])


def test_other_huge_arguments(ours: OrtDiffusionPipeline) -> None:
    huge = np.broadcast_to(np.zeros((1, 4, 8, 8), np.float32), (10**9, 4, 8, 8))
    with cheap(), refused(OptionError, "latents of shape"):
        ours("a", **USUAL, latents=huge)
    with cheap(), refused(OptionError, "num_inference_steps is 1000000000", "at most 1000000"):
        ours("a", **USUAL | {"num_inference_steps": 10**9})


def test_pipeline_is_usable_after_a_refusal(ours: OrtDiffusionPipeline) -> None:
    expected = ours("a", **USUAL, output_type="np").images
    with refused(DeviceMemoryError):
        ours("a", **USUAL, num_images_per_prompt=10**8)
    np.testing.assert_array_equal(ours("a", **USUAL, output_type="np").images, expected)


def test_refusal_depends_on_the_memory_that_is_there(ours: OrtDiffusionPipeline, monkeypatch: Any) -> None:
    estimate = ours._reader._limits._estimate
    request = RequestSize(2, 64, 64, 2, 77, 64 * 64, "np")
    needed = estimate.device_bytes(request) + estimate.host_bytes(request)
    monkeypatch.setattr(request_limits, "available_memory", lambda: needed - 1)
    with refused(DeviceMemoryError, "2 images of 64x64", f"{needed / 1e6:,.0f} MB", "fewer images"):
        ours(["a", "b"], **USUAL, output_type="np")
    monkeypatch.setattr(request_limits, "available_memory", lambda: needed)
    assert ours(["a", "b"], **USUAL, output_type="np").images.shape == (2, 64, 64, 3)


class FakeGpu:
    """A device of 8 GB, of which this process uses some after a while."""

    def __init__(self) -> None:
        self.free = 7 * GIGABYTE

    def memory(self) -> tuple[int, int]:
        return self.free, 8 * GIGABYTE


def test_memory_that_the_arena_holds_counts_as_free(ours: OrtDiffusionPipeline, monkeypatch: Any) -> None:
    limits, gpu = ours._reader._limits, FakeGpu()
    monkeypatch.setattr(limits, "_device", gpu)
    monkeypatch.setattr(limits, "_most_free", gpu.free)
    monkeypatch.setattr(limits, "_free_memory", lambda: gpu.memory()[0])
    shape: dict[str, Any] = {"tokens": 77, "guided": True}
    gpu.free = 0
    limits.require_shape(1, 1024, 1024, **shape)
    with refused(DeviceMemoryError, "on the device", "7.0 GB are available"):
        limits.require_shape(500, 1024, 1024, **shape)
    gpu.free = 500 * GIGABYTE  # another process has ended
    limits.require_shape(500, 1024, 1024, **shape)


# Limits of servers


def test_limits_of_the_operator(micro_cpu: Path) -> None:
    with OrtDiffusionPipeline.from_pretrained(micro_cpu, max_batch_size=2, max_pixels=64 * 64) as pipeline:
        assert len(pipeline(["a", "b"], **USUAL).images) == 2
        with refused(OptionError, "a batch of 3 images", "at most 2", "fewer images"):
            pipeline("a", **USUAL, num_images_per_prompt=3)
        with refused(OptionError, "a batch of 4 images"):
            pipeline(["a", "b"], **USUAL, num_images_per_prompt=2)
        with refused(OptionError, "images of 4608 pixels", "at most 4096"):
            pipeline("a", **USUAL | {"width": 72})
        with refused(OptionError, "a batch of 3"):
            pipeline.warmup([(3, 64, 64)])
        with refused(OptionError, "images of 16384 pixels"):
            pipeline("a")  # the default size


@pytest.mark.parametrize("option", ["max_batch_size", "max_pixels"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
def test_rejected_limits(option: str, value: Any, micro_cpu: Path) -> None:
    with refused(OptionError, f"{option} is {value!r}"):
        OrtDiffusionPipeline.from_pretrained(micro_cpu, **{option: value})


# The estimate


@pytest.mark.parametrize("size", [(64, 64), (32, 48)])
def test_skip_connections_are_those_of_diffusers(size: tuple[int, int]) -> None:
    config: dict[str, Any] = {
        "block_out_channels": [320, 640, 1280, 1280],
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    }
    with torch.device("meta"):
        unet: Any = diffusers.UNet2DConditionModel(**config, cross_attention_dim=64)
        held: list[torch.Tensor] = []

        def note(_: object, given: tuple[Any, ...], values: dict[str, Any]) -> None:
            held.extend(values.get("res_hidden_states_tuple") or given[1])

        for block in unet.up_blocks:
            block.register_forward_pre_hook(note, with_kwargs=True)
        unet(torch.empty(3, 4, *size), 1, torch.empty(3, 77, 64))
    assert sum(tensor.numel() for tensor in held) == denoiser_elements(config, 3, 1, *size)
    # Guidance repeats everything after the first block that reads the prompt.
    shared = 3 * 320 * size[0] * size[1]
    assert denoiser_elements(config, 3, 2, *size) == 2 * denoiser_elements(config, 3, 1, *size) - shared


def test_unknown_denoisers_count_nothing() -> None:
    assert denoiser_elements({}, 2, 2, 64, 64) == 0


def test_estimate_counts_the_buffers_that_every_pipeline_has(micro_cpu: Path) -> None:
    names = ("state", "noise", "known_latents", "keep_mask", "encoder_hidden_states", "images", "sample")
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        estimate = pipeline._reader._limits._estimate
        for batch, height, width in ((1, 64, 64), (8, 256, 192)):
            pipeline.warmup([(batch, height, width)])
            buffers = next(reversed(pipeline._cache._shapes.values())).buffers
            request = RequestSize(batch, height, width, 2, 77, height * width, "latent")
            activations = denoiser_elements(estimate._config, batch, 2, height // 8, width // 8) * 4
            held = sum(buffers[name].tensor_size_in_bytes() for name in names)
            assert estimate.device_bytes(request) == held + activations


# Errors of allocations


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("message", ["", "std::bad_alloc", "Unable to allocate 11.5 GiB for an array"])
def test_memory_errors_are_one_line(message: str) -> None:
    with refused(DeviceMemoryError, "the work needs more memory"), host_memory_errors("the work"):
        fail(MemoryError(message))
    with refused(DeviceMemoryError, "the work needs more memory"), memory_errors(Device("cpu"), "the work"):
        fail(MemoryError(message))
    with refused(DeviceMemoryError, "the work needs"), memory_errors(Device("cpu"), "the work"):
        fail(RuntimeError(f"Non-zero status code returned while running Conv node: std::bad_alloc {message}"))


def test_no_memory_error_of_a_call_is_raw(ours: OrtDiffusionPipeline, monkeypatch: Any) -> None:
    def exhaust(*_: object, **__: object) -> Any:
        raise MemoryError("Unable to allocate 11.5 GiB")

    with refused(DeviceMemoryError, "the request", "11.5 GiB"):
        ours("a", **USUAL, callback_on_step_end=exhaust)
    for place in ("_inputs.family.prompt_inputs", "_cache.get"):
        with monkeypatch.context() as patch:
            *path, name = place.split(".")
            owner: Any = ours
            for part in path:
                owner = getattr(owner, part)
            patch.setattr(owner, name, exhaust)
            with refused(DeviceMemoryError, "11.5 GiB"):
                ours("a", **USUAL)
