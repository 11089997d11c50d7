"""What a pipeline family consists of: its components, and each component's inputs and outputs.

A family is an entry of `FAMILIES`. Names of inputs, outputs and dynamic axes are those of
optimum's ONNX export, so that a folder written here opens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from sdonnx.errors import FolderError
from sdonnx.folder import PipelineFolder

__all__ = ["FAMILIES", "ComponentSpec", "Family", "OptionalComponent", "Role", "TensorSpec", "family_of"]


class Role(Enum):
    """What a component does in the pipeline; stages of optimization are chosen by it."""

    TEXT_ENCODER = "text_encoder"
    DENOISER = "denoiser"
    IMAGE_ENCODER = "image_encoder"
    IMAGE_DECODER = "image_decoder"
    SAFETY_CHECKER = "safety_checker"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a component.

    Attributes:
        name: its name in the graph.
        dims: one entry a dimension: a name where it is dynamic, a number where it is fixed, and
            `config:KEY` where the component's configuration holds the number; `config:PART.KEY` reads it from
            an object in it.
        integer: token ids (int32, as optimum and diffusers feed them); everything else is floating point.
        keeps_float32: stays in float32 when the component is converted to another precision.
        once: one value for the whole batch.
    """

    name: str
    dims: tuple[str | int, ...]
    integer: bool = False
    keeps_float32: bool = False
    once: bool = False

    def resolve(self, config: Mapping[str, Any]) -> tuple[str | int, ...]:
        """Return `dims` with every `config:KEY` replaced by its value in `config`.

        Raises:
            FolderError: the configuration lacks the key.
        """
        resolved: list[str | int] = []
        for dim in self.dims:
            if isinstance(dim, str) and dim.startswith("config:"):
                key = dim.removeprefix("config:")
                value: Any = config
                for part in key.split("."):
                    value = value.get(part) if isinstance(value, Mapping) else None
                if not isinstance(value, int):
                    raise FolderError(
                        f"config.json says {value!r} for {key}, which {self.name} needs",
                        "a number",
                        "copy the folder again",
                    )
                resolved.append(value)
            else:
                resolved.append(dim)
        return tuple(resolved)


@dataclass(frozen=True)
class ComponentSpec:
    """A component of the ONNX pipeline.

    Attributes:
        name: its folder in the ONNX pipeline.
        source: its folder in the diffusers pipeline.
        role: what it does.
        inputs: its inputs in order.
        outputs: its outputs in order.
    """

    name: str
    source: str
    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class OptionalComponent:
    """A component that some pipelines of a family have.

    Attributes:
        spec: the component.
        extras: what is copied beside it, as in `Family`.
    """

    spec: ComponentSpec
    extras: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """A pipeline family.

    Attributes:
        name: how this project calls it.
        pipeline_classes: diffusers' pipeline classes that belong to it.
        components: its components, in the order in which they run.
        extras: folders that are copied as they are, each with the file that it must hold.
        optional: components that a pipeline may have besides; `family_of` adds those that one has.
    """

    name: str
    pipeline_classes: frozenset[str]
    components: tuple[ComponentSpec, ...]
    extras: tuple[tuple[str, str], ...] = field(
        default=(("scheduler", "scheduler_config.json"), ("tokenizer", "tokenizer_config.json"))
    )
    optional: tuple[OptionalComponent, ...] = ()

    def component(self, name: str) -> ComponentSpec:
        """Return the component called `name`; KeyError where there is none."""
        return {spec.name: spec for spec in self.components}[name]

    def with_role(self, role: Role) -> ComponentSpec:
        """Return the first component of that role; KeyError where there is none."""
        for spec in self.components:
            if spec.role is role:
                return spec
        raise KeyError(role)

    def has(self, role: Role) -> bool:
        """Tell whether there is a component of that role."""
        return any(spec.role is role for spec in self.components)

    def as_in(self, folder: PipelineFolder) -> Family:
        """Return the family with the optional components that `folder` has: named in its index, and there."""
        present = [each for each in self.optional if folder.has_component(each.spec.source)]
        if not present:
            return self
        return replace(
            self,
            components=(*self.components, *(each.spec for each in present)),
            extras=(*self.extras, *(extra for each in present for extra in each.extras)),
        )


