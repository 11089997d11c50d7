"""ControlNets and T2I-Adapters: components that they add to a family, and the shapes of their residuals.

ControlNet (Zhang et al. 2023, arXiv:2302.05543) adds a residual to each skip connection of the UNet and to the output
of its middle block. T2I-Adapter (Mou et al. 2023, arXiv:2302.08453) adds one to the output of each down block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.layer_counts import layer_counts, require_class, unet_down
from sdonnx.models.shared_components import ENCODER_HIDDEN_STATES, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Config, Family, Role, TensorSpec

__all__ = [
    "ADAPTER",
    "CONDITION_SCALES",
    "CONTROLNET",
    "CONTROLNET_DOWN",
    "CONTROLNET_MID",
    "CONTROL_IMAGE",
    "CONTROL_MODES",
    "CONTROL_TYPES",
    "EXAMPLE_SIZES",
    "NUM_TIME_IDS",
    "RESIDUAL",
    "T2I_ADAPTER",
    "Residual",
    "adapter_inputs",
    "adapter_residuals",
    "control_inputs",
    "control_residuals",
    "controlnet_inputs",
    "controlnet_name",
    "controlnet_residuals",
    "controlnet_spec",
    "has_sizes_of",
    "is_union",
    "latent_pixels",
    "level_sizes",
    "pooled_width",
    "t2i_adapter_name",
    "t2i_adapter_spec",
    "with_control_networks",
]

CONTROLNET_DOWN = "down_block_additional_residuals"
CONTROLNET_MID = "mid_block_additional_residual"
ADAPTER = "down_intrablock_additional_residuals"

# A broken configuration can ask for a billion layers.
_MAX_LAYERS = 1000

_MAX_LEVEL = 5  # halvings with different example sizes; the UNet of Stable Diffusion 1 has three


@dataclass(frozen=True)
class Residual:
    """A residual that is added to a value of the UNet.

    Attributes:
        channels: Number of channels.
        level: Number of times that the latents' height and width are halved.
        skip: Index of the skip connection that has the same value; None for the output of the middle block.
    """

    channels: int
    level: int
    skip: int | None

    @property
    def axes(self) -> tuple[str, str]:
        """Names of height and width, such as `height4`."""
        return _axes(self.level)


def _halved(size: int, level: int) -> int:
    """Return the size after convolutions of stride 2, each of which rounds up."""
    return -(-size >> level)


def _axes(level: int) -> tuple[str, str]:
    """Return the names of height and width after some halvings, such as `height4`."""
    suffix = str(2**level) if level else ""
    return f"height{suffix}", f"width{suffix}"


def level_sizes(height: int, width: int) -> dict[str, int]:
    """Return the sizes of the axes of residuals by name, for latents of that height and width."""
    return {
        name: _halved(size, level)
        for level in range(_MAX_LEVEL + 1)
        for name, size in zip(_axes(level), (height, width), strict=True)
    }


EXAMPLE_SIZES: Mapping[str, int] = MappingProxyType(level_sizes(37, 43))
"""Example sizes of the axes of residuals while a UNet is traced, for latents of 37x43."""


def controlnet_residuals(config: Config) -> tuple[Residual, ...]:
    """Return the residuals of ControlNet: one for each skip connection, and one for the middle block.

    Args:
        config: Configuration of the UNet or of the ControlNet.

    Raises:
        ValueError: It describes more than a thousand layers.
    """
    skips = [residual for block in _blocks(config) for residual in block]
    return (*skips, Residual(skips[-1].channels, skips[-1].level, None))


def adapter_residuals(config: Config) -> tuple[Residual, ...]:
    """Return the residuals of T2I-Adapter: one for each down block, and one for the middle block.

    Blocks with cross-attention add the residual before they downsample, others after it. Adapters of Stable Diffusion
    have none for the middle block.

    Args:
        config: Configuration of the UNet.
    """
    residuals = []
    for index, (kind, block) in enumerate(zip(config["down_block_types"], list(_blocks(config))[1:], strict=True)):
        downsamples = index + 1 < len(config["down_block_types"])
        residuals.append(block[-2 if downsamples and "CrossAttn" in kind else -1])
    if config.get("mid_block_type", "UNetMidBlock2DCrossAttn") is not None:
        residuals.append(Residual(residuals[-1].channels, len(residuals) - 1, None))
    return tuple(residuals)


def controlnet_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """Return `controlnet_residuals` as inputs of a UNet that is traced with them.

    A UNet that halves its latents more than five times has none.
    """
    *skips, middle = controlnet_residuals(config)
    named = [(f"{CONTROLNET_DOWN}.{index}", residual) for index, residual in enumerate(skips)]
    return _specs([*named, (CONTROLNET_MID, middle)])


def adapter_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """Return `adapter_residuals` as inputs of a UNet that is traced with them.

    A UNet that halves its latents more than five times has none.
    """
    return _specs([(f"{ADAPTER}.{index}", residual) for index, residual in enumerate(adapter_residuals(config))])


def has_sizes_of(sample: Sequence[int], shape: Sequence[int], spec: TensorSpec) -> bool:
    """Return whether a residual's shape has the height and width that belong to the shape of the sample, (B,C,H,W)."""
    return all(
        _axes(level) != spec.dims[2:] or tuple(shape[2:]) == tuple(_halved(size, level) for size in sample[2:])
        for level in range(_MAX_LEVEL + 1)
    )


