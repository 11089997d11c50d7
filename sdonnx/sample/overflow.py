"""Sample pipelines with values that overflow float16, and unchanged images.

Pairs of weights are multiplied by powers of two that cancel after the value that grows, so that rounding in float32
does not change. The same values overflow in published pipelines:

- attention: queries of Stable Diffusion 2.1; the keys are smaller in proportion
- vae: the residual stream of the decoder of Stable Diffusion XL, which only norms read (madebyollin/sdxl-vae-fp16-fix)
- t5: the gated product in each feed-forward layer of T5, which the next product makes smaller again
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sdonnx.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["OVERFLOWS", "grow", "require_overflow"]

# 2**17 is twice float16's maximum: values around 1 exceed it, and weights below 0.49 do not.
_POWER = 17

# End of a parameter's name, and the power of two that multiplies the parameter; the first match counts.
_Powers = Sequence[tuple[str, int]]


def _attention(names: Sequence[str]) -> _Powers:
    return ((r"attn1\.to_q\.(weight|bias)", _POWER), (r"attn1\.to_k\.(weight|bias)", -_POWER))


def _t5(names: Sequence[str]) -> _Powers:
    return ((r"DenseReluDense\.wi_1\.weight", _POWER), (r"DenseReluDense\.wo\.weight", -_POWER))


def _decoder(names: Sequence[str]) -> _Powers:
    """Return powers that apply from the first up block that changes the number of channels, or from the start."""
    found = [re.match(r"decoder\.up_blocks\.(\d+)\.resnets\.0\.conv_shortcut\.weight", name) for name in names]
    blocks = sorted(int(match[1]) for match in found if match)
    last = max(int(match[1]) for match in (re.match(r"decoder\.up_blocks\.(\d+)\.", name) for name in names) if match)
    first = blocks[0] if blocks else 0
    upper = rf"decoder\.up_blocks\.({'|'.join(str(block) for block in range(first, last + 1))})"
    # Values grow at that block's shortcut, or in `conv_in` if there is no such block.
    start = (
        (
            rf"decoder\.up_blocks\.{first}\.resnets\.0\.conv_shortcut\.(weight|bias)"
            if blocks
            else r"decoder\.conv_in\.(weight|bias)"
        ),
        *(() if blocks else (r"decoder\.mid_block\.(resnets\.\d+\.conv2|attentions\.\d+\.to_out\.0)\.(weight|bias)",)),
    )
    # The residual stream passes through these layers: products grow with it, and biases are added to it.
    through = rf"{upper}\.(resnets\.\d+\.conv_shortcut|upsamplers\.\d+\.conv)\.bias"
    branches = rf"{upper}\.resnets\.\d+\.conv2\.(weight|bias)"
    return tuple((pattern, _POWER) for pattern in (*start, through, branches))


OVERFLOWS: Mapping[str, tuple[tuple[str, ...], Callable[[Sequence[str]], _Powers]]] = {
    "attention": (("unet", "transformer"), _attention),
    "vae": (("vae",), _decoder),
    "t5": (("text_encoder",), _t5),
}
"""Overflows by name: the components that can have it, and a function of parameter names that returns the powers."""


def require_overflow(kind: str, components: Mapping[str, str]) -> None:
    """Raise if a pipeline of these components cannot have the overflow.

    Args:
        kind: Name of the overflow.
        components: Class of each component, by the component's name.

    Raises:
        OptionError: The overflow is unknown, or the pipeline has no component for it.
    """
    if kind not in OVERFLOWS:
        raise OptionError(f"the overflow {kind!r} is unknown", f"one of {', '.join(OVERFLOWS)}")
    if kind == "t5" and components.get("text_encoder") != "T5EncoderModel":
        raise OptionError(
            "the overflow t5 for an architecture without T5",
            "an architecture with T5, such as pixart-tiny",
            "choose another overflow or architecture",
        )


def grow(kind: str, component: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Make a component overflow, in place. Does nothing if the overflow belongs to another component.

    Args:
        kind: A key of `OVERFLOWS`.
        component: Name of the component.
        weights: Its parameters by name.
    """
    components, powers_for = OVERFLOWS[kind]
    if component not in components:
        return
    powers = powers_for(list(weights))
    for name, tensor in weights.items():
        power = next((power for pattern, power in powers if re.search(rf"(?:^|\.){pattern}$", name)), 0)
        if power:
            tensor.mul_(2.0**power)
