"""Lower bounds of the memory that a call needs, computed from its sizes before anything is allocated.

Each bound counts tensors that exist at the same time in any execution, so a call with a larger bound than the memory
that there is cannot succeed. It leaves out weights, workspaces and most activations: a call within the bound may still
fail with DeviceMemoryError. With B images, G copies of the batch (2 with guidance), latents (B,C,h,w) of n elements,
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

from sdonnx.models import abi
from sdonnx.models.control_networks import control_residuals
from sdonnx.models.spec import Role
from sdonnx.models.unet_residuals import Residual
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.vae.split import VaeSplits
from sdonnx.samplers import STATE_ROWS

__all__ = ["MemoryEstimate", "RequestSize", "denoiser_elements"]

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


class MemoryEstimate:
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
