"""Draw images with an optimized folder: numpy, ONNX Runtime, tokenizers and Pillow, no torch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime
from PIL import Image

from sdonnx import certificate
from sdonnx.doctor.first_use import KernelWarning
from sdonnx.errors import FolderError, OptionError, refusing
from sdonnx.families import Role, family_of
from sdonnx.folder import PipelineFolder
from sdonnx.runtime import images as image_inputs
from sdonnx.runtime.arrays import export
from sdonnx.runtime.captures import CaptureReport, Captures, Shape, SizeBuffers
from sdonnx.runtime.conditions import Conditioner, SizeConditions
from sdonnx.runtime.device import device_for
from sdonnx.runtime.drawing import Drawing, Start
from sdonnx.runtime.draws import Draws, Generator
from sdonnx.runtime.graphs import GraphSet, Observer
from sdonnx.runtime.image_prompts import ImagePrompts, image_prompter_of, scale_matrix
from sdonnx.runtime.kernels import kernel_options, verdict_on, warning_of
from sdonnx.runtime.noise import TorchCpuGenerator
from sdonnx.runtime.request import (
    Wording,
    read_latents,
    read_prompts,
    require_multiple,
    require_number,
    require_output_type,
)
from sdonnx.runtime.resolutions import closest, resized
from sdonnx.runtime.safety import OF_FOLDER, NsfwContentWarning, OfFolder, SafetyChecker, safety_checker_of
from sdonnx.runtime.schedulers import is_planned, require_scheduler, seeded
from sdonnx.runtime.session import SessionSettings
from sdonnx.runtime.worker import device_thread
from sdonnx.samplers import config_for
from sdonnx.upgrade import RebuildWarning, command_for, notices, read_report, require_provider

__all__ = ["ImageOutput", "NotFiniteWarning", "OrtDiffusionPipeline"]

Result = TypeVar("Result")

# How many times as large as it is drawn an image may be asked for.
_LARGEST = 8

_WITH_ADAPTERS = ("a pipeline with IP-Adapters", "export it with --ip-adapter, or leave it out")

Callback = Callable[["OrtDiffusionPipeline", int, float, dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class ImageOutput:
    """What a call of the pipeline returns.

    Attributes:
        images: PIL images; with output_type "np" an array (B,H,W,3) from 0 to 1, with "latent" the
            latents (B,C,H/8,W/8); with "ort" and "ort_latent" the uint8 pixels and the latents in the device's
            memory, for `torch.from_dlpack` and its like.
        seed: the seed of the noise, None where the caller gave a generator or latents.
        nsfw_content_detected: for each image whether the safety checker found something, which makes it black;
            None where nothing was checked.
    """

    images: Any
    seed: int | None
    nsfw_content_detected: list[bool] | None = None


class NotFiniteWarning(UserWarning):
    """An image holds NaN or infinity."""


class OrtDiffusionPipeline:
    """A Stable Diffusion pipeline on ONNX Runtime, called as diffusers' pipelines are.

    One step is one replay of a captured CUDA graph; everything between the token ids and the pixels
    stays on the device. Graphs are captured for each size at its first use, and the least recently used are
    given back. Calls from several threads follow one another. It is a context manager, which closes it.
    """

    def __init__(self, graphs: GraphSet, *, max_sizes: int = 8, safety_checker: OfFolder | None = OF_FOLDER) -> None:
        """Load the graphs of an optimized folder; use `from_pretrained`."""
        self.folder, self.device, self._family = graphs.folder, graphs.device, graphs.family
        self._graphs = graphs
        self._denoiser_config = graphs.config(Role.DENOISER)
        vae_config = graphs.config(Role.IMAGE_DECODER)
        self.vae_scale_factor = 2 ** (len(vae_config.get("block_out_channels", (0,) * 4)) - 1)
        self._scheduler_config: dict[str, Any] = self.folder.config("scheduler", "scheduler_config.json")
        self._scheduler_object: Any = None
        self._conditioner = Conditioner(graphs)
        self.tokenizer = next(iter(self._conditioner.tokenizers.values()))
        self._channels = int(graphs.get(Role.DENOISER).shape("state")[2])
        # Transformers see the latents in patches.
        self._multiple = self.vae_scale_factor * int(self._denoiser_config.get("patch_size") or 1)
        # As in diffusers, it may be set to None later on.
        self.safety_checker: SafetyChecker | None = safety_checker_of(graphs, safety_checker)
        self._image_prompter = image_prompter_of(graphs)
        self._captures = Captures(graphs, self._channels, self.vae_scale_factor, max_sizes)
        self._progress: dict[str, Any] = {}
        self._interrupt = False
        self._drawing = threading.local()
        self._closed = False
        for role in (Role.DENOISER, Role.CONDITIONS) if graphs.has_short else ():
            graphs.path(role, short=False)  # of longer prompts, loaded when there are some
        for role in (*self._conditioner.tokenizers, Role.DENOISER, Role.IMAGE_DECODER):
            graphs.path(role)
            if graphs.stays(role):
                graphs.get(role)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        provider: str | None = None,
        *,
        device_index: int = 0,
        max_sizes: int = 8,
        low_memory: bool = False,
        safety_checker: OfFolder | None = OF_FOLDER,
        provider_options: Mapping[str, str] | None = None,
        session_options: onnxruntime.SessionOptions | None = None,
        require_certificate: bool = False,
    ) -> OrtDiffusionPipeline:
        """Load an optimized folder.

        At the first use of a GPU its kernels are checked, for some seconds; attention then avoids back ends that lie,
        and another kernel that lies is a KernelWarning (`sdonnx.doctor`). SDONNX_SELF_CHECK=0 leaves that out.

        Args:
            folder: what `python -m sdonnx.optimize_pipeline` wrote.
            provider: "cuda" or "cpu", by default what the folder was optimized for.
            device_index: the number of the GPU.
            max_sizes: how many sizes stay captured; with captions of up to 32, up to 64 and more tokens one is three.
            low_memory: load the text encoder and the decoder for each image and give them back.
            safety_checker: None to leave out the one that the folder has.
            provider_options: options of the execution provider, over those that are chosen here.
            session_options: what sessions are made with; entries that the run-time needs are added to it. With it
                graphs share no weights (`weights.json`): PixArt takes 1.2 GB more where captions are short and long.
            require_certificate: refuse a folder that `python -m sdonnx verify` has not passed, or whose files have
                changed since; every file is read for that.

        Warns:
            RebuildWarning: another version made it, or it was made for GPUs of another generation.

        Raises:
            FolderError: the folder is not optimized, incomplete, or of a format that only a newer version reads.
            ProviderError: the provider is not available, or the folder was optimized for another.
            OptionError: an option cannot be used.
        """
        if isinstance(max_sizes, bool) or not isinstance(max_sizes, int) or max_sizes < 1:
            raise OptionError(f"max_sizes is {max_sizes!r}", "a whole number from 1 on", "pass for example 8")
        opened = PipelineFolder.open(folder)
        if require_certificate:
            certificate.require_certificate(opened.path)
        report = read_report(opened.path)
        device = device_for(provider or str(report.get("provider")), device_index)
        require_provider(opened.path, report, device.provider)
        for notice in notices(report, device.capability()):
            warnings.warn(RebuildWarning(f"{folder} was {notice}"), stacklevel=2)
        verdict = verdict_on(device)
        if message := warning_of(verdict, report):
            warnings.warn(message, KernelWarning, stacklevel=2)
        rebuild = f"update ONNX Runtime, or rebuild the folder: {command_for(report)}"
        settings = SessionSettings(kernel_options(verdict, provider_options or {}), session_options, rebuild)
        graphs = GraphSet(opened, family_of(opened), device, settings, low_memory)
        # Graphs are loaded by the thread that will run them.
        with refusing(folder, "what python -m sdonnx.optimize_pipeline wrote", "optimize the exported pipeline again"):
            return device_thread(device).run(partial(cls, graphs, max_sizes=max_sizes, safety_checker=safety_checker))

    @property
    def scheduler(self) -> str:
        """The sampler's class in diffusers.

        Assign a class, a short name such as "euler", or a scheduler object of diffusers. One that no plan follows
        draws the images that it draws in diffusers, with torch and more slowly.
        """
        return str(self._scheduler_config["_class_name"])

    @scheduler.setter
    def scheduler(self, chosen: Any) -> None:
        if isinstance(chosen, str):
            self.scheduler_config = config_for(chosen, self._scheduler_config)
            return
        config = require_scheduler(chosen)
        self._scheduler_config, self._scheduler_object = config, None if is_planned(config) else chosen

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The content of `scheduler_config.json`; assign another to change options."""
        return self._scheduler_config

    @scheduler_config.setter
    def scheduler_config(self, config: Mapping[str, Any]) -> None:
        self._scheduler_config, self._scheduler_object = dict(config), None

    @property
    def default_size(self) -> int:
        """Height and width of an image in pixels, where the caller gives none."""
        return self._size_of("sample_size") * int(self.vae_scale_factor)

    @property
    def default_guidance_scale(self) -> float:
        """Weight of the prompt, where the caller gives none: that of diffusers' pipelines of the family."""
        return self._family.guidance_scale

    @property
    def default_steps(self) -> int:
        """Denoising steps, where the caller gives none: those of diffusers' pipelines of the family."""
        return self._family.steps

    @property
    def captured_sizes(self) -> list[CaptureReport]:
        """What the sizes that are captured cost, the least recently used first."""
        return self._run(self._captures.reports)

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """Set what IP-Adapters weigh where a call does not say; see `sdonnx.runtime.image_prompts.scale_matrix`.

        Raises:
            OptionError: the pipeline has no adapters, or not as many.
        """
        if self._image_prompter is None:
            raise OptionError("ip_adapter_scale given", *_WITH_ADAPTERS)
        self._image_prompter.scales = scale_matrix(self._image_prompter.adapters, scale)

    def set_progress_bar_config(self, **options: Any) -> None:
        """Set options of tqdm for the progress bar, such as `disable=True`; by default terminals alone show one."""
        self._progress = options

    def observe(self, observer: Observer | None) -> None:
        """Wrap each run of a graph in `with observer(role, run):`, in the device's thread; None to end.

        Runs are queued, not over, when the block ends: `pipeline.device.mark` and `milliseconds` tell when they are.
        """
        self._graphs.observer = observer

    def interrupt(self) -> None:
        """Stop the image that is being drawn after the current step; for use in a callback."""
        self._interrupt = True

    def close(self) -> None:
        """Give the graphs back; the pipeline cannot draw after it.

        ONNX Runtime keeps a GPU's memory for buffers and for weights that graphs share, for the next pipeline of the
        process; all other weights, and what captured graphs take, are given back.
        """
        if not self._closed:
            self._run(self._release)
            self._closed = True

    def __enter__(self) -> OrtDiffusionPipeline:
        """Return the pipeline."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pipeline."""
        self.close()

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator | None = None,
        latents: Any = None,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        *,
        image: Any = None,
        mask_image: Any = None,
        strength: float | None = None,
        guidance_rescale: float = 0.0,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        clip_skip: int | None = None,
        seed: int | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None,
        pooled_prompt_embeds: Any = None,
        negative_pooled_prompt_embeds: Any = None,
        original_size: Sequence[int] | None = None,
        crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None,
        aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        ip_adapter_scale: Any = None,
        prompt_attention_mask: Any = None,
        negative_prompt_attention_mask: Any = None,
        max_sequence_length: int | None = None,
        clean_caption: bool | None = None,
        use_resolution_binning: bool | None = None,
    ) -> ImageOutput:
        """Draw images: from a prompt, from an image, or anew where a mask is white.

        Args:
            prompt: one prompt, or several of one batch.
            height: pixels, a multiple of 8, or of 16 for PixArt without `use_resolution_binning`. By default that of
                `image`, or what the pipeline was made for.
            width: likewise.
            num_inference_steps: denoising steps. By default 50, and 20 for PixArt.
            guidance_scale: weight of the prompt; up to 1 the denoiser runs once a step, without guidance. By default
                7.5, 5 for Stable Diffusion XL and 4.5 for PixArt.
            negative_prompt: what to draw away from; one for all prompts or one for each.
            num_images_per_prompt: images for each prompt.
            eta: share of fresh noise (DDIM).
            generator: a torch.Generator, a TorchCpuGenerator, or a list with one for each image.
            latents: initial noise (B,C,H/8,W/8), in place of a seed: an array, or float32 memory of the device.
            output_type: "pil", "np", "latent", "ort" or "ort_latent"; see ImageOutput.
            callback_on_step_end: called as `callback(pipeline, step, timestep, {"latents": array})` after
                each step, in the thread that works with the device; latents in the mapping that it returns
                replace those of the sampler.
            image: what to start from: PIL images, arrays (B,H,W,3) from 0 to 1 or tensors (B,3,H,W).
            mask_image: white where to draw anew, black what to keep.
            strength: how far from the image to go, 0 to 1. By default 0.8, and 1 with a mask; for Stable Diffusion XL
                0.3, and 0.9999.
            guidance_rescale: how much of the guidance to bring to the deviation of the prompt's prediction, 0
                to 1 (arXiv:2305.08891); the host then computes the updates.
            prompt_embeds: hidden states (P,S,D) of the text encoder, in place of prompts.
            negative_prompt_embeds: likewise, of what to draw away from.
            clip_skip: how many of the text encoder's last layers to leave out.
            seed: seed of the noise, the same as `torch.Generator("cpu").manual_seed(seed)` gives.
            prompt_2: what the second text encoder of Stable Diffusion XL reads in place of `prompt`.
            negative_prompt_2: likewise.
            pooled_prompt_embeds: the prompts in one vector each (P,D), with `prompt_embeds` for Stable Diffusion XL.
            negative_pooled_prompt_embeds: likewise.
            original_size: see SizeConditions, as all that follows.
            crops_coords_top_left: likewise.
            target_size: likewise.
            negative_original_size: likewise.
            negative_crops_coords_top_left: likewise.
            negative_target_size: likewise.
            aesthetic_score: likewise, of the refiner.
            negative_aesthetic_score: likewise.
            ip_adapter_image: for each IP-Adapter an image, or a list of them; one image alone for a single adapter.
            ip_adapter_image_embeds: in their place what the image encoder gives (G,I,W) or (G,I,L,W), G being 2 with
                guidance: what is drawn away from comes first.
            ip_adapter_scale: weights of the adapters: a number, or a list with a number or a mapping for each; see
                `set_ip_adapter_scale`. A change of weights or images costs nothing but encoding new images.
            prompt_attention_mask: 1 for tokens and 0 for padding (P,S), with `prompt_embeds` for PixArt.
            negative_prompt_attention_mask: likewise.
            max_sequence_length: at how many tokens captions of PixArt are cut. By default 120, and 300 for
                PixArt-Sigma.
            clean_caption: whether captions of PixArt are cleaned of addresses, markup and codes. By default where
                beautifulsoup4 and ftfy are installed.
            use_resolution_binning: whether PixArt draws in one of the sizes that it was trained with, and the image is
                then resized and cut to what is asked for. By default it does, but for images that are started from.

        Raises:
            SdonnxError: an argument cannot be used, nothing has run by then; or memory was too short.
        """
        self._require_open()
        require_output_type(output_type)
        guidance_scale = self.default_guidance_scale if guidance_scale is None else guidance_scale
        require_number("guidance_scale", guidance_scale)
        require_number("guidance_rescale", guidance_rescale, 0, 1)
        require_number("eta", eta, 0, 1)
        guided = guidance_scale > 1
        wording = Wording(
            prompt,
            negative_prompt,
            prompt_2,
            negative_prompt_2,
            prompt_embeds,
            negative_prompt_embeds,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            prompt_attention_mask,
            negative_prompt_attention_mask,
            max_sequence_length,
            clean_caption,
        )
        sizes = SizeConditions(
            original_size,
            crops_coords_top_left,
            target_size,
            negative_original_size,
            negative_crops_coords_top_left,
            negative_target_size,
            aesthetic_score,
            negative_aesthetic_score,
        )
        prompts = read_prompts(wording, num_images_per_prompt, guided, clip_skip)
        self._conditioner.require(wording, prompts, sizes)
        image_prompts = self._read_image_prompts(ip_adapter_image, ip_adapter_image_embeds, ip_adapter_scale, guided)
        if use_resolution_binning and image is not None:
            raise OptionError("image and use_resolution_binning", "one of them", "leave one out")
        asked = self._sizes(height, width, image, mask_image)
        if use_resolution_binning is None and image is not None:
            use_resolution_binning = False  # pixels that are kept would move
        height, width = self._drawn_size(*asked, use_resolution_binning)
        images = None if image_prompts is None else image_prompts.counts
        latent_shape = self._latent_shape(prompts.count, height, width)
        start = self._start(image, mask_image, strength, latents, height, width, latent_shape)
        # An object of diffusers draws fresh noise from torch's generator, where it stands after the first noise.
        make = TorchCpuGenerator if self._scheduler_object is None else seeded
        draws = Draws(latent_shape, seed, generator, named=start.latents is None, make=make)
        conditions = self._conditioner.conditions(
            prompts, sizes, height, width, guided=guided, from_image=start.image is not None
        )
        shape = self._shape(latent_shape, guided, conditions.tokens, images)
        drawing = Drawing(
            conditions=conditions,
            start=start,
            draws=draws,
            steps=self.default_steps if num_inference_steps is None else num_inference_steps,
            guidance_scale=float(guidance_scale) if guided else None,
            guidance_rescale=float(guidance_rescale) if guided else 0.0,
            eta=float(eta),
            scheduler_config=self._scheduler_config,
            scheduler=self._scheduler_object,
            generator=draws.generator,
        )
        drawing.require()
        job = partial(self._draw, shape, drawing, image_prompts, output_type, asked, callback_on_step_end)
        pictures, found, broken = self._run(job, self.interrupt)
        if broken:
            warnings.warn(
                f"{broken} of {shape.batch} images hold NaN or infinity, which look black; expected numbers; optimize "
                "the exported pipeline again with --force_fp32_ops auto, which finds what must stay in float32",
                NotFiniteWarning,
                stacklevel=2,
            )
        if found is not None and any(found):
            warnings.warn(
                f"the safety checker knows what {sum(found)} of {len(found)} images show; they are black. Draw with "
                "another prompt or seed",
                NsfwContentWarning,
                stacklevel=2,
            )
        return ImageOutput(pictures, draws.seed, found)

    def warmup(self, shapes: Sequence[tuple[int, int, int]], *, guided: bool = True) -> list[CaptureReport]:
        """Capture the graphs for shapes (batch, height, width) in pixels before they are asked for.

        PixArt has several for each, for captions of up to 32, of up to 64, and of more tokens; all of them together
        should not be more than `max_sizes`, or the first are given back again.

        Returns:
            What each costs.
        """
        self._require_open()
        sizes = []
        for batch, asked_height, asked_width in shapes:
            height, width = self._drawn_size(asked_height, asked_width, None)
            latent_shape = self._latent_shape(batch, height, width)
            lengths = self._conditioner.lengths(batch * (1 + guided))
            sizes += [self._shape(latent_shape, guided, tokens) for tokens in lengths]
        return self._run(lambda: [self._captures.get(size).report() for size in sizes])

    def _draw(
        self,
        shape: Shape,
        drawing: Drawing,
        image_prompts: ImagePrompts | None,
        output_type: str,
        asked: tuple[int, int],
        callback: Callback | None,
    ) -> tuple[Any, list[bool] | None, int]:
        if getattr(self._drawing, "now", False):
            raise OptionError(
                "a callback draws with the pipeline that called it", "another pipeline", "draw after the image"
            )
        self._drawing.now = True
        self._interrupt = False
        try:
            size = self._captures.get(shape)
            if self._image_prompter is not None and image_prompts is not None:
                told = self._image_prompter.inputs(image_prompts, shape.batch, guided=shape.guided)
                for name, values in told.items():
                    size.put(name, values)
            on_step = None if callback is None else partial(self._report, callback, size)
            drawing.run(size, on_step, lambda: self._interrupt, self._progress)
            found, broken = None, 0
            if output_type not in ("latent", "ort_latent"):
                size.run(Role.IMAGE_DECODER)
                broken = int((~size.read("finite")).sum())
                found = self._check(size)
            return self._pictures(size, output_type, asked), found, broken
        finally:
            self.device.synchronize()
            self._drawing.now = False

    def _report(
        self, callback: Callback, size: SizeBuffers, index: int, timestep: float, latents: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32] | None:
        changed = callback(self, index, timestep, {"latents": latents})
        if changed is None or "latents" not in changed:
            return None
        given = np.asarray(changed["latents"], np.float32)
        if given.shape != size.latents:
            raise OptionError(
                f"the callback returned latents of shape {given.shape}",
                f"{size.latents}",
                "return latents of the shape that it was given",
            )
        return given

    def _check(self, size: SizeBuffers) -> list[bool] | None:
        """Blacken the images in which the safety checker finds something, and tell which."""
        if self.safety_checker is None:
            return None
        found = self.safety_checker.check(size.read("images"))
        for name in ("images", "sample") if any(found) else ():
            values = size.read(name)
            values[np.array(found)] = 0
            size.put(name, values)
        return found

    def _pictures(self, size: SizeBuffers, output_type: str, asked: tuple[int, int]) -> Any:
        if output_type == "latent":
            return size.read("state")[0]
        if output_type == "ort_latent":
            return export(self._copied(size.buffers["state"], size.latents, np.float32))
        if output_type == "np" or asked != size.pixels[1:3]:
            sample = np.clip(resized(size.read("sample"), *asked), 0, 1)
            if output_type == "np":
                return sample
            images = np.round(sample * 255).astype(np.uint8)
            return export(self.device.upload(images)) if output_type == "ort" else _to_pil(images)
        if output_type == "ort":
            self.device.synchronize()
            return export(self._copied(size.buffers["images"], size.pixels, np.uint8))
        return _to_pil(size.read("images"))

    def _copied(self, buffer: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a copy of the start of a buffer: the next image goes where this one lies."""
        copy = self.device.empty(shape, dtype)
        self.device.copy(copy, buffer, copy.tensor_size_in_bytes())
        return copy

    def _read_image_prompts(self, images: Any, embeds: Any, scale: Any, guided: bool) -> ImagePrompts | None:
        if self._image_prompter is not None:
            return self._image_prompter.read(images, embeds, scale, guided=guided)
        given = {"ip_adapter_image": images, "ip_adapter_image_embeds": embeds, "ip_adapter_scale": scale}
        for name, value in given.items():
            if value is not None:
                raise OptionError(f"{name} given", *_WITH_ADAPTERS)
        return None

    def _drawn_size(self, height: int, width: int, binned: bool | None) -> tuple[int, int]:
        """Return the size in which an image of that size is drawn."""
        if binned and not self._family.is_binned:
            raise OptionError(
                "use_resolution_binning given", "PixArt, which was trained with few sizes", "leave it out"
            )
        if not (self._family.is_binned if binned is None else binned):
            return height, width
        most = _LARGEST * self.default_size
        for name, value in (("height", height), ("width", width)):
            require_multiple(name, value, 1)
            if value > most:
                raise OptionError(f"{name} is {value}", f"at most {most}, {_LARGEST} times the model's", "ask for less")
        return closest(height, width, self.default_size)

    def _sizes(self, height: int | None, width: int | None, image: Any, mask_image: Any) -> tuple[int, int]:
        if image is not None and mask_image is None and (height is None or width is None):
            own_height, own_width = image_inputs.default_size(image, self._multiple)
            height, width = height or own_height, width or own_width
        return (
            self.default_size if height is None else height,
            self.default_size if width is None else width,
        )

    def _latent_shape(self, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the latents' (B,C,H,W) for images of that size in pixels."""
        require_multiple("height", height, self._multiple)
        require_multiple("width", width, self._multiple)
        require_multiple("the batch", batch, 1)
        return (batch, self._channels, height // self.vae_scale_factor, width // self.vae_scale_factor)

    def _shape(
        self, latents: tuple[int, int, int, int], guided: bool, tokens: int, images: tuple[int, ...] | None = None
    ) -> Shape:
        if images is None:
            images = () if self._image_prompter is None else (1,) * len(self._image_prompter.adapters.adapters)
        batch, _, height, width = latents
        return Shape(batch, height, width, guided, tokens, images)

    def _start(
        self,
        image: Any,
        mask_image: Any,
        strength: float | None,
        latents: Any,
        height: int,
        width: int,
        shape: tuple[int, int, int, int],
    ) -> Start:
        if mask_image is not None and image is None:
            raise OptionError("mask_image without image", "both", "pass the image that the mask is for")
        if image is None and strength is not None:
            raise OptionError("strength without image", "both", "pass an image to start from")
        masked = "mask" in self._graphs.get(Role.DENOISER).inputs
        if masked and mask_image is None:
            raise OptionError(
                "this denoiser was trained to inpaint", "image and mask_image", "pass both, or use another pipeline"
            )
        if latents is not None and image is not None and mask_image is None:
            raise OptionError("latents and image", "one of them to start from", "leave one out")
        given = None if latents is None else read_latents(latents, shape, self.device)
        if image is None:
            return Start(latents=given)
        default = self._family.strength if mask_image is None else self._family.mask_strength
        strength = default if strength is None else strength
        require_number("strength", strength, 0, 1)
        pixels = image_inputs.image_batch(image, height, width, self.vae_scale_factor)
        mask = None
        if mask_image is not None:
            mask = image_inputs.mask_batch(mask_image, height, width, self.vae_scale_factor)
        for name, array in (("image", pixels), ("mask_image", mask)):
            if array is not None and shape[0] % len(array):
                raise OptionError(
                    f"{name} holds {len(array)} images for a batch of {shape[0]}",
                    "as many, or a divisor of it",
                    "pass one, or one for each",
                )
        return Start(pixels, mask, given, float(strength))

    def _size_of(self, key: str) -> int:
        value = self._denoiser_config.get(key)
        if not isinstance(value, int):
            raise FolderError(
                f"the denoiser's config.json in {self.folder.path} says {value!r} for {key}",
                "a number",
                "optimize the exported pipeline again",
            )
        return value

    def _require_open(self) -> None:
        if self._closed:
            raise OptionError("the pipeline is closed", "an open one", "load it again with from_pretrained")

    def _run(self, job: Callable[[], Result], stop: Callable[[], None] = lambda: None) -> Result:
        return device_thread(self.device).run(job, stop)

    def _release(self) -> None:
        self._captures.close()
        self._graphs.close()


def _to_pil(images: npt.NDArray[np.uint8]) -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in images]
