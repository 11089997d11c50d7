"""Inputs that all engines share: the start image, the prompt images of adapters, and noise in float32."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engines.patching import patched
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import FolderError
from sdonnx.models.spec import Family

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["noise_in_float32", "prompt_arguments", "read_start_image", "start_arguments"]


def read_start_image(workload: Workload) -> Image:
    """Return the start image of image to image, at the workload's size.

    Raises:
        FolderError: the image cannot be read.
    """
    from PIL import Image

    assert workload.image is not None
    return _read(workload.image).resize((workload.width, workload.height), Image.Resampling.LANCZOS)


def prompt_arguments(workload: Workload, adapters: int, family: Family) -> dict[str, Any]:
    """Return additional pipeline arguments: the prompt image of every adapter, and options of the family.

    Caption-based families use the prompt without cleaning, and the exact size of the workload.

    Raises:
        FolderError: an image cannot be read.
    """
    arguments: dict[str, Any] = {}
    if family.reads_captions:
        arguments["clean_caption"] = False
    if family.defaults.use_resolution_binning:
        arguments["use_resolution_binning"] = False
    if not adapters:
        return arguments
    image = _synthetic_image() if workload.ip_adapter_image is None else _read(workload.ip_adapter_image)
    return {**arguments, "ip_adapter_image": [image] * adapters}


def _synthetic_image() -> Image:
    """Return an image of soft spots of colour, the same on every machine."""
    import numpy as np
    from PIL import Image

    spots = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((224, 224), Image.Resampling.BICUBIC)


def _read(path: str) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except OSError as error:
        raise FolderError(f"{path} cannot be read as an image ({error})", "an image") from error


def start_arguments(pipeline: Any, workload: Workload, generator: Any, dtype: Any, prompts: int = 1) -> dict[str, Any]:
    """Return the start arguments of a pipeline with diffusers' interface: the common noise, or the start image.

    Args:
        pipeline: a pipeline of diffusers or optimum.
        workload: the workload.
        generator: torch's generator on the CPU.
        dtype: torch's type of the latents.
        prompts: number of prompts, each with a batch of images.
    """
    import torch

    if workload.image is not None:
        return {"image": read_start_image(workload), "strength": workload.strength}
    factor = pipeline.vae_scale_factor
    size = (
        prompts * workload.batch_size,
        pipeline.vae.config.latent_channels,
        workload.height // factor,
        workload.width // factor,
    )
    # Sampled in float32: torch's random stream differs in half precision.
    noise = torch.randn(size, generator=generator).to(pipeline.device, dtype)
    return {"height": workload.height, "width": workload.width, "latents": noise}


@contextmanager
def noise_in_float32(pipeline: Any) -> Iterator[None]:
    """Make samplers, and pipelines that start from an image, sample noise in float32, as `start_arguments` does."""
    import torch

    def in_float32(sample: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(*shape: Any, dtype: Any = None, **options: Any) -> Any:
            noise = sample(*shape, dtype=torch.float32, **options)
            return noise if dtype is None else noise.to(dtype)

        return sampled

    # Each module imports the function by name.
    parts = (pipeline, pipeline.scheduler, pipeline.vae)
    names = {
        each.__module__ for part in parts for each in type(part).__mro__ if each.__module__.startswith("diffusers.")
    }
    names.add("diffusers.models.autoencoders.vae")  # samples from the distribution of an encoded image
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            module = sys.modules.get(name)
            if module is not None and "randn_tensor" in vars(module):
                stack.enter_context(patched(module, "randn_tensor", in_float32))
        yield