def _blocks(config: Config) -> Iterator[list[Residual]]:
    """Yield the skip connections of the first convolution, then of each down block."""
    channels = list(config["block_out_channels"])
    layers = config.get("layers_per_block", 2)
    counts = list(layers) if isinstance(layers, Sequence) else [layers] * len(channels)
    number = 0
    if sum(counts) > _MAX_LAYERS:
        raise ValueError(f"layers_per_block is {layers}")

    def residual(width: int, level: int) -> Residual:
        nonlocal number
        number += 1
        return Residual(int(width), level, number - 1)

    yield [residual(channels[0], 0)]
    for level, (width, count) in enumerate(zip(channels, counts, strict=True)):
        block = [residual(width, level) for _ in range(count)]
        yield block if level + 1 == len(channels) else [*block, residual(width, level + 1)]


def _specs(named: Sequence[tuple[str, Residual]]) -> tuple[TensorSpec, ...]:
    if max(residual.level for _, residual in named) > _MAX_LEVEL:
        return ()
    return tuple(TensorSpec(name, ("batch_size", residual.channels, *residual.axes)) for name, residual in named)


CONTROLNET, T2I_ADAPTER = "controlnet", "t2i_adapter"

RESIDUAL = "residual."
"""Prefix of the names of residuals, which are numbered in the order of the UNet's skip connections."""

CONTROL_IMAGE = "control_image"
"""Input of a ControlNet or a T2I-Adapter: the image, with pixels from 0 to 1."""

CONTROL_TYPES, CONTROL_MODES, CONDITION_SCALES = "control_types", "control_modes", "condition_scales"
"""Inputs of a ControlNet-Union: 1 for each type that is used (G*B,T), the type of each image, and its weight (N,)."""

NUM_TIME_IDS = 6
"""Sizes that a ControlNet of Stable Diffusion XL reads: the original size, the crop's corner and the target size."""


def controlnet_name(number: int) -> str:
    """Return the component name of a ControlNet, counted from 0."""
    return f"{CONTROLNET}_{number}"


def t2i_adapter_name(number: int) -> str:
    """Return the component name of a T2I-Adapter, counted from 0."""
    return f"{T2I_ADAPTER}_{number}"


def is_union(config: Config) -> bool:
    """Return whether the configuration is for a ControlNet-Union, which reads images of several types."""
    return config.get("_class_name") == "ControlNetUnionModel"


def latent_pixels(config: Config) -> int:
    """Return the height and width of a latent in pixels; all but the first convolution of the image halve it."""
    return int(2 ** (len(_image_channels(config)) - 1))


def _image_channels(config: Config) -> Sequence[int]:
    """Return the channels of the image's convolutions; both classes of diffusers have four by default."""
    channels: Sequence[int] = config.get("conditioning_embedding_out_channels", (16, 32, 96, 256))
    return channels


def pooled_width(config: Config) -> int:
    """Return the width of the pooled text that a ControlNet with size conditioning reads."""
    return int(config["projection_class_embeddings_input_dim"] - NUM_TIME_IDS * config["addition_time_embed_dim"])


