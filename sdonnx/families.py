"""What a pipeline family consists of: its components, and each component's inputs and outputs.

A family is an entry of `FAMILIES`. Names of inputs, outputs and dynamic axes are those of
optimum's ONNX export, so that a folder written here opens there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sdonnx.adapters import ADAPTERS, AdapterSet
from sdonnx.errors import FolderError
from sdonnx.folder import PipelineFolder

__all__ = [
    "CAPTION_MASK",
    "FAMILIES",
    "IMAGE_PROCESSOR",
    "SCALE",
    "TEXT_MASK",
    "ComponentSpec",
    "Family",
    "Role",
    "TensorSpec",
    "family_of",
]


class Role(Enum):
    """What a component does in the pipeline; stages of optimization are chosen by it."""

    TEXT_ENCODER = "text_encoder"
    TEXT_ENCODER_2 = "text_encoder_2"
    DENOISER = "denoiser"
    CONDITIONS = "conditions"  # no component: the part of the denoiser that reads its prompt alone
    IMAGE_ENCODER = "image_encoder"
    IMAGE_DECODER = "image_decoder"
    IMAGE_PROMPT_ENCODER = "image_prompt_encoder"
    IMAGE_PROMPT_ADAPTER = "image_prompt_adapter"
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
        series: the configuration's key that holds n, where there are n + 1 of it; `{}` in the name is then its number
            from 0 on.
        only_if: asked of the component's configuration whether there is such a tensor; None for always.
    """

    name: str
    dims: tuple[str | int, ...]
    integer: bool = False
    keeps_float32: bool = False
    once: bool = False
    series: str | None = None
    only_if: Callable[[Mapping[str, Any]], bool] | None = None

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
        outputs: its outputs in order, a series as one; see `outputs_in`.
        extra: what is copied beside it, and the file that it must hold; None for nothing.
        float32: operators that stay in float32 when it is converted to another precision.
        stream_scale: what its residual stream is multiplied by when it is; None for nothing.
    """

    name: str
    source: str
    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: tuple[str, str] | None = None
    float32: tuple[str, ...] = ()
    stream_scale: float | None = None

    def outputs_in(self, config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """Return the outputs with each series spread out; one whose length the configuration lacks is left out."""
        spread: list[TensorSpec] = []
        for tensor in self.outputs:
            if tensor.series is None:
                spread.append(tensor)
            elif isinstance(count := config.get(tensor.series), int):
                spread += [replace(tensor, name=tensor.name.format(i), series=None) for i in range(count + 1)]
        return tuple(spread)


@dataclass(frozen=True)
class Family:
    """A pipeline family.

    Attributes:
        name: how this project calls it.
        pipeline_classes: diffusers' pipeline classes that belong to it.
        components: its components, in the order in which they run.
        optional: names of components that some pipelines lack; `family_of` leaves them out for those.
        shared: components whose configuration others need: see `config`.
        guidance_scale: what diffusers' pipelines draw with where the user does not say.
        steps: likewise.
        strength: likewise, how far image to image goes.
        mask_strength: likewise, where there is a mask.
        upcasts: whether `force_upcast` in the autoencoder's configuration means something: it is true by default, and
            diffusers' pipelines of Stable Diffusion 1 and 2 do not read it.
        caption_tokens: to what length captions are filled up, for families that read captions in the form of
            `sdonnx.runtime.captions`; None for those that read prompts as they are, as long as their tokenizers say.
        is_binned: whether images are drawn in one of the sizes trained with and then resized.
        adapters: the IP-Adapters that a pipeline of the family has; see `adapted`.
    """

    name: str
    pipeline_classes: frozenset[str]
    components: tuple[ComponentSpec, ...]
    optional: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    guidance_scale: float = 7.5
    strength: float = 0.8
    mask_strength: float = 1.0
    upcasts: bool = False
    steps: int = 50
    caption_tokens: int | None = None
    is_binned: bool = False
    adapters: AdapterSet | None = None

    @property
    def extras(self) -> tuple[tuple[str, str], ...]:
        """Folders that are copied as they are, each with the file that it must hold."""
        own = dict.fromkeys(spec.extra for spec in self.components if spec.extra)
        return (("scheduler", "scheduler_config.json"), *own)

    @property
    def text_encoders(self) -> tuple[ComponentSpec, ...]:
        """The text encoders in the order in which they run."""
        return tuple(spec for spec in self.components if spec.role in (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2))

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
        """Return the family without the optional components that `folder` lacks: not in its index, or not there.

        Components are without the inputs that theirs in `folder` do not take.
        """
        absent = {spec.name for spec in self.components if spec.name in self.optional}
        absent = {name for name in absent if not folder.has_component(self.component(name).source)}
        present = (spec for spec in self.components if spec.name not in absent)
        return replace(self, components=tuple(_as_in(spec, folder) for spec in present))

    def adapted(self, adapters: AdapterSet) -> Family:
        """Return the family with IP-Adapters: what encodes and projects images, and a denoiser that is told them.

        The denoiser takes `image_embeds.i` (B,T,D), what adapter i makes of all its images, and `ip_adapter_scale`
        (A,N), the weight of each adapter in each block of `AdapterSet.blocks`.
        """
        images = tuple(
            TensorSpec(f"image_embeds.{i}", ("batch_size", f"image_tokens_{i}", adapters.width))
            for i in range(len(adapters.adapters))
        )
        scale = TensorSpec(SCALE, (len(adapters.adapters), len(adapters.blocks)), keeps_float32=True)
        projection = ComponentSpec(
            ADAPTERS,
            ADAPTERS,
            Role.IMAGE_PROMPT_ADAPTER,
            tuple(
                TensorSpec(f"image_embeds.{i}", (f"images_{i}", adapter.length, adapter.width))
                for i, adapter in enumerate(adapters.adapters)
            ),
            tuple(
                TensorSpec(f"ip_hidden_states.{i}", (f"images_{i}", adapter.tokens, adapters.width))
                for i, adapter in enumerate(adapters.adapters)
            ),
        )
        components: list[ComponentSpec] = []
        for spec in self.components:
            if spec.role is Role.DENOISER:
                told = replace(spec, inputs=(*spec.inputs, *images, scale))
                components += [_IMAGE_PROMPT_ENCODER, projection, told]
            else:
                components.append(spec)
        return replace(self, components=tuple(components), adapters=adapters)

    def joined(self, folder: PipelineFolder, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a component's configuration with what it needs of others: theirs under their names.

        A denoiser that is told sizes gets `time_ids`, how many numbers that is: what its embedding takes less the
        pooled text, by the width of one (diffusers: `UNet2DConditionModel`, addition_embed_type "text_time"). With
        IP-Adapters there is `ip_adapters`, their number.
        """
        named = {spec.name: spec for spec in self.components}
        whole = dict(config) | {name: folder.config(name) for name in self.shared if name in named}
        width, total = config.get("addition_time_embed_dim"), config.get("projection_class_embeddings_input_dim")
        pooled = whole.get("text_encoder_2", {}).get("projection_dim")
        if isinstance(width, int) and isinstance(total, int) and isinstance(pooled, int) and width > 0:
            whole["time_ids"] = (total - pooled) // width
        if self.adapters is not None:
            whole["ip_adapters"] = len(self.adapters.adapters)
        return whole


