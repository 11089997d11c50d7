"""The encode and decode graphs: between images and latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from sdonnx.compose.composer import FLOAT, Composer, give_out, input_of, take_over, tensor

__all__ = ["compose_decode", "compose_encode"]

_UINT8 = ir.DataType.UINT8

# diffusers' AutoencoderKL: the scale of Stable Diffusion 1 and 2 (arXiv:2112.10752, section G).
_SCALING_FACTOR = 0.18215

# diffusers' DiagonalGaussianDistribution: bounds of the logarithm of the variance.
_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE = -30.0, 20.0


def compose_encode(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a VAE encoder's graph into the encode graph, in place.

    Inputs: `sample` (B,3,8H,8W) float32 from -1 to 1; `posterior_noise` (B,C,H,W) float32, which draws the
    latents from the encoder's distribution; `noise` (B,C,H,W) float32, what they are mixed with; and
    `scales` (2) float32, the weights of the latents and of that noise.

    Outputs: `latents` (B,C,H,W) float32 as the denoiser knows them, and `noised`, the mixture.

    Args:
        model: the optimized encoder: `sample -> latent_parameters`.
        config: the VAE's configuration, for `latent_channels`, `scaling_factor` and `shift_factor`.
    """
    graph = model.graph
    channels = int(config["latent_channels"])
    shape: list[int | str] = ["batch", channels, "height", "width"]
    given = input_of(graph, "sample")
    assert given.dtype is not None
    image = tensor("sample", FLOAT, ["batch", 3, "image_height", "image_width"])
    posterior_noise, noise = tensor("posterior_noise", FLOAT, shape), tensor("noise", FLOAT, shape)
    scales = tensor("scales", FLOAT, [2])
    add = Composer(model, before=True)
    if given.dtype == FLOAT:
        given.shape, image = image.shape, given
    else:
        take_over(graph, "sample", add.cast(image, given.dtype))

    parameters = next(value for value in graph.outputs if value.name == "latent_parameters")
    graph.outputs.clear()
    parameters.name = "parameters_of_the_encoder"
    add = Composer(model, before=False)
    mean, log_variance = add.multi("Split", 2, add.cast(parameters, FLOAT), axis=1, num_outputs=2)
    least, most = add.number(_LEAST_LOG_VARIANCE, "least"), add.number(_MOST_LOG_VARIANCE, "most")
    bounded = add.op("Clip", log_variance, least, most)
    deviation = add.op("Exp", add.op("Mul", add.number(0.5, "half"), bounded))
    drawn = add.op("Add", mean, add.op("Mul", deviation, posterior_noise))
    if config.get("shift_factor") is not None:
        drawn = add.op("Sub", drawn, add.number(float(config["shift_factor"]), "shift_factor"))
    factor = add.number(float(config.get("scaling_factor", _SCALING_FACTOR)), "scaling_factor")
    latents = add.op("Mul", drawn, factor)
    of_latents, of_noise = add.multi("Split", 2, scales, num_outputs=2)
    noised = add.op("Add", add.op("Mul", latents, of_latents), add.op("Mul", noise, of_noise))
    give_out(graph, latents, "latents", shape)
    give_out(graph, noised, "noised", shape)
    graph.inputs.clear()
    graph.inputs.extend([image, posterior_noise, noise, scales])
    graph.name = "encode"


def compose_decode(model: ir.Model, config: Mapping[str, Any]) -> None:
    """Turn a VAE decoder's graph into the decode graph, in place.

    Input: `latents` (B,C,H,W) float32, as the sampler leaves them. Outputs: `images` (B,8H,8W,3) uint8; `sample`, the
    same as float32, from 0 to 1 but for what the decoder overshoots; and `finite` (B) bool, whether an image is free of
    NaN and infinity, which bytes do not show. The arithmetic is that of diffusers' VaeImageProcessor:
    clamp(x / 2 + 0.5, 0, 1), then round(255 * x).

    Args:
        model: the optimized decoder: `latent_sample -> sample`.
        config: the VAE's configuration, for `latent_channels`, `scaling_factor` and `shift_factor`.
    """
    graph = model.graph
    latent_sample = graph.inputs[0]
    assert latent_sample.dtype is not None
    latents = tensor("latents", FLOAT, ["batch", int(config["latent_channels"]), "height", "width"])
    add = Composer(model, before=True)
    factor = add.number(float(config.get("scaling_factor", _SCALING_FACTOR)), "scaling_factor")
    scaled = add.op("Div", latents, factor)
    if config.get("shift_factor") is not None:
        scaled = add.op("Add", scaled, add.number(float(config["shift_factor"]), "shift_factor"))
    take_over(graph, latent_sample.name or "", add.cast(scaled, latent_sample.dtype))

    image = graph.outputs[0]
    graph.outputs.clear()
    image.name = "image_of_the_decoder"
    add = Composer(model, before=False)
    last = image.producer()
    if last is not None and last.op_type == "Transpose" and last.attributes.get_ints("perm", ()) == (0, 3, 1, 2):
        pixels = last.inputs[0]
        assert pixels is not None
        graph.remove(last, safe=True)
    else:
        pixels = add.op("Transpose", image, perm=[0, 2, 3, 1])
    half, one = add.number(0.5, "half"), add.number(1.0, "one")
    shifted = add.op("Add", add.op("Mul", add.cast(pixels, FLOAT), half), half)
    clamped = add.op("Clip", shifted, add.number(0.0, "zero"), one)
    levels = add.op("Round", add.op("Mul", clamped, add.number(255.0, "levels")))
    images = add.op("Cast", levels, dtype=_UINT8, to=_UINT8)
    shape: list[int | str] = ["batch", "image_height", "image_width", 3]
    # x - x is 0, or NaN where x is none or infinite; NaN is not equal to itself.
    nothing = add.op("ReduceSum", add.op("Sub", shifted, shifted), add.integers(1, 2, 3), keepdims=0)
    finite = add.op("Equal", nothing, nothing, dtype=ir.DataType.BOOL)
    give_out(graph, images, "images", shape)
    give_out(graph, shifted, "sample", shape)
    give_out(graph, finite, "finite", ["batch"])
    graph.inputs.clear()
    graph.inputs.append(latents)
    graph.name = "decode"
