"""A UNet2DConditionModel with the arguments of diffusers' `forward` as graph inputs, for the compiler."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from sdonnx.compiler.unet_image_prompts import IMAGE_EMBEDS
from sdonnx.export.wrappers import Wrapper
from sdonnx.models.control_networks import EXAMPLE_SIZES
from sdonnx.models.image_adapters import ADAPTER_SCALE

__all__ = ["TEXT_EMBEDS", "TIME_IDS", "UNetCall"]

TEXT_EMBEDS, TIME_IDS = "text_embeds", "time_ids"


class UNetCall(Wrapper):
    """UNet: sample (B,C,H,W) and other arguments by their names -> out_sample (B,C,H,W).

    An input `NAME.i` is entry i of a list.
    """

    example_sizes: ClassVar = EXAMPLE_SIZES

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the UNet."""
        arguments: dict[str, Any] = {}
        for name, tensor in zip(self.names, inputs, strict=True):
            argument, _, index = name.partition(".")
            if index:
                arguments.setdefault(argument, []).append(tensor)
            else:
                arguments[name] = tensor
        added = {name: arguments.pop(name) for name in (TEXT_EMBEDS, TIME_IDS, IMAGE_EMBEDS) if name in arguments}
        if TEXT_EMBEDS in added:
            # diffusers concatenates it with float32 embeddings; without the cast, the exporter would write a Concat of
            # two types.
            added[TEXT_EMBEDS] = added[TEXT_EMBEDS].float()
        if IMAGE_EMBEDS in added:
            added[IMAGE_EMBEDS] = added[IMAGE_EMBEDS], arguments.pop(ADAPTER_SCALE)
        prediction: torch.Tensor = self.model(**arguments, added_cond_kwargs=added or None, return_dict=False)[0]
        return prediction