def _as_in(spec: ComponentSpec, folder: PipelineFolder) -> ComponentSpec:
    if all(tensor.only_if is None for tensor in spec.inputs):
        return spec
    config = folder.config(spec.name if (folder.path / spec.name).is_dir() else spec.source)
    return replace(
        spec, inputs=tuple(tensor for tensor in spec.inputs if tensor.only_if is None or tensor.only_if(config))
    )


IMAGE_PROCESSOR = "image_processor"
"""The folder that says how images are prepared for IP-Adapters. Not diffusers' `feature_extractor`: the safety checker
has that, and may take images of another size."""

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
    ("feature_extractor", "preprocessor_config.json"),
)
# CLIP's vision tower: IP-Adapter reads the projected embedding, IP-Adapter Plus what the last layer is given.
_IMAGE_PROMPT_ENCODER = ComponentSpec(
    "image_encoder",
    "image_encoder",
    Role.IMAGE_PROMPT_ENCODER,
    (TensorSpec("pixel_values", ("batch_size", "config:num_channels", "config:image_size", "config:image_size")),),
    (
        TensorSpec("image_embeds", ("batch_size", "config:projection_dim")),
        TensorSpec("penultimate_hidden_states", ("batch_size", "positions", "config:hidden_size")),
    ),
    (IMAGE_PROCESSOR, "preprocessor_config.json"),
)
_INPUT_IDS = TensorSpec("input_ids", ("batch_size", "sequence_length"), integer=True)
_LAST_HIDDEN_STATE = TensorSpec("last_hidden_state", ("batch_size", "sequence_length", "config:hidden_size"))
_POOLER_OUTPUT = TensorSpec("pooler_output", ("batch_size", "config:hidden_size"))
# What each layer is given, and what the last one gives: diffusers' Stable Diffusion XL takes the last but one.
_HIDDEN_STATES = TensorSpec(
    "hidden_states.{}", ("batch_size", "sequence_length", "config:hidden_size"), series="num_hidden_layers"
)
_SAMPLE = TensorSpec("sample", ("batch_size", "config:in_channels", "height", "width"))
# float32 in every precision: samplers with continuous noise levels give fractions of a step, and fp16 holds none
# beyond 1024.
_TIMESTEP = TensorSpec("timestep", ("steps",), keeps_float32=True, once=True)
_ENCODER_HIDDEN_STATES = TensorSpec(
    "encoder_hidden_states", ("batch_size", "sequence_length", "config:cross_attention_dim")
)
_OUT_SAMPLE = TensorSpec("out_sample", ("batch_size", "config:out_channels", "height", "width"))
_TOKENIZER = ("tokenizer", "tokenizer_config.json")

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
            (_INPUT_IDS,),
            (_LAST_HIDDEN_STATE, _POOLER_OUTPUT),
            _TOKENIZER,
        ),
        ComponentSpec("unet", "unet", Role.DENOISER, (_SAMPLE, _TIMESTEP, _ENCODER_HIDDEN_STATES), (_OUT_SAMPLE,)),
        _VAE_ENCODER,
        _VAE_DECODER,
        _SAFETY_CHECKER,
    ),
    optional=frozenset({"safety_checker"}),
)

