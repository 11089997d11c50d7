"""The encode and decode graphs: between images and latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.compose.graph_builder import (
    FLOAT,
    GraphBuilder,
    add_output,
    declared_input,
    declared_shape,
    graph_input,
    replace_input,
)
from sdonnx.graph.edit import constant, dtype_of, input_of
from sdonnx.models import abi
from sdonnx.models.autoencoder import DEFAULT_SCALING_FACTOR, LATENTS_MEAN, SHIFT_FACTOR, latent_statistics

__all__ = ["compose_decode", "compose_encode"]


# diffusers' DiagonalGaussianDistribution: bounds of the logarithm of the variance.
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -30.0, 20.0


def compose_encode(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a VAE encoder's graph into the encode graph, in place.

    Inputs:

    - `sample` (B,3,8H,8W) float32: images, -1 to 1
    - `posterior_noise` (B,C,H,W) float32: noise that samples from the encoder's distribution
    - `noise` (B,C,H,W) float32: noise to mix with the latents
    - `scales` (2) float32: the weights of the latents and of `noise`

    Outputs: `latents` (B,C,H,W) float32, scaled for the denoiser, and `noised`, the mixture.

    Args:
        model: the optimized encoder: `sample -> latent_parameters`.
        config: the VAE's configuration, for `latent_channels`, `scaling_factor`, `shift_factor`, `latents_mean` and
            `latents_std`.
    """
    graph, spec = model.graph, abi.ENCODE
    sizes = {"channels": int(config["latent_channels"])}
    narrow = graph_input(graph, abi.SAMPLE)
    image = declared_input(spec.input(abi.SAMPLE))
    posterior_noise = declared_input(spec.input(abi.POSTERIOR_NOISE), sizes)
    noise = declared_input(spec.input(abi.NOISE), sizes)
    scales = declared_input(spec.input(abi.SCALES))
    add = GraphBuilder(model, before=True)
    dtype = dtype_of(narrow)
    if dtype == FLOAT:
        narrow.shape, image = image.shape, narrow
    else:
        replace_input(graph, abi.SAMPLE, add.cast(image, dtype))

    parameters = next(value for value in graph.outputs if value.name == "latent_parameters")
    graph.outputs.clear()
    parameters.name = "parameters_of_the_encoder"
    add = GraphBuilder(model, before=False)
    mean, log_variance = add.multi("Split", 2, add.cast(parameters, FLOAT), axis=1, num_outputs=2)
    lowest, highest = add.number(_MIN_LOG_VARIANCE, "least"), add.number(_MAX_LOG_VARIANCE, "most")
    bounded = add.op("Clip", log_variance, lowest, highest)
    deviation = add.op("Exp", add.op("Mul", add.number(0.5, "half"), bounded))
    sampled = add.op("Add", mean, add.op("Mul", deviation, posterior_noise))
    factor, shift = _normalization(add, config)
    latents = add.op("Mul", sampled if shift is None else add.op("Sub", sampled, shift), factor)
    latent_scale, noise_scale = add.multi("Split", 2, scales, num_outputs=2)
    noised = add.op("Add", add.op("Mul", latents, latent_scale), add.op("Mul", noise, noise_scale))
    shape = declared_shape(spec.output(abi.LATENTS), sizes)
    add_output(graph, latents, abi.LATENTS, shape)
    add_output(graph, noised, abi.NOISED, shape)
    graph.inputs.clear()
    graph.inputs.extend([image, posterior_noise, noise, scales])
    graph.name = spec.name


def compose_decode(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a VAE decoder's graph into the decode graph, in place.

    Input: `latents` (B,C,H,W) float32, as the sampler leaves them.

    Outputs:

    - `images` (B,8H,8W,3) uint8
    - `sample` (B,8H,8W,3) float32: the same, 0 to 1; the decoder may exceed these bounds
    - `finite` (B) bool: whether an image is free of NaN and infinity, which bytes cannot show

    The arithmetic follows diffusers' VaeImageProcessor: clamp(x / 2 + 0.5, 0, 1), then round(255 * x).

    Args:
        model: the optimized decoder: `latent_sample -> sample`.
        config: the VAE's configuration, for `latent_channels`, `scaling_factor`, `shift_factor`, `latents_mean` and
            `latents_std`.
    """
    graph, spec = model.graph, abi.DECODE
    latent_sample = graph.inputs[0]
    latents = declared_input(spec.input(abi.LATENTS), {"channels": int(config["latent_channels"])})
    add = GraphBuilder(model, before=True)
    factor, shift = _normalization(add, config)
    scaled = add.op("Div", latents, factor)
    scaled = scaled if shift is None else add.op("Add", scaled, shift)
    replace_input(graph, latent_sample.name or "", add.cast(scaled, dtype_of(latent_sample)))

    image = graph.outputs[0]
    graph.outputs.clear()
    image.name = "image_of_the_decoder"
    add = GraphBuilder(model, before=False)
    last = image.producer()
    if last is not None and last.op_type == "Transpose" and last.attributes.get_ints("perm", ()) == (0, 3, 1, 2):
        pixels = input_of(last, 0)
        graph.remove(last, safe=True)
    else:
        pixels = add.op("Transpose", image, perm=[0, 2, 3, 1])
    half, one = add.number(0.5, "half"), add.number(1.0, "one")
    shifted = add.op("Add", add.op("Mul", add.cast(pixels, FLOAT), half), half)
    clamped = add.op("Clip", shifted, add.number(0.0, "zero"), one)
    levels = add.op("Round", add.op("Mul", clamped, add.number(255.0, "levels")))
    images = add.op("Cast", levels, dtype=ir.DataType.UINT8, to=ir.DataType.UINT8)
    # x - x is 0, or NaN where x is NaN or infinite; NaN is not equal to itself.
    zero_or_nan = add.op("ReduceSum", add.op("Sub", shifted, shifted), add.integers(1, 2, 3), keepdims=0)
    finite = add.op("Equal", zero_or_nan, zero_or_nan, dtype=ir.DataType.BOOL)
    for value, name in ((images, abi.IMAGES), (shifted, abi.SAMPLE), (finite, abi.FINITE)):
        add_output(graph, value, name, declared_shape(spec.output(name)))
    graph.inputs.clear()
    graph.inputs.append(latents)
    graph.name = spec.name


def _normalization(add: GraphBuilder, config: Mapping[str, Any]) -> tuple[ir.Value, ir.Value | None]:
    """Return the factor and the shift of latents: (encoded - shift) * factor; a shift of None is 0.

    Each is a number, or one for each channel (1,C,1,1).
    """
    factor = float(config.get("scaling_factor", DEFAULT_SCALING_FACTOR))
    if (statistics := latent_statistics(config)) is not None:
        mean, std = (np.array(values).reshape(1, -1, 1, 1) for values in statistics)
        scale = constant(add.graph, factor / std, np.float32, "scaling_factor")
        return scale, constant(add.graph, mean, np.float32, LATENTS_MEAN)
    shift = config.get(SHIFT_FACTOR)
    return add.number(factor, "scaling_factor"), None if shift is None else add.number(float(shift), SHIFT_FACTOR)
