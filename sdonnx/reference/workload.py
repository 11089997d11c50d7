"""The settings of one call, the same for every pipeline, and the arguments of a pipeline that follow from them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from sdonnx.errors import FolderError
from sdonnx.models.spec import Family

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Workload", "call_arguments", "noise_in_float32", "start_arguments"]


@dataclass(frozen=True)
class Workload:
    """The settings of one call, the same for every pipeline.

    Attributes:
        batch_size: number of images in a batch, of one prompt.
        height: in pixels.
        width: in pixels.
        steps: number of denoising steps.
        seed: seed of the noise, the same in every run.
        guidance_scale: the guidance scale; 7.5 as in ONNX Runtime's benchmark.py.
        scheduler: class or short name of the sampler; None for the folder's sampler.
        negative_prompt: the negative prompt.
        image: file of the start image (image to image); None to start from noise.
        strength: strength of image to image.
        ip_adapter_scale: scale of every image-prompt adapter; None without adapters.
        ip_adapter_image: file of the prompt image of every adapter; None for a synthetic image.
    """

    batch_size: int = 1
    height: int = 512
    width: int = 512
    steps: int = 50
    seed: int = 0
    guidance_scale: float = 7.5
    scheduler: str | None = None
    negative_prompt: str | None = None
    image: str | None = None
    strength: float = 0.8
    ip_adapter_scale: float | None = None
    ip_adapter_image: str | None = None

    @property
    def title(self) -> str:
        """The size as a heading."""
        adapted = "" if self.ip_adapter_scale is None else f", adapter scale {self.ip_adapter_scale:g}"
        return f"{self.height}x{self.width}, batch {self.batch_size}, {self.steps} steps{adapted}"

    @property
    def start_image(self) -> dict[str, Any]:
        """Arguments of image to image: the start image at the workload's size; none to start from noise.

        Raises:
            FolderError: the image cannot be read.
        """
        from PIL.Image import Resampling

        if self.image is None:
            return {}
        image = _read(self.image).resize((self.width, self.height), Resampling.LANCZOS)
        return {"image": image, "strength": self.strength}


def call_arguments(workload: Workload, adapters: int, family: Family) -> dict[str, Any]:
    """Return the arguments of a pipeline that are the same for diffusers and for this project.

    They include the prompt image of every adapter. Caption-based families use the prompt without cleaning, and the
    exact size of the workload.

    Args:
        workload: the workload.
        adapters: number of image-prompt adapters.
        family: the pipeline's family.

    Raises:
        FolderError: an image cannot be read.
    """
    arguments: dict[str, Any] = {
        "num_inference_steps": workload.steps,
        "guidance_scale": workload.guidance_scale,
        "negative_prompt": workload.negative_prompt,
        "num_images_per_prompt": workload.batch_size,
    }
    if family.reads_captions:
        # diffusers does not accept None here.
        arguments |= {"clean_caption": False, "negative_prompt": workload.negative_prompt or ""}
    if family.defaults.use_resolution_binning:
        arguments["use_resolution_binning"] = False
    if adapters:
        image = _synthetic_image() if workload.ip_adapter_image is None else _read(workload.ip_adapter_image)
        arguments["ip_adapter_image"] = [image] * adapters
    return arguments


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


def start_arguments(pipeline: Any, workload: Workload, dtype: Any, prompts: int = 1) -> dict[str, Any]:
    """Return the start arguments of a pipeline with diffusers' interface: the common noise, or the start image.

    Args:
        pipeline: a pipeline of diffusers, or one with its interface.
        workload: the workload.
        dtype: torch's type of the latents.
        prompts: number of prompts, each with a batch of images.
    """
    import torch

    generator = torch.Generator("cpu").manual_seed(workload.seed)
    if workload.image is not None:
        return {"generator": generator, **workload.start_image}
    factor = pipeline.vae_scale_factor
    size = (
        prompts * workload.batch_size,
        pipeline.vae.config.latent_channels,
        workload.height // factor,
        workload.width // factor,
    )
    # Sampled in float32: torch's random stream differs in half precision.
    noise = torch.randn(size, generator=generator).to(pipeline.device, dtype)
    return {"generator": generator, "height": workload.height, "width": workload.width, "latents": noise}


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
            module: Any = sys.modules.get(name)
            if module is not None and "randn_tensor" in vars(module):
                stack.enter_context(mock.patch.object(module, "randn_tensor", in_float32(module.randn_tensor)))
        yield