_IMAGE = ("batch_size", 3, "height", "width")
_VAE_DECODER = ComponentSpec(
    "vae_decoder",
    "vae",
    Role.IMAGE_DECODER,
    (TensorSpec("latent_sample", ("batch_size", "config:latent_channels", "height_latent", "width_latent")),),
    (TensorSpec("sample", _IMAGE),),
)
_VAE_ENCODER = ComponentSpec(
    "vae_encoder",
    "vae",
    Role.IMAGE_ENCODER,
    (TensorSpec("sample", _IMAGE),),
    (TensorSpec("latent_parameters", ("batch_size", "latent_parameter_channels", "height_latent", "width_latent")),),
)
# Inputs and outputs are those of diffusers' scripts/convert_stable_diffusion_checkpoint_to_onnx.py, so that
# OnnxStableDiffusionPipeline runs it. The images, channels last, come back black where there is a concept.
_SHOWN = ("batch_size", "height", "width", 3)
_CLIP_EDGE = "config:vision_config.image_size"
_SAFETY_CHECKER = ComponentSpec(
    "safety_checker",
    "safety_checker",
    Role.SAFETY_CHECKER,
    (TensorSpec("clip_input", ("batch_size", 3, _CLIP_EDGE, _CLIP_EDGE)), TensorSpec("images", _SHOWN)),
    (TensorSpec("out_images", _SHOWN), TensorSpec("has_nsfw_concepts", ("batch_size",))),
)

_STABLE_DIFFUSION = Family(
    "stable-diffusion",
    frozenset(
        {
            "StableDiffusionPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
            "OnnxStableDiffusionPipeline",
            "StableDiffusionOnnxPipeline",
            "OnnxStableDiffusionImg2ImgPipeline",
            "OnnxStableDiffusionInpaintPipeline",
            "ORTStableDiffusionPipeline",
            "ORTStableDiffusionImg2ImgPipeline",
            "ORTStableDiffusionInpaintPipeline",
        }
    ),
    (
        ComponentSpec(
            "text_encoder",
            "text_encoder",
            Role.TEXT_ENCODER,
            (TensorSpec("input_ids", ("batch_size", "sequence_length"), integer=True),),
            (
                TensorSpec("last_hidden_state", ("batch_size", "sequence_length", "config:hidden_size")),
                TensorSpec("pooler_output", ("batch_size", "config:hidden_size")),
            ),
        ),
        ComponentSpec(
            "unet",
            "unet",
            Role.DENOISER,
            (
                TensorSpec("sample", ("batch_size", "config:in_channels", "height", "width")),
                # float32 in every precision: samplers with continuous noise levels give fractions of
                # a step, and fp16 holds none beyond 1024.
                TensorSpec("timestep", ("steps",), keeps_float32=True, once=True),
                TensorSpec("encoder_hidden_states", ("batch_size", "sequence_length", "config:cross_attention_dim")),
            ),
            (TensorSpec("out_sample", ("batch_size", "config:out_channels", "height", "width")),),
        ),
        _VAE_ENCODER,
        _VAE_DECODER,
    ),
    optional=(OptionalComponent(_SAFETY_CHECKER, (("feature_extractor", "preprocessor_config.json"),)),),
)

FAMILIES: tuple[Family, ...] = (_STABLE_DIFFUSION,)


def family_of(folder: PipelineFolder) -> Family:
    """Return the family that the pipeline in `folder` belongs to, with the optional components that it has.

    Raises:
        FolderError: no family has this pipeline class.
    """
    for family in FAMILIES:
        if folder.class_name in family.pipeline_classes:
            return family.as_in(folder)
    known = ", ".join(sorted(name for family in FAMILIES for name in family.pipeline_classes))
    raise FolderError(
        f"{folder.path} is a {folder.class_name}", f"one of {known}", "give a pipeline of a supported family"
    )
