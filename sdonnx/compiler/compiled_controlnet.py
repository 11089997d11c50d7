"""ControlNetModel (Zhang et al. 2023, arXiv:2302.05543): the signature of its graph, and its results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers.models.controlnets.controlnet import ControlNetOutput

from sdonnx.compiler.compiled_unet import timesteps_of
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.export.control_network_wrappers import ControlNet
from sdonnx.models.control_networks import NUM_TIME_IDS, latent_pixels, pooled_width
from sdonnx.models.shared_components import ENCODER_HIDDEN_STATES, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec

__all__ = ["ControlNetForward"]

_TEXT_EMBEDS, _TIME_IDS, _IMAGE, _SCALE = "text_embeds", "time_ids", "controlnet_cond", "conditioning_scale"
_COMPUTED = frozenset(
    {"sample", "timestep", "encoder_hidden_states", _IMAGE, _SCALE, "added_cond_kwargs", "guess_mode", "return_dict"}
)


class _ControlNet(ControlNet):
    """ControlNet with the names of diffusers' arguments."""

    image_input: ClassVar = _IMAGE


class ControlNetForward(GraphMethod):
    """`ControlNetModel.forward`, also with `guess_mode`, which only changes the weights of the residuals."""

    def why_not(self, module: Any) -> str | None:
        config: Mapping[str, Any] = module.config
        for name in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type"):
            if config.get(name) is not None:
                return f"its configuration has {name}={config[name]!r}"
        if (embeds := config.get("addition_embed_type")) not in (None, "text_time"):
            return f"its configuration has addition_embed_type={embeds!r}"
        if config["global_pool_conditions"]:
            return "its configuration has global_pool_conditions=True"
        if embeds is not None and pooled_width(module.config) < 1:
            return f"its configuration has no room for {NUM_TIME_IDS} time_ids"
        return None

    def signature(self, module: Any, variant: Hashable) -> GraphSignature:
        pixels = latent_pixels(module.config)
        image = ("batch_size", "config:conditioning_channels", "height", pixels, "width", pixels)
        inputs = [
            SAMPLE,
            # Each image of a batch has its own timestep, as in diffusers.
            replace(TIMESTEP, dims=("batch_size",), once=False),
            ENCODER_HIDDEN_STATES,
            TensorSpec(_IMAGE, image),
            TensorSpec(_SCALE, (_residuals(module),), keeps_float32=True),
        ]
        if module.config["addition_embed_type"] is not None:
            inputs += [
                TensorSpec(_TEXT_EMBEDS, ("batch_size", pooled_width(module.config))),
                TensorSpec(_TIME_IDS, ("batch_size", NUM_TIME_IDS), keeps_float32=True),
            ]
        # The sizes of each residual follow from the sizes of the latents.
        outputs = tuple(
            TensorSpec(f"residual.{index}", ("batch_size", f"channels_{index}", f"height_{index}", f"width_{index}"))
            for index in range(_residuals(module))
        )
        spec = ComponentSpec("controlnet", "controlnet", Role.DENOISER, tuple(inputs), outputs)
        return GraphSignature(spec, dict(module.config), _ControlNet)

    def inputs(
        self, module: Any, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        for name, value in arguments.items():
            is_empty = value is None or value is False or (isinstance(value, Mapping) and not value)
            if name not in _COMPUTED and not is_empty:
                return f"it has {name}"
        sample, image, scale = arguments["sample"], arguments[_IMAGE], arguments[_SCALE]
        if not isinstance(sample, torch.Tensor) or sample.ndim != 4:
            return "sample is not a tensor (B,C,H,W)"
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            return f"its {_SCALE} is not a number"
        timestep = timesteps_of(arguments["timestep"], len(sample), signature.target.torch_device)
        if timestep is None:
            return "its timestep is not a number, or one for each image"
        blocks = _blocks(image, sample, latent_pixels(module.config))
        if blocks is None:
            return f"its image is not {latent_pixels(module.config)} times as large as the latents"
        tensors = {
            "sample": sample,
            "timestep": timestep,
            "encoder_hidden_states": arguments["encoder_hidden_states"],
            _IMAGE: blocks,
            _SCALE: _weights(float(scale), _residuals(module), sample.device, guess=bool(arguments["guess_mode"])),
        }
        given = dict(arguments["added_cond_kwargs"] or {})
        if module.config["addition_embed_type"] is None:
            return checked_inputs(tensors, signature)  # diffusers ignores the others
        tensors |= {name: given.get(name) for name in (_TEXT_EMBEDS, _TIME_IDS)}
        if isinstance(sizes := tensors[_TIME_IDS], torch.Tensor):
            tensors[_TIME_IDS] = sizes.to(torch.float32)
        return checked_inputs(tensors, signature)

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        *down, middle = outputs
        if not arguments["return_dict"]:
            return down, middle
        # diffusers stores a list, too.
        return ControlNetOutput(down_block_res_samples=down, mid_block_res_sample=middle)  # type: ignore[arg-type]


def _residuals(module: Any) -> int:
    """Return the number of residuals, including the middle block's."""
    return len(module.controlnet_down_blocks) + 1


def _weights(scale: float, count: int, device: torch.device, *, guess: bool) -> torch.Tensor:
    """Return the weights of the residuals, as `ControlNetModel.forward` computes them, without waiting for the GPU."""
    return torch.logspace(-1, 0, count, device=device) * scale if guess else torch.full((count,), scale, device=device)


def _blocks(image: Any, sample: torch.Tensor, pixels: int) -> torch.Tensor | None:
    """Return an image (B,C,PH,PW) as a view (B,C,H,P,W,P), or None if its size does not fit the latents (B,C,H,W)."""
    height, width = sample.shape[2:]
    if not isinstance(image, torch.Tensor) or image.ndim != 4:
        return None
    if image.shape[2:] != (pixels * height, pixels * width):
        return None
    blocks: torch.Tensor = image.unflatten(3, (width, pixels)).unflatten(2, (height, pixels))
    return blocks
