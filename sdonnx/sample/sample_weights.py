"""Weights of samples: those of the trained samples, and random ones that avoid overflow and reveal mistakes.

Every random parameter has its own generator, so neither order nor the number of threads matters. Scales keep
activations near 1 at any depth, within float16's range. No bias is zero and no two parameters are equal, so that a lost
or swapped parameter changes the result.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.errors import WeightsError

if TYPE_CHECKING:
    import torch

__all__ = ["read_weights", "seeded_weights"]

_BIAS_STD = 0.1
_NORM_STD = 0.1  # around 1
_EMBEDDING_STD = 0.02  # transformers' CLIPTextConfig.initializer_range
# T5 neither adds positions to its token embedding nor normalizes it, and adds the position biases to scores.
_T5_EMBEDDINGS = r"(^|\.)(shared|embed_tokens|relative_attention_bias)\.weight$"
_T5_EMBEDDING_STD = 1.0

# Standard deviation of a matrix or convolution times sqrt(fan_in), by the end of its name. The first match counts;
# the default is 1. Values were found by trial; tests check the properties that they are for.
_GAINS: tuple[tuple[str, float], ...] = (
    # The last layer of a residual branch: the residual stream must not grow with depth.
    (r"(to_out\.0|ff\.net\.2|proj_out|out_proj|mlp\.fc2|SelfAttention\.o|DenseReluDense\.wo)", 0.7),
    # Attention with peaked weights, so that a wrong scale or a lost mask changes the result; text and time that matter.
    (r"(to_q|to_k|q_proj|k_proj|to_k_ip)", 1.4),
    (r"SelfAttention\.q", 0.25),  # T5 does not divide scores by the square root of the head size, 8
    (r"(attn2\.to_v|to_v_ip)", 2.0),
    (r"(time_embedding\.linear_[12]|time_emb_proj)", 2.0),
    # Random noise predictions make latents grow to 10 and more; later layers must still matter.
    (r"^conv_in", 0.3),
    (r"^pos_embed\.proj", 0.1),  # of PixArt: its noise schedule makes latents grow to 200
    # The decoder's input is latents divided by 0.18.
    (r"post_quant_conv", 0.2),
    # Pixels must stay within [-1, 1], and the sampler multiplies errors of the first step by 15.
    (r"conv_out", 0.5),
)


def _gain(name: str) -> float:
    return next((gain for end, gain in _GAINS if re.search(rf"(?:^|\.){end}\.weight$", name)), 1.0)


def _scales(module: torch.nn.Module) -> Iterator[tuple[str, torch.Size, float, float]]:
    """Yield the name, shape, mean and standard deviation of every parameter of `module`, shared ones once."""
    from torch import nn

    named = {name for name, _ in module.named_parameters()}
    for prefix, owner in module.named_modules():
        for key, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name not in named:
                continue
            mean = 0.0
            if key.endswith("bias"):
                std = _BIAS_STD
            elif isinstance(owner, nn.Embedding) or key == "class_embedding":
                std = _T5_EMBEDDING_STD if re.search(_T5_EMBEDDINGS, name) else _EMBEDDING_STD
            elif parameter.ndim == 1:
                mean, std = 1.0, _NORM_STD
            else:
                fan_in = math.prod(parameter.shape[1:])
                std = _gain(name) / math.sqrt(fan_in)
            yield name, parameter.shape, mean, std


def _random(seed: str, shape: torch.Size, mean: float, std: float) -> torch.Tensor:
    """Return a random float32 tensor, which is the same on every processor.

    The distribution is uniform, because torch's normal distribution depends on the processor's vector instructions.
    Before scaling, all values are odd multiples of 2**-25: exact in float32, symmetric and never zero. Over an interval
    of length 1, the standard deviation is 1 / sqrt(12).
    """
    import torch

    # torch's CPU generator uses the low 32 bits of its seed.
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "little")
    values = torch.rand(shape, generator=torch.Generator("cpu").manual_seed(number), dtype=torch.float32)
    values.sub_(0.5).add_(2.0**-25).mul_(std * math.sqrt(12.0))
    return values.add_(mean) if mean else values


def seeded_weights(component: str, module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return float32 weights for all parameters of `module`, by their names in its state_dict.

    Args:
        component: Name of the component; with the same seed, two components have different weights.
        module: The network, which may be on the meta device.
        seed: Any integer.
    """
    scales = sorted(_scales(module))
    names = [name for name, *_ in scales]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        tensors = threads.map(lambda scale: _random(f"{seed}/{component}/{scale[0]}", *scale[1:]), scales)
        return dict(zip(names, tensors, strict=True))


def read_weights(path: Path, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the float16 weights of a network in a file of safetensors, by their names in its state_dict.

    Args:
        path: the file.
        network: the network that the weights are for; it may be on the meta device.

    Raises:
        WeightsError: the file cannot be read, or the weights do not fit the network, are not float16 or not finite.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    remedy = "install sdonnx again, or train the weights with lab/train_shapes.py"
    try:
        weights: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({error})", "a file of safetensors", remedy) from error
    # Shared parameters are listed once.
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    unlike = [name for name in shapes | weights if name not in weights or shapes.get(name) != weights[name].shape]
    if unlike:
        raise WeightsError(
            f"{path} has other tensors than {type(network).__name__} of this version, such as {unlike[0]}",
            f"the {len(shapes)} tensors of the network",
            remedy,
        )
    if wrong := [name for name, value in weights.items() if value.dtype != torch.float16]:
        raise WeightsError(f"{wrong[0]} in {path} is {weights[wrong[0]].dtype}", "float16", remedy)
    if wrong := [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]:
        raise WeightsError(f"{wrong[0]} in {path} holds NaN or infinity", "finite values", remedy)
    return weights
