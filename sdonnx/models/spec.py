"""Data types that describe a model family: components, and each component's inputs and outputs.

A family is data, with a few functions of its own (`ComponentSpec.count_layers`, `Family.join_config`). Names of
inputs, outputs and dynamic axes follow optimum's ONNX export, so that optimum can open the exported folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.autoencoder import LATENTS_MEAN, LATENTS_STD, SHIFT_FACTOR
from sdonnx.models.image_adapters import AdapterSet

__all__ = ["CAPTION_MASK", "TEXT_MASK", "CallDefaults", "ComponentSpec", "Config", "Family", "Role", "TensorSpec"]

Config = Mapping[str, Any]
"""Content of a component's `config.json`."""

TEXT_MASK = "attention_mask"
"""Input of text encoders that mask padding: 1 for tokens of the caption, 0 for padding."""

CAPTION_MASK = "encoder_attention_mask"
"""Input of denoisers that mask padding, with the same values as `TEXT_MASK`."""


class Role(Enum):
    """Function of a component in the pipeline; optimization stages are selected by role."""

    TEXT_ENCODER = "text_encoder"
    TEXT_ENCODER_2 = "text_encoder_2"
    DENOISER = "denoiser"
    PRECOMPUTE = "precompute"  # not a component: the step-invariant part of the denoiser
    IMAGE_ENCODER = "image_encoder"
    IMAGE_DECODER = "image_decoder"
    IMAGE_PROMPT_ENCODER = "image_prompt_encoder"
    IMAGE_PROMPT_ADAPTER = "image_prompt_adapter"
    SAFETY_CHECKER = "safety_checker"
    CONTROLNET = "controlnet"
    CONTROLNET_PRECOMPUTE = "controlnet_precompute"  # not a component: the step-invariant part of a ControlNet
    T2I_ADAPTER = "t2i_adapter"
    CONTROLLED_DENOISER = "controlled_denoiser"  # not a component: the denoiser that also reads residuals


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a component.

    Attributes:
        name: Name in the graph.
        dims: One entry per dimension: a string for a dynamic axis, an integer for a fixed size, or `config:KEY` for
            a size read from the component's configuration. `config:PART.KEY` reads a nested object.
        integer: Whether the tensor holds int32, as optimum and diffusers feed token ids. All others are floating point.
        keeps_float32: Whether the tensor stays float32 when the component is converted to another precision.
        once: Whether one value is shared by the whole batch.
        series: Configuration key that holds n for a series of n + 1 tensors. `{}` in the name is replaced by the index.
        only_if: Predicate on the component's configuration; the input exists only if it returns true. None for always.
    """

    name: str
    dims: tuple[str | int, ...]
    integer: bool = False
    keeps_float32: bool = False
    once: bool = False
    series: str | None = None
    only_if: Callable[[Config], bool] | None = None

    def resolve(self, config: Config) -> tuple[str | int, ...]:
        """Return `dims` with every `config:KEY` replaced by its value in `config`.

        Raises:
            FolderError: The configuration lacks the key.
        """
        return tuple(self._size(dim, config) for dim in self.dims)

    def _size(self, dim: str | int, config: Config) -> str | int:
        if isinstance(dim, int) or not dim.startswith("config:"):
            return dim
        key = dim.removeprefix("config:")
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, int):
            raise FolderError(
                f"config.json says {value!r} for {key}, which {self.name} needs", "a number", "copy the folder again"
            )
        return value


@dataclass(frozen=True)
class ComponentSpec:
    """A component of the ONNX pipeline.

    Attributes:
        name: Folder in the ONNX pipeline.
        source: Folder in the diffusers pipeline.
        role: Function in the pipeline.
        inputs: Inputs in order.
        outputs: Outputs in order. A series is one entry; see `outputs_in`.
        extra: Folder that is copied with the component, and a file that it must contain. None for no folder.
        float32: Operators that stay float32 when the component is converted to another precision.
        stream_scale: Factor that scales the residual stream when the component is converted. None for no scaling.
        float32_if: Predicate on the configuration; if it returns true, activations exceed float16's range: they are
            scaled by `norm_scale`, and otherwise the component stays float32 as a whole.
        norm_scale: Factor that scales the values that group norms read, so that they fit into float16. None if the
            component stays float32.
        count_layers: Returns the number of layers of each kind; see `sdonnx.models.layer_counts`. None if unknown.
        takes_lora: Whether LoRA files change its weights, so that the optimizer records where each weight is.
    """

    name: str
    source: str
    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: tuple[str, str] | None = None
    float32: tuple[str, ...] = ()
    stream_scale: float | None = None
    float32_if: Callable[[Config], bool] | None = None
    norm_scale: float | None = None
    count_layers: Callable[[Config], dict[str, int]] | None = None
    takes_lora: bool = False

    def outputs_in(self, config: Config) -> tuple[TensorSpec, ...]:
        """Return the outputs with each series expanded; a series without a length in `config` is left out."""
        expanded: list[TensorSpec] = []
        for tensor in self.outputs:
            if tensor.series is None:
                expanded.append(tensor)
            elif isinstance(count := config.get(tensor.series), int):
                expanded += [replace(tensor, name=tensor.name.format(i), series=None) for i in range(count + 1)]
        return tuple(expanded)

    def exceeds_float16(self, config: Config) -> bool:
        """Return whether the component's activations exceed float16's range according to its configuration."""
        return self.float32_if is not None and self.float32_if(config)

    def with_inputs_in(self, config: Config) -> ComponentSpec:
        """Return the component without the inputs that its configuration excludes (`TensorSpec.only_if`)."""
        present = tuple(tensor for tensor in self.inputs if tensor.only_if is None or tensor.only_if(config))
        return replace(self, inputs=present)


@dataclass(frozen=True)
class CallDefaults:
    """Default arguments of a pipeline call, with the values of diffusers' pipelines of the family.

    Attributes:
        guidance_scale: Weight of the prompt.
        num_inference_steps: Denoising steps.
        strength: Strength of image to image.
        inpaint_strength: Strength of image to image with a mask.
        max_sequence_length: Number of tokens that captions are padded to. None for families with tokenizers that define
            the length.
        use_resolution_binning: Whether images are generated in one of the trained sizes and then resized. Families
            with the default False do not accept the argument.
    """

    guidance_scale: float = 7.5
    num_inference_steps: int = 50
    strength: float = 0.8
    inpaint_strength: float = 1.0
    max_sequence_length: int | None = None
    use_resolution_binning: bool = False


def _unchanged(config: Config, config_of: Callable[[str], Config | None]) -> dict[str, Any]:
    return dict(config)


@dataclass(frozen=True)
class Family:
    """A model family: the pipelines that have the same components.

    Attributes:
        name: Name of the family in this project.
        pipeline_classes: Classes of diffusers' pipelines that belong to the family.
        components: Components in the order in which they run.
        optional: Names of components that some pipelines lack; `family_of` removes the missing ones.
        defaults: Default arguments of a call.
        class_defaults: Default arguments of a call of pipeline classes with other ones, by class.
        joins: Extends a component's configuration with values of other components: `joins(config, config_of)`, where
            `config_of(name)` returns the configuration of another component, or None if the pipeline lacks it.
        latent_entries: Entries of the autoencoder's configuration that diffusers' pipelines of the family read next to
            `scaling_factor`: of `shift_factor`, `latents_mean` and `latents_std`. The others are left out.
        adapters: Adapters for image prompts that the pipeline was exported with.
    """

    name: str
    pipeline_classes: frozenset[str]
    components: tuple[ComponentSpec, ...]
    optional: frozenset[str] = frozenset()
    defaults: CallDefaults = field(default_factory=CallDefaults)
    class_defaults: Mapping[str, CallDefaults] = field(default_factory=dict, hash=False)
    joins: Callable[[Config, Callable[[str], Config | None]], dict[str, Any]] = _unchanged
    latent_entries: frozenset[str] = frozenset()
    adapters: AdapterSet | None = None

    @property
    def extras(self) -> tuple[tuple[str, str], ...]:
        """Folders that are copied unchanged, each with a file that it must contain."""
        own = dict.fromkeys(spec.extra for spec in self.components if spec.extra)
        return (("scheduler", "scheduler_config.json"), *own)

    @property
    def text_encoders(self) -> tuple[ComponentSpec, ...]:
        """Text encoders in the order in which they run."""
        return tuple(spec for spec in self.components if spec.role in (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2))

    @property
    def reads_captions(self) -> bool:
        """Whether prompts are captions: cleaned, padded to `max_sequence_length`, and masked."""
        return self.defaults.max_sequence_length is not None

    def component(self, name: str) -> ComponentSpec:
        """Return the component with that name.

        Raises:
            KeyError: There is none.
        """
        return {spec.name: spec for spec in self.components}[name]

    def with_role(self, role: Role) -> ComponentSpec:
        """Return the first component of that role.

        Raises:
            KeyError: There is none.
        """
        for spec in self.components:
            if spec.role is role:
                return spec
        raise KeyError(role)

    def all_with_role(self, role: Role) -> tuple[ComponentSpec, ...]:
        """Return the components of that role, in order."""
        return tuple(spec for spec in self.components if spec.role is role)

    def has(self, role: Role) -> bool:
        """Return whether there is a component of that role."""
        return any(spec.role is role for spec in self.components)

    def as_in(self, folder: PipelineFolder) -> Family:
        """Return the family with only the components and inputs that the pipeline in `folder` has, and its defaults.

        Optional components are removed if the index of `folder` lacks them or their folder does not exist.
        """
        absent = {spec.name for spec in self.components if spec.name in self.optional}
        absent = {name for name in absent if not folder.has_component(self.component(name).source)}
        present = (spec for spec in self.components if spec.name not in absent)
        defaults = self.class_defaults.get(folder.class_name, self.defaults)
        return replace(self, components=tuple(_as_in(spec, folder) for spec in present), defaults=defaults)

    def join_config(self, folder: PipelineFolder, config: Config) -> dict[str, Any]:
        """Return a component's configuration as diffusers' pipelines of the family read it.

        It is extended with the values of other components that its inputs depend on.

        Raises:
            FolderError: The configuration of another component is missing or broken.
        """
        names = {spec.name for spec in self.components}
        unread = {SHIFT_FACTOR, LATENTS_MEAN, LATENTS_STD} - self.latent_entries
        config = {name: value for name, value in config.items() if name not in unread}
        return self.joins(config, lambda name: folder.config(name) if name in names else None)


def _as_in(spec: ComponentSpec, folder: PipelineFolder) -> ComponentSpec:
    if all(tensor.only_if is None for tensor in spec.inputs):
        return spec
    return spec.with_inputs_in(folder.config(spec.name if (folder.path / spec.name).is_dir() else spec.source))