_STABLE_DIFFUSION_XL = Family(
    "stable-diffusion-xl",
    frozenset(
        {
            "StableDiffusionXLPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "ORTStableDiffusionXLPipeline",
            "ORTStableDiffusionXLImg2ImgPipeline",
            "ORTStableDiffusionXLInpaintPipeline",
        }
    ),
    (
        ComponentSpec(
            "text_encoder",
            "text_encoder",
            Role.TEXT_ENCODER,
            (_INPUT_IDS,),
            (_LAST_HIDDEN_STATE, _POOLER_OUTPUT, _HIDDEN_STATES),
            _TOKENIZER,
        ),
        ComponentSpec(
            "text_encoder_2",
            "text_encoder_2",
            Role.TEXT_ENCODER_2,
            (_INPUT_IDS,),
            (TensorSpec("text_embeds", ("batch_size", "config:projection_dim")), _LAST_HIDDEN_STATE, _HIDDEN_STATES),
            ("tokenizer_2", "tokenizer_config.json"),
        ),
        ComponentSpec(
            "unet",
            "unet",
            Role.DENOISER,
            (
                _SAMPLE,
                _TIMESTEP,
                _ENCODER_HIDDEN_STATES,
                TensorSpec("text_embeds", ("batch_size", "config:text_encoder_2.projection_dim")),
                # Sizes in pixels: fp16 holds no odd ones beyond 2048.
                TensorSpec("time_ids", ("batch_size", "config:time_ids"), keeps_float32=True),
            ),
            (_OUT_SAMPLE,),
        ),
        _VAE_ENCODER,
        _VAE_DECODER,
    ),
    optional=frozenset({"text_encoder"}),
    shared=("text_encoder", "text_encoder_2"),
    guidance_scale=5.0,
    strength=0.3,
    mask_strength=0.9999,
    upcasts=True,
)

