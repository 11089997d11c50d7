"""ControlNets and T2I-Adapters: components that they add to a family of Stable Diffusion.

A ControlNet (Zhang et al. 2023, arXiv:2302.05543) reads the latents, the prompt and an image at each step, and computes
residuals for the UNet's skip connections and its middle block. A T2I-Adapter (Mou et al. 2023, arXiv:2302.08453) reads
only the image, so it runs once for each image; its residuals belong to the UNet's down blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.layer_counts import layer_counts, require_class, unet_down
from sdonnx.models.shared_components import ENCODER_HIDDEN_STATES, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Config, Family, Role, TensorSpec
from sdonnx.models.unet_residuals import Residual, adapter_residuals, controlnet_residuals

__all__ = [
    "CONDITION_SCALES",
    "CONTROLNET",
    "CONTROL_IMAGE",
    "CONTROL_MODES",
    "CONTROL_TYPES",
    "NUM_TIME_IDS",
    "RESIDUAL",
    "T2I_ADAPTER",
    "control_inputs",
    "control_residuals",
    "controlnet_name",
    "controlnet_spec",
    "is_union",
    "latent_pixels",
    "pooled_width",
    "t2i_adapter_name",
    "t2i_adapter_spec",
    "with_control_networks",
]

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