def control_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """Return the inputs of a ControlNet besides the latents, the timestep and the prompt.

    The axes of the image are the latents' axes, so that the graph states how both sizes relate.
    """
    pixels = latent_pixels(config)
    shape = ("height", pixels, "width", pixels)
    channels = int(config.get("conditioning_channels", 3))  # older configurations lack it
    inputs = [TensorSpec(CONTROL_IMAGE, ("batch_size", channels, *shape))]
    if is_union(config):
        types = int(config["num_control_type"])
        inputs = [
            TensorSpec(CONTROL_IMAGE, ("batch_size", "conditions", channels, *shape)),
            TensorSpec(CONTROL_TYPES, ("batch_size", types), keeps_float32=True),
            TensorSpec(CONTROL_MODES, ("conditions",), integer=True),
            TensorSpec(CONDITION_SCALES, ("conditions",), keeps_float32=True),
        ]
    if config.get("addition_embed_type") is not None:
        inputs += [
            TensorSpec("text_embeds", ("batch_size", pooled_width(config))),
            TensorSpec("time_ids", ("batch_size", NUM_TIME_IDS), keeps_float32=True),
        ]
    return tuple(inputs)


def controlnet_spec(number: int, config: Config) -> ComponentSpec:
    """Return the component of a ControlNet.

    Args:
        number: Its place among the pipeline's ControlNets.
        config: Its configuration.
    """
    outputs = tuple(
        TensorSpec(f"{RESIDUAL}{index}", ("batch_size", residual.channels, *residual.axes))
        for index, residual in enumerate(controlnet_residuals(config))
    )
    inputs = (SAMPLE, TIMESTEP, ENCODER_HIDDEN_STATES, *control_inputs(config))
    name = controlnet_name(number)
    return ComponentSpec(name, name, Role.CONTROLNET, inputs, outputs, count_layers=_count_controlnet)


def t2i_adapter_spec(number: int, config: Config) -> ComponentSpec:
    """Return the component of a T2I-Adapter.

    Args:
        number: Its place among the pipeline's T2I-Adapters.
        config: Its configuration.
    """
    name = t2i_adapter_name(number)
    image = TensorSpec(CONTROL_IMAGE, ("batch_size", int(config["in_channels"]), "image_height", "image_width"))
    outputs = tuple(
        TensorSpec(f"{RESIDUAL}{index}", ("batch_size", int(width), f"height_{index}", f"width_{index}"))
        for index, width in enumerate(config["channels"])
    )
    return ComponentSpec(name, name, Role.T2I_ADAPTER, (image,), outputs)


def control_residuals(family: Family, config: Config) -> tuple[Residual, ...]:
    """Return the residuals that a family's UNet reads, in the order of their numbers; none without ControlNets.

    Args:
        family: The family of a pipeline.
        config: Configuration of its UNet.
    """
    if family.has(Role.CONTROLNET):
        return controlnet_residuals(config)
    if family.has(Role.T2I_ADAPTER):
        return adapter_residuals(config)[: len(family.with_role(Role.T2I_ADAPTER).outputs)]
    return ()


def with_control_networks(family: Family, folder: PipelineFolder) -> Family:
    """Return the family with the ControlNets and T2I-Adapters that a pipeline was exported with.

    Raises:
        FolderError: A configuration is broken.
    """
    specs = (
        *_specs_in(folder, controlnet_name, controlnet_spec),
        *_specs_in(folder, t2i_adapter_name, t2i_adapter_spec),
    )
    return replace(family, components=(*family.components, *specs)) if specs else family


def _specs_in(
    folder: PipelineFolder, name_of: Callable[[int], str], spec_of: Callable[[int, Config], ComponentSpec]
) -> Iterator[ComponentSpec]:
    for number in itertools.count():
        name = name_of(number)
        if not folder.has_component(name):
            return
        try:
            yield spec_of(number, folder.config(name))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FolderError(
                f"{folder.path / name / 'config.json'} cannot be used ({type(error).__name__}: {error})",
                "the configuration that sdonnx export writes",
                "export the pipeline again",
            ) from error


def _count_controlnet(config: Config) -> dict[str, int]:
    """Count the layers of a ControlNet: a UNet's down part, the image's convolutions, and one for each residual."""
    require_class(config, "ControlNetModel")
    found = unet_down(config)
    image = 2 * len(_image_channels(config))
    return layer_counts(**found | {"convolution": found["convolution"] + image + len(controlnet_residuals(config))})