SCALE = "ip_adapter_scale"
"""The denoiser's input for the weights of IP-Adapters."""

TEXT_MASK = "attention_mask"
"""The input of a text encoder that tells which tokens are the caption's, the others being padding."""

CAPTION_MASK = "encoder_attention_mask"
"""The denoiser's input for the same."""


def _is_told_sizes(config: Mapping[str, Any]) -> bool:
    """Tell whether a transformer was trained with sizes.

    Source: diffusers' PixArtTransformer2DModel, for configurations that do not say.
    """
    said = config.get("use_additional_conditions")
    return config.get("sample_size") == 128 if said is None else bool(said)


_PIXART = Family(
    "pixart",
    frozenset({"PixArtAlphaPipeline"}),
    (
        ComponentSpec(
            "text_encoder",
            "text_encoder",
            Role.TEXT_ENCODER,
            (_INPUT_IDS, TensorSpec(TEXT_MASK, ("batch_size", "sequence_length"), integer=True)),
            (TensorSpec("last_hidden_state", ("batch_size", "sequence_length", "config:d_model")),),
            _TOKENIZER,
            # As transformers computes T5 in fp16: the stream and its norms are wide. What is added to it goes beyond
            # fp16; with this it would have to reach 64 times 65504, and numbers below 0.004 lose digits.
            float32=("RMSNormalization", "SkipSimplifiedLayerNormalization"),
            stream_scale=2.0**-6,
        ),
        ComponentSpec(
            "transformer",
            "transformer",
            Role.DENOISER,
            (
                _SAMPLE,
                _TIMESTEP,
                TensorSpec("encoder_hidden_states", ("batch_size", "sequence_length", "config:caption_channels")),
                TensorSpec(CAPTION_MASK, ("batch_size", "sequence_length"), integer=True),
                # Of all images of a batch; pixels, which fp16 holds badly.
                TensorSpec("resolution", (1, 2), keeps_float32=True, only_if=_is_told_sizes),
                TensorSpec("aspect_ratio", (1, 1), keeps_float32=True, only_if=_is_told_sizes),
            ),
            (_OUT_SAMPLE,),
        ),
        _VAE_ENCODER,
        _VAE_DECODER,
    ),
    guidance_scale=4.5,
    steps=20,
    caption_tokens=120,
    is_binned=True,
)
_PIXART_SIGMA = replace(
    _PIXART,
    name="pixart-sigma",
    pipeline_classes=frozenset({"PixArtSigmaPipeline"}),
    # Its autoencoder is that of Stable Diffusion XL.
    upcasts=True,
    caption_tokens=300,
)

FAMILIES: tuple[Family, ...] = (_STABLE_DIFFUSION, _STABLE_DIFFUSION_XL, _PIXART, _PIXART_SIGMA)


def family_of(folder: PipelineFolder) -> Family:
    """Return the family that the pipeline in `folder` belongs to, without the optional components that it lacks.

    IP-Adapters that were exported with it are part of it.

    Raises:
        FolderError: no family has this pipeline class, or the adapters' configuration is broken.
    """
    for family in FAMILIES:
        if folder.class_name in family.pipeline_classes:
            own, has_adapters = family.as_in(folder), folder.has_component(ADAPTERS)
            return own.adapted(AdapterSet.from_config(folder.config(ADAPTERS))) if has_adapters else own
    known = ", ".join(sorted(name for family in FAMILIES for name in family.pipeline_classes))
    raise FolderError(
        f"{folder.path} is a {folder.class_name}", f"one of {known}", "give a pipeline of a supported family"
    )
