"""Draw images with an optimized folder: numpy, ONNX Runtime, tokenizers and Pillow, no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from PIL import Image

from sdonnx.errors import FolderError, OptionError, PromptError, ProviderError
from sdonnx.families import Role, family_of
from sdonnx.folder import REPORT, PipelineFolder, read_json
from sdonnx.runtime.noise import TorchCpuGenerator, fresh_seed
from sdonnx.runtime.prompt import PromptTokenizer
from sdonnx.runtime.session import Device, Graph, Run, device_for, require_multiple
from sdonnx.samplers import STATE_ROWS, SamplingPlan, config_for, guided_matrices, plan

__all__ = ["ImageOutput", "OrtDiffusionPipeline"]

Generator = Any
"""A torch.Generator, a TorchCpuGenerator, or a list with one for each image."""

Callback = Callable[["OrtDiffusionPipeline", int, float, dict[str, Any]], Mapping[str, Any] | None]

OUTPUT_TYPES = ("pil", "np", "latent")

# Rows of the parameter table. One size for every number of steps, so that one captured graph serves all.
_MOST_CALLS = 1024

_MOST_SHAPES = 8


@dataclass(frozen=True)
class ImageOutput:
    """What a call of the pipeline returns.

    Attributes:
        images: PIL images; with output_type "np" an array (B,H,W,3) from 0 to 1, with "latent" the
            latents (B,C,H/8,W/8).
        seed: the seed of the noise, None where the caller gave a generator or latents.
    """

    images: Any
    seed: int | None


@dataclass(frozen=True)
class _Shape:
    """What a captured graph depends on."""

    batch: int
    height: int
    width: int
    guided: bool


@dataclass
class _Bound:
    """Buffers and runs for one shape."""

    token_ids: onnxruntime.OrtValue
    state: onnxruntime.OrtValue
    noise: onnxruntime.OrtValue
    parameters: onnxruntime.OrtValue
    call: onnxruntime.OrtValue
    images: onnxruntime.OrtValue
    sample: onnxruntime.OrtValue
    text: Run
    step: Run
    decode: Run


class OrtDiffusionPipeline:
    """A Stable Diffusion pipeline on ONNX Runtime, called as diffusers' pipelines are.

    One step is one replay of a captured CUDA graph; everything between the token ids and the pixels
    stays on the device. A graph is captured for each shape at its first use, and the least recently
    used is given back when there are more than eight.
    """

    def __init__(self, folder: PipelineFolder, device: Device) -> None:
        """Load the graphs of an optimized folder; use `from_pretrained`."""
        self.folder = folder
        self.device = device
        family = family_of(folder)
        names = {role: family.with_role(role).name for role in (Role.TEXT_ENCODER, Role.DENOISER, Role.IMAGE_DECODER)}
        self._denoiser_config = folder.config(names[Role.DENOISER])
        vae_config = folder.config(names[Role.IMAGE_DECODER])
        self.vae_scale_factor = 2 ** (len(vae_config.get("block_out_channels", (0,) * 4)) - 1)
        self.scheduler_config: dict[str, Any] = folder.config("scheduler", "scheduler_config.json")
        self.tokenizer = PromptTokenizer.from_folder(folder.component("tokenizer"))
        self._text = Graph(folder.onnx_model(names[Role.TEXT_ENCODER]), device)
        self._step = Graph(folder.onnx_model(names[Role.DENOISER], "step.onnx"), device, capture=True)
        self._decode = Graph(folder.onnx_model(names[Role.IMAGE_DECODER], "decode.onnx"), device)
        self._bound: OrderedDict[_Shape, _Bound] = OrderedDict()
        self._interrupt = False

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, provider: str | None = None, *, device_index: int = 0
    ) -> OrtDiffusionPipeline:
        """Load an optimized folder.

        Args:
            folder: what `python -m sdonnx.optimize_pipeline` wrote.
            provider: "cuda" or "cpu". By default the one that the folder was optimized for.
            device_index: the number of the GPU.

        Raises:
            FolderError: the folder is no optimized pipeline, or is broken.
            ProviderError: the provider is unknown, not available here, or not the folder's.
        """
        opened = PipelineFolder.open(folder)
        if not (opened.path / REPORT).is_file():
            raise FolderError(
                f"{folder} has no {REPORT}", "an optimized pipeline", "run python -m sdonnx.optimize_pipeline on it"
            )
        made_for = str(read_json(opened.path / REPORT).get("provider"))
        device = device_for(provider or made_for, device_index)
        if device.provider != made_for:
            raise ProviderError(
                f"{folder} was optimized for {made_for}",
                f"a folder for {device.provider}",
                f"optimize the exported pipeline with --provider {device.provider}",
            )
        return cls(opened, device)

    @property
    def scheduler(self) -> str:
        """The sampler's class in diffusers; assign a class or a short name such as "euler" to switch."""
        return str(self.scheduler_config["_class_name"])

    @scheduler.setter
    def scheduler(self, name: str) -> None:
        self.scheduler_config = config_for(name, self.scheduler_config)

    @property
    def default_size(self) -> int:
        """Height and width of an image in pixels, where the caller gives none."""
        return self._size_of("sample_size") * int(self.vae_scale_factor)

    def interrupt(self) -> None:
        """Stop the image that is being drawn after the current step; for use in a callback."""
        self._interrupt = True

    def __call__(
        self,
        prompt: str | Sequence[str],
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator | None = None,
        latents: npt.NDArray[Any] | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callback | None = None,
        *,
        seed: int | None = None,
    ) -> ImageOutput:
        """Draw images.

        Args:
            prompt: one prompt, or several of one batch.
            height: pixels, a multiple of 8. By default what the pipeline was made for.
            width: likewise.
            num_inference_steps: denoising steps.
            guidance_scale: weight of the prompt; up to 1 the denoiser runs once a step, without guidance.
            negative_prompt: what to draw away from; one for all prompts or one for each.
            num_images_per_prompt: images for each prompt.
            eta: share of fresh noise (DDIM).
            generator: a torch.Generator, a TorchCpuGenerator, or a list with one for each image.
            latents: initial noise (B,C,H/8,W/8), in place of a seed.
            output_type: "pil", "np" or "latent".
            callback_on_step_end: called as `callback(pipeline, step, timestep, {"latents": array})` after
                each step; latents in the mapping that it returns replace those of the sampler.
            seed: seed of the noise, the same as `torch.Generator("cpu").manual_seed(seed)` gives.

        Raises:
            SdonnxError: an argument cannot be used; nothing has run by then.
        """
        prompts = _prompt_list(prompt)
        negatives = _negative_list(negative_prompt, len(prompts))
        if num_images_per_prompt < 1:
            raise OptionError(
                f"num_images_per_prompt is {num_images_per_prompt}", "at least 1", "ask for one image or more"
            )
        if output_type not in OUTPUT_TYPES:
            raise OptionError(f"the output type {output_type!r} is unknown", f"one of {OUTPUT_TYPES}", "pass one")
        if not np.isfinite(guidance_scale):
            raise OptionError(f"guidance_scale is {guidance_scale}", "a finite number", "pass for example 7.5")
        height = self.default_size if height is None else height
        width = self.default_size if width is None else width
        require_multiple("height", height, self.vae_scale_factor)
        require_multiple("width", width, self.vae_scale_factor)
        sampling = plan(self.scheduler_config, num_inference_steps, eta=eta)
        guided = guidance_scale > 1
        batch = len(prompts) * num_images_per_prompt
        shape = _Shape(batch, height // self.vae_scale_factor, width // self.vae_scale_factor, guided)
        draws = _Noise(batch, seed, generator, (self._channels, shape.height, shape.width), latents)

        repeated = [text for text in prompts for _ in range(num_images_per_prompt)]
        if guided:
            repeated = [text for text in negatives for _ in range(num_images_per_prompt)] + repeated
        token_ids = self.tokenizer.encode(repeated).astype(self._text.dtype("input_ids"))
        bound = self._for_shape(shape)
        bound.token_ids.update_inplace(token_ids)
        bound.text()
        state = np.zeros((STATE_ROWS, *draws.initial.shape), np.float32)
        state[0] = draws.initial * np.float32(sampling.init_noise_sigma)
        bound.state.update_inplace(state)
        bound.parameters.update_inplace(_table(sampling, guidance_scale if guided else None))
        bound.call.update_inplace(np.zeros(1, np.int64))
        self._denoise(bound, sampling, draws, callback_on_step_end)
        return ImageOutput(self._images(bound, output_type), draws.seed)

    @property
    def _channels(self) -> int:
        return self._size_of("in_channels")

    def _size_of(self, key: str) -> int:
        value = self._denoiser_config.get(key)
        if not isinstance(value, int):
            raise FolderError(
                f"the denoiser's config.json in {self.folder.path} says {value!r} for {key}",
                "a number",
                "optimize the exported pipeline again",
            )
        return value

    def warmup(self, shapes: Sequence[tuple[int, int, int]], *, guided: bool = True) -> None:
        """Capture the graphs for shapes (batch, height, width) in pixels before they are asked for."""
        for batch, height, width in shapes:
            require_multiple("height", height, self.vae_scale_factor)
            require_multiple("width", width, self.vae_scale_factor)
            factor = self.vae_scale_factor
            self._for_shape(_Shape(batch, height // factor, width // factor, guided))

    def _denoise(self, bound: _Bound, sampling: SamplingPlan, draws: _Noise, callback: Callback | None) -> None:
        self._interrupt = False
        last = len(sampling.timesteps) - 1
        for index, timestep in enumerate(sampling.timesteps):
            if sampling.needs_noise[index]:
                bound.noise.update_inplace(draws.fresh())
            # Steps queue up on the device; the host waits where it has to touch a buffer.
            touches = callback is not None or (index < last and sampling.needs_noise[index + 1])
            bound.step(wait=touches or index == last)
            if callback is not None:
                self._report(bound, callback, index, float(timestep))
                if self._interrupt:
                    break

    def _report(self, bound: _Bound, callback: Callback, index: int, timestep: float) -> None:
        state = bound.state.numpy()
        changed = callback(self, index, timestep, {"latents": state[0].copy()})
        if changed is not None and "latents" in changed:
            latents = np.asarray(changed["latents"], np.float32)
            if latents.shape != state[0].shape:
                raise OptionError(
                    f"the callback returned latents of shape {latents.shape}",
                    f"{state[0].shape}",
                    "return latents of the shape that it was given",
                )
            state = state.copy()
            state[0] = latents
            bound.state.update_inplace(state)

    def _images(self, bound: _Bound, output_type: str) -> Any:
        if output_type == "latent":
            return bound.state.numpy()[0].copy()
        bound.decode()
        if output_type == "np":
            return bound.sample.numpy().copy()  # on the CPU it is the buffer itself, and the next image goes there
        return [Image.fromarray(pixels) for pixels in bound.images.numpy()]

    def _for_shape(self, shape: _Shape) -> _Bound:
        """Return the buffers and runs of a shape, captured; the least recently used shape may go."""
        if shape in self._bound:
            self._bound.move_to_end(shape)
            return self._bound[shape]
        while len(self._bound) >= _MOST_SHAPES:
            _, oldest = self._bound.popitem(last=False)
            oldest.step.release()
        bound = self._bind(shape)
        bound.step.capture()
        self._bound[shape] = bound
        return bound

    def _bind(self, shape: _Shape) -> _Bound:
        device, copies = self.device, 2 if shape.guided else 1
        tokens = (shape.batch * copies, self.tokenizer.max_length)
        width = int(self._text.shape("last_hidden_state")[2])
        latents = (shape.batch, self._channels, shape.height, shape.width)
        pixels = (shape.batch, shape.height * self.vae_scale_factor, shape.width * self.vae_scale_factor, 3)
        row = 3 + STATE_ROWS * (STATE_ROWS + 1 + copies)
        token_ids = device.upload(np.zeros(tokens, self._text.dtype("input_ids")))
        hidden = device.empty((*tokens, width), self._text.dtype("last_hidden_state"))
        pooled = device.empty((tokens[0], width), self._text.dtype("pooler_output"))
        state = device.upload(np.zeros((STATE_ROWS, *latents), np.float32))
        noise = device.upload(np.zeros(latents, np.float32))
        parameters = device.upload(np.zeros((_MOST_CALLS, row), np.float32))
        call = device.upload(np.zeros(1, np.int64))
        images, sample = device.empty(pixels, np.uint8), device.empty(pixels, np.float32)
        text = self._text.bind({"input_ids": token_ids, "last_hidden_state": hidden, "pooler_output": pooled})
        text()  # the step's first run reads numbers, not what the memory held before
        step = self._step.bind(
            {
                "state": state,
                "noise": noise,
                "parameters": parameters,
                "call": call,
                "encoder_hidden_states": hidden,
                # Written over the inputs: see compose_step.
                "new_state": state,
                "next_call": call,
            }
        )
        decode = self._decode.bind({"latents": (state, latents), "images": images, "sample": sample})
        return _Bound(token_ids, state, noise, parameters, call, images, sample, text, step, decode)


def _table(sampling: SamplingPlan, guidance_scale: float | None) -> npt.NDArray[np.float32]:
    """Return the parameter table (calls, P): next row, timestep, input scale, matrix."""
    matrices = guided_matrices(sampling, guidance_scale)
    calls = len(sampling.timesteps)
    if calls > _MOST_CALLS:
        raise OptionError(f"{calls} calls of the denoiser", f"at most {_MOST_CALLS}", "ask for fewer steps")
    table = np.zeros((_MOST_CALLS, 3 + matrices[0].size), np.float32)
    table[:calls, 0] = np.minimum(np.arange(1, calls + 1), calls - 1)
    table[:calls, 1] = sampling.timesteps
    table[:calls, 2] = sampling.input_scales
    table[:calls, 3:] = matrices.reshape(calls, -1)
    return table


class _Noise:
    """The noise of one call: the initial latents, and fresh noise for samplers that ask for it."""

    def __init__(
        self,
        batch: int,
        seed: int | None,
        generator: Generator | None,
        shape: tuple[int, int, int],
        latents: npt.NDArray[Any] | None,
    ) -> None:
        if seed is not None and generator is not None:
            raise OptionError("both a seed and a generator", "one of them", "leave one out")
        # Samplers that add noise need some even where the caller gave the latents.
        drawn = fresh_seed() if seed is None and generator is None else seed
        self.seed = drawn if latents is None else seed
        self._shape = (batch, *shape)
        if isinstance(generator, list | tuple):
            if len(generator) != batch:
                raise OptionError(
                    f"{len(generator)} generators", f"one for each of {batch} images", "pass as many as images"
                )
            self._generators = list(generator)
        else:
            self._generators = [generator if generator is not None else TorchCpuGenerator(drawn or 0)]
        self.initial = self.fresh() if latents is None else _checked(latents, self._shape)

    def fresh(self) -> npt.NDArray[np.float32]:
        """Return fresh noise (B,C,H,W)."""
        if len(self._generators) == 1:
            return _draw(self._generators[0], self._shape)
        return np.concatenate([_draw(generator, (1, *self._shape[1:])) for generator in self._generators])


def _draw(generator: Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if isinstance(generator, TorchCpuGenerator):
        return generator.randn(shape)
    import sys

    torch = sys.modules.get("torch")  # whoever passes a torch.Generator has imported it
    if torch is None or not isinstance(generator, torch.Generator):
        raise OptionError(f"the generator is a {type(generator).__name__}", "a torch.Generator", "pass one, or a seed")
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return np.asarray(drawn.cpu().numpy(), np.float32)


def _checked(latents: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    array = np.asarray(latents, np.float32)
    if array.shape != shape:
        raise OptionError(f"latents of shape {array.shape}", f"{shape}", "draw them for this batch and size")
    if not np.isfinite(array).all():
        raise OptionError("latents with NaN or infinity", "finite numbers", "draw them again")
    return array


def _prompt_list(prompt: str | Sequence[str]) -> list[str]:
    if not isinstance(prompt, str | Sequence):
        raise PromptError(f"the prompt is a {type(prompt).__name__}", "text or a list of texts", "pass a string")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        raise PromptError("the list of prompts is empty", "one prompt at least", "pass a prompt")
    for text in prompts:
        if not isinstance(text, str):
            raise PromptError(f"a prompt is a {type(text).__name__}", "text", "pass strings")
    return prompts


def _negative_list(negative_prompt: str | Sequence[str] | None, count: int) -> list[str]:
    if negative_prompt is None or isinstance(negative_prompt, str):
        return [negative_prompt or ""] * count
    negatives = _prompt_list(negative_prompt)
    if len(negatives) != count:
        raise PromptError(
            f"{len(negatives)} negative prompts for {count} prompts", "as many of each", "pass one for each prompt"
        )
    return negatives
