"""Sample pipelines that overflow float16, and draw what they drew before.

Pairs of weights are multiplied by powers of two that undo each other behind the value that grows, so that no rounding
of float32 changes. What overflows is what does in published pipelines:

- attention: queries of Stable Diffusion 2.1, whose keys are too small in turn
- vae: the residual stream of the decoder of Stable Diffusion XL, which only norms read (madebyollin/sdxl-vae-fp16-fix)
- t5: the gated product in each feed-forward layer of T5, which is made smaller again by the product behind it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sdonnx.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["OVERFLOWS", "grow", "require_overflow"]

# 2**17 is twice what float16 holds: values around 1 are beyond it, and weights below 0.49 are not.
_POWER = 17

# The end of a parameter's name, and the power of two that it is multiplied by; the first match counts.
_Powers = Sequence[tuple[str, int]]


def _attention(names: Sequence[str]) -> _Powers:
    return ((r"attn1\.to_q\.(weight|bias)", _POWER), (r"attn1\.to_k\.(weight|bias)", -_POWER))


def _t5(names: Sequence[str]) -> _Powers:
    return ((r"DenseReluDense\.wi_1\.weight", _POWER), (r"DenseReluDense\.wo\.weight", -_POWER))


def _decoder(names: Sequence[str]) -> _Powers:
    """Return the powers from the first upper block on that changes the number of channels, or from the start."""
    found = [re.match(r"decoder\.up_blocks\.(\d+)\.resnets\.0\.conv_shortcut\.weight", name) for name in names]
    blocks = sorted(int(match[1]) for match in found if match)
    last = max(int(match[1]) for match in (re.match(r"decoder\.up_blocks\.(\d+)\.", name) for name in names) if match)
    first = blocks[0] if blocks else 0
    upper = rf"decoder\.up_blocks\.({'|'.join(str(block) for block in range(first, last + 1))})"
    # What comes from below is small yet, or has grown in `conv_in` where there is no such block.
    start = (
        (
            rf"decoder\.up_blocks\.{first}\.resnets\.0\.conv_shortcut\.(weight|bias)"
            if blocks
            else r"decoder\.conv_in\.(weight|bias)"
        ),
        *(() if blocks else (r"decoder\.mid_block\.(resnets\.\d+\.conv2|attentions\.\d+\.to_out\.0)\.(weight|bias)",)),
    )
    # The stream goes through these: their products grow with it, and their biases are added to it.
    through = rf"{upper}\.(resnets\.\d+\.conv_shortcut|upsamplers\.\d+\.conv)\.bias"
    branches = rf"{upper}\.resnets\.\d+\.conv2\.(weight|bias)"
    return tuple((pattern, _POWER) for pattern in (*start, through, branches))


# By name: the components that have it, and its powers for the names of their parameters.
OVERFLOWS: Mapping[str, tuple[tuple[str, ...], Callable[[Sequence[str]], _Powers]]] = {
    "attention": (("unet", "transformer"), _attention),
    "vae": (("vae",), _decoder),
    "t5": (("text_encoder",), _t5),
}
"""What can be made to overflow."""


def require_overflow(kind: str, components: Mapping[str, str]) -> None:
    """Refuse an overflow that a pipeline of these components, each with its class, cannot have.

    Raises:
        OptionError: it is unknown, or the pipeline has no such component.
    """
    if kind not in OVERFLOWS:
        raise OptionError(f"the overflow {kind!r} is unknown", f"one of {', '.join(OVERFLOWS)}", "choose one of these")
    if kind == "t5" and components.get("text_encoder") != "T5EncoderModel":
        raise OptionError("an overflow of t5 was asked for", "an architecture with T5, as PixArt's", "choose another")


def grow(kind: str, component: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Make a component overflow, in place; nothing where the overflow is in another one.

    Args:
        kind: a key of `OVERFLOWS`.
        component: the component's name.
        weights: its parameters by name.
    """
    components, powers_for = OVERFLOWS[kind]
    if component not in components:
        return
    powers = powers_for(list(weights))
    for name, tensor in weights.items():
        power = next((power for pattern, power in powers if re.search(rf"(?:^|\.){pattern}$", name)), 0)
        if power:
            tensor.mul_(2.0**power)
