"""Limits of a call: lower bounds of the memory that it needs, and the limits that the operator of a server sets.

Each bound is computed before anything is allocated. It counts tensors that exist at the same time in any execution, so
a call with a larger bound than the memory that there is cannot succeed. It leaves out weights, workspaces and most
activations: a call within the bound may still fail with DeviceMemoryError.

With B images, G copies of the batch (2 with guidance), latents (B,C,h,w) of n elements,
images of H x W pixels, and prompts of S tokens and width D:

- buffers: 37 n bytes (the sampler's state with its mask, the noise, and the latents of a known image with their
  noise), 15 B H W bytes (pixels as float32 and as uint8), and the prompts' hidden states G B S D;
- with ControlNets: a copy of each control image for each row of the batch, and the residuals; with T2I-Adapters the
  residuals;
- the UNet: the inputs of all its skip connections, which exist together at its middle block;
- a transformer: the residual stream and the hidden layer of a feed-forward network, 5 times (G B tokens, width);
- the decoder: its largest tensor for one image or one tile;
- the host: the noise, the token ids and their mask, and the returned pixels.

The denoiser and the decoder do not run at the same time, so the larger one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdonnx.errors import DeviceMemoryError, OptionError
from sdonnx.models import abi
from sdonnx.models.control_networks import Residual, control_residuals
from sdonnx.models.spec import Role
from sdonnx.runtime.device.device import available_memory
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.vae.vae_tiling import VaeSplits
from sdonnx.samplers import STATE_ROWS

__all__ = ["RequestLimits", "RequestSize", "denoiser_elements", "require_limit"]

# Of each element of the latents: state, noise, known latents and their noise as float32, and the mask of the state.
_LATENT_BYTES = 4 * (STATE_ROWS + 1 + 2) + STATE_ROWS
_PIXEL_BYTES = 3 * (4 + 1)
_TOKEN_BYTES = 2 * 8  # ids and mask as the tokenizer returns them

_IMAGE_CHANNELS = 3  # of a control image

# Bytes of a pixel in the result; those on the device are counted there.
_RESULT_BYTES = {"pil": 3, "np": 3 * 4, "pt": 3 * 4}

# Ratio of a feed-forward network's hidden width to its transformer's width.
_FEED_FORWARD = 4


@dataclass(frozen=True)
class RequestSize:
    """Sizes of a call.

    Attributes:
        batch: number of images.
        height: height of the generated images in pixels.
        width: width of the generated images in pixels.
        copies: copies of the batch in the denoiser: 2 with guidance and 1 without.
        tokens: length of the prompts; 0 if the caller passed embeddings.
        result_pixels: pixels of a returned image, which may be resized.
        output_type: see `ImageOutput`.
        controls: number of ControlNets or T2I-Adapters; 0 without control images.
    """

    batch: int
    height: int
    width: int
    copies: int
    tokens: int
    result_pixels: int
    output_type: str
    controls: int = 0


class _MemoryEstimate:
    """Lower bounds for the calls of one pipeline.

    Args:
        graphs: graphs of the pipeline.
        geometry: sizes of the pipeline.
        splits: how the autoencoder processes a batch.
    """

    def __init__(self, graphs: GraphSet, geometry: ImageGeometry, splits: VaeSplits) -> None:
        self._geometry, self._splits = geometry, splits
        self._config = graphs.config(Role.DENOISER)
        self._itemsize = graphs.itemsizes(Role.DENOISER)[0]
        conditioned = graphs.conditioning_graph()
        self._width = int(conditioned.shape(abi.ENCODER_HIDDEN_STATES)[2])
        self._token_bytes = self._width * np.dtype(conditioned.dtype(abi.ENCODER_HIDDEN_STATES)).itemsize
        self._control_images = _IMAGE_CHANNELS * len(graphs.family.all_with_role(Role.CONTROLNET))
        self._residuals = control_residuals(graphs.family, self._config)
        denoiser_elements(self._config, 1, 1, 1, 1)  # a broken configuration is reported with the other files

    def device_bytes(self, request: RequestSize) -> int:
        """Return the bytes that a call needs on the device at least."""
        factor = self._geometry.scale_factor
        height, width = request.height // factor, request.width // factor
        latents = request.batch * self._geometry.channels * height * width
        buffers = latents * _LATENT_BYTES + request.batch * request.height * request.width * _PIXEL_BYTES
        buffers += request.copies * request.batch * request.tokens * self._token_bytes
        if request.controls:
            rows = request.copies * request.batch
            images = self._control_images * request.height * request.width
            elements = sum(_area(residual, height, width) for residual in self._residuals)
            buffers += rows * (images + elements) * self._itemsize
        denoiser = denoiser_elements(self._config, request.batch, request.copies, height, width) * self._itemsize
        decodes = request.output_type in _RESULT_BYTES or request.output_type == "ort"
        decoder = self._splits.min_bytes(Role.IMAGE_DECODER, height, width) if decodes else 0
        return buffers + max(denoiser, decoder)

    def prompt_bytes(self, prompts: int, tokens: int) -> int:
        """Return the bytes of the token ids of prompts and of their hidden states in float32 at least."""
        return prompts * tokens * (_TOKEN_BYTES + self._width * 4)

    def host_bytes(self, request: RequestSize) -> int:
        """Return the bytes that a call needs on the host at least, not counting a device that is the host."""
        factor = self._geometry.scale_factor
        noise = request.batch * self._geometry.channels * (request.height // factor) * (request.width // factor) * 4
        tokens = request.copies * request.batch * request.tokens * _TOKEN_BYTES
        return noise + tokens + request.batch * request.result_pixels * _RESULT_BYTES.get(request.output_type, 0)


def _area(residual: Residual, height: int, width: int) -> int:
    """Return the number of elements of a residual of one image."""
    return residual.channels * (height >> residual.level) * (width >> residual.level)


def denoiser_elements(config: Mapping[str, Any], batch: int, copies: int, height: int, width: int) -> int:
    """Return the number of elements of activations of the denoiser that exist at the same time.

    Source: diffusers' `UNet2DConditionModel` and its transformers. Its up blocks read the outputs of `conv_in` and of
    each residual block and downsampler of the down blocks. Guidance copies are counted from the first block
    that reads the prompt, since earlier values may be computed once for both copies. 0 for other configurations.

    Args:
        config: configuration of the denoiser.
        batch: number of images.
        copies: copies of the batch.
        height: height of the latents.
        width: width of the latents.
    """
    channels = config.get("block_out_channels")
    if channels is None:
        patch = int(config.get("patch_size") or 1)
        hidden = int(config.get("num_attention_heads") or 0) * int(config.get("attention_head_dim") or 0)
        return copies * batch * (height // patch) * (width // patch) * hidden * (1 + _FEED_FORWARD)
    layers = config.get("layers_per_block", 1)
    kinds = config.get("down_block_types") or ()
    elements, rows = batch * int(channels[0]) * height * width, batch
    for level, count in enumerate(map(int, channels)):
        if level < len(kinds) and "CrossAttn" in str(kinds[level]):
            rows = batch * copies
        residual_blocks = int(layers[level] if isinstance(layers, list) else layers)
        elements += rows * residual_blocks * count * (height >> level) * (width >> level)
        if level + 1 < len(channels):
            elements += rows * count * (height >> level + 1) * (width >> level + 1)
    return elements


# A plan of more steps takes minutes to compute; the denoiser is called a thousand times at most (MAX_CALLS).
_MAX_STEPS = 10**6


def require_limit(name: str, value: Any) -> int | None:
    """Return a limit of the caller, None for no limit.

    Raises:
        OptionError: it is not a whole number from 1 on.
    """
    if value is None or (_is_whole(value) and value >= 1):
        return None if value is None else int(value)
    raise OptionError(f"{name} is {value!r}", "a whole number from 1 on, or None", "leave it out for no limit")


class RequestLimits:
    """Refuses calls that cannot succeed, before anything of their size is allocated.

    Args:
        graphs: graphs of the pipeline.
        geometry: sizes of the pipeline.
        splits: how the autoencoder processes a batch.
        max_batch_size: maximum number of images of a call; None for no limit.
        max_pixels: maximum height times width of an image; None for no limit.
    """

    def __init__(
        self,
        graphs: GraphSet,
        geometry: ImageGeometry,
        splits: VaeSplits,
        max_batch_size: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self._max_batch_size, self._max_pixels = max_batch_size, max_pixels
        self._device = graphs.device
        self._estimate = _MemoryEstimate(graphs, geometry, splits)
        # Not the free memory of each call: ONNX Runtime's arena holds memory that the next call reuses.
        memory = graphs.device.memory()
        self._most_free = None if memory is None else memory[0]

    def require_call(
        self,
        prompts: PromptArguments,
        asked: tuple[Any, Any],
        generated: tuple[Any, Any],
        *,
        tokens: int,
        steps: Any,
        output_type: str,
        controls: int = 0,
    ) -> None:
        """Raise if a call exceeds a limit. Values of wrong types pass; other checks name them.

        Args:
            prompts: prompts of the call.
            asked: requested height and width in pixels.
            generated: height and width in pixels of the generated images.
            tokens: length to which prompts are padded.
            steps: number of denoising steps; None for the default.
            output_type: see `ImageOutput`.
            controls: number of ControlNets or T2I-Adapters.

        Raises:
            OptionError: the batch, the size or the number of steps exceeds a limit that is set.
            DeviceMemoryError: the call needs more memory than there is.
        """
        if _is_whole(steps) and steps > _MAX_STEPS:
            raise OptionError(f"num_inference_steps is {steps}", f"at most {_MAX_STEPS}")
        count = prompts.count()
        if count is None or not all(_is_whole(edge) and edge > 0 for edge in (*asked, *generated)):
            return
        self._require(
            RequestSize(
                batch=count * prompts.images_per_prompt,
                height=int(generated[0]),
                width=int(generated[1]),
                copies=prompts.copies,
                tokens=0 if prompts.prompt_embeds is not None else tokens,
                result_pixels=int(asked[0]) * int(asked[1]),
                output_type=output_type,
                controls=controls,
            )
        )

    def require_shape(self, batch: Any, height: Any, width: Any, *, tokens: int, guided: bool) -> None:
        """Raise if a shape to capture exceeds a limit; see `require_call`."""
        if all(_is_whole(size) and size > 0 for size in (batch, height, width)):
            copies = 2 if guided else 1
            pixels = int(height) * int(width)
            self._require(RequestSize(int(batch), int(height), int(width), copies, tokens, pixels, "ort"))

    def require_prompts(self, prompts: PromptArguments, *, tokens: int) -> None:
        """Raise if the embeddings of prompts exceed a limit; see `require_call`.

        Args:
            prompts: prompts to encode; `images_per_prompt` is the number of copies of each.
            tokens: length to which prompts are padded.

        Raises:
            OptionError: the batch exceeds the limit that is set.
            DeviceMemoryError: the embeddings need more memory than there is.
        """
        count = prompts.count()
        if count is None:
            return
        batch = count * prompts.images_per_prompt
        self._require_batch(batch)
        needed = self._estimate.prompt_bytes(batch * prompts.copies, tokens)
        _require_memory(f"embeddings of {batch} prompts need", needed, available_memory(), "on this machine")

    def _require_batch(self, batch: int) -> None:
        if self._max_batch_size is not None and batch > self._max_batch_size:
            raise OptionError(f"a batch of {batch} images", f"at most {self._max_batch_size}", "ask for fewer images")

    def _require(self, request: RequestSize) -> None:
        self._require_batch(request.batch)
        if self._max_pixels is not None and request.result_pixels > self._max_pixels:
            raise OptionError(f"images of {request.result_pixels} pixels", f"at most {self._max_pixels}")
        on_device, on_host = self._estimate.device_bytes(request), self._estimate.host_bytes(request)
        if self._most_free is None:
            on_host += on_device
        else:
            if on_device > self._most_free:
                self._most_free = max(self._most_free, self._free_memory())
            _require_memory(_subject(request), on_device, self._most_free, "on the device")
        _require_memory(_subject(request), on_host, available_memory(), "on this machine")

    def _free_memory(self) -> int:
        """Return the free memory of a GPU in bytes; it is read by the thread that has selected the GPU."""
        memory = device_thread(self._device).run(self._device.memory)
        return 0 if memory is None else memory[0]


def _subject(request: RequestSize) -> str:
    plural = "s" if request.batch > 1 else ""
    return f"{request.batch} image{plural} of {request.height}x{request.width} need{'' if plural else 's'}"


def _require_memory(subject: str, needed: int, available: int, place: str) -> None:
    if needed > available:
        raise DeviceMemoryError(
            f"{subject} more than {_shown(needed)} {place}, where {_shown(available)} are available",
            "a request that fits into memory",
            "ask for fewer images at once, or for a smaller size",
        )


def _shown(size: int) -> str:
    size = min(size, 10**18)  # no float holds the memory of an image of 10**200 pixels
    return f"{size / 10**9:,.1f} GB" if size >= 10**9 else f"{size / 10**6:,.0f} MB"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
