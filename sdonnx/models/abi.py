"""The served graphs: the file, inputs and outputs of each graph that compose writes and the run-time binds.

This module is data. `sdonnx.compose` writes graphs with these names, types and axes; `sdonnx.runtime` binds buffers to
them. docs/reference/graphs.md is generated from it. A change of a name or a type here raises the folder format
(`sdonnx.folder.folder_version.FORMAT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sdonnx.models.control_networks import (
    CONDITION_SCALES,
    CONTROL_IMAGE,
    CONTROL_MODES,
    CONTROL_TYPES,
    RESIDUAL,
)
from sdonnx.models.image_adapters import ADAPTER_SCALE
from sdonnx.models.shared_components import TIMESTEP_COND
from sdonnx.models.spec import CAPTION_MASK, TEXT_MASK, Role

__all__ = [
    "ADAPT",
    "ASPECT_RATIO",
    "ATTENTION_MASK",
    "AXES",
    "CALLS",
    "CLIP_INPUT",
    "COMPONENT",
    "CONDITION_SCALES",
    "CONTROL",
    "CONTROLLED_STEP",
    "CONTROL_FACTORS",
    "CONTROL_IMAGE",
    "CONTROL_MODES",
    "CONTROL_PRECOMPUTE",
    "CONTROL_ROLES",
    "CONTROL_TYPES",
    "DECODE",
    "DENOISER_ROLES",
    "ENCODE",
    "ENCODER_HIDDEN_STATES",
    "FINITE",
    "FIRST_HIDDEN_STATES",
    "GRAPHS",
    "HAS_NSFW_CONCEPTS",
    "HIDDEN_STATES",
    "IMAGES",
    "IMAGE_EMBEDS",
    "INPUT_IDS",
    "IP_HIDDEN_STATES",
    "IS_NONEMPTY",
    "KEEP_MASK",
    "KNOWN_LATENTS",
    "LATENTS",
    "LAYER_INDEX",
    "MASK",
    "MASKED_LATENTS",
    "NEW_RESIDUAL",
    "NEW_STATE",
    "NEXT_STEP_INDEX",
    "NOISE",
    "NOISED",
    "PARAMETERS",
    "PENULTIMATE_HIDDEN_STATES",
    "PIXEL_VALUES",
    "POSITIONS",
    "POSTERIOR_NOISE",
    "PRECOMPUTE",
    "PRECOMPUTED",
    "PROJECT",
    "PROMPT",
    "RESIDUAL",
    "RESOLUTION",
    "SAFETY_CHECK",
    "SAMPLE",
    "SCALES",
    "SECOND_TEXT",
    "STATE",
    "STEP",
    "STEP_INDEX",
    "TEXT",
    "TEXT_EMBEDS",
    "TIMESTEP_COND",
    "TIME_IDS",
    "GraphSpec",
    "GraphTensor",
]

COMPONENT = "component"
"""The dtype of tensors that have the component's own floating-point type: float32, float16 or bfloat16."""

# Names of inputs and outputs.
ATTENTION_MASK = TEXT_MASK
CLIP_INPUT = "clip_input"
CONTROL_FACTORS = "control_factors"
ENCODER_HIDDEN_STATES = "encoder_hidden_states"
FINITE = "finite"
FIRST_HIDDEN_STATES = "hidden_states_1"
HAS_NSFW_CONCEPTS = "has_nsfw_concepts"
HIDDEN_STATES = "hidden_states"
IMAGES = "images"
IMAGE_EMBEDS = "image_embeds"
INPUT_IDS = "input_ids"
IP_HIDDEN_STATES = "ip_hidden_states"
IS_NONEMPTY = "is_nonempty"
KEEP_MASK = "keep_mask"
KNOWN_LATENTS = "known_latents"
LATENTS = "latents"
LAYER_INDEX = "layer_index"
MASK = "mask"
MASKED_LATENTS = "masked_latents"
NEW_RESIDUAL = "new_residual."
NEW_STATE = "new_state"
NEXT_STEP_INDEX = "next_step_index"
NOISE = "noise"
NOISED = "noised"
PARAMETERS = "parameters"
PENULTIMATE_HIDDEN_STATES = "penultimate_hidden_states"
PIXEL_VALUES = "pixel_values"
POSITIONS = "positions"
POSTERIOR_NOISE = "posterior_noise"
SAMPLE = "sample"
SCALES = "scales"
STATE = "state"
STEP_INDEX = "step_index"
RESOLUTION = "resolution"
ASPECT_RATIO = "aspect_ratio"
TEXT_EMBEDS = "text_embeds"
TIME_IDS = "time_ids"

PRECOMPUTED = "precomputed."
"""The prefix of the names of tensors that the precompute graph writes and the step graph reads."""

CALLS = "calls"
"""The axis with one row for each call of the denoiser."""

AXES: Mapping[str, str] = {
    "batch": "images",
    "batch_size": "prompts: G per image, G = 2 with guidance (unconditional prompts first) and 1 without; images in"
    " the graphs `check` and `prompt`",
    "sequence_length": "tokens of a prompt",
    CALLS: "calls of the denoiser for which the parameter table has rows",
    "row": "numbers in a row of the parameter table; see `sdonnx.samplers.plans`",
    "state_rows": "R, rows of the sampler's state (`sdonnx.samplers.STATE_ROWS`)",
    "channels": "channels of the latents",
    "height": "rows of the latents",
    "width": "columns of the latents",
    "image_height": "rows of the image in pixels",
    "image_width": "columns of the image in pixels",
    "clip_size": "edge in pixels of images prepared for CLIP",
    "images": "images of one IP-Adapter",
    "hidden_size": "channels of a text encoder",
    "joined_hidden_size": "channels of all text encoders together",
    "prompt_channels": "channels of the prompt that the denoiser attends to",
    "pooled_size": "numbers of the pooled prompt",
    "size_count": "numbers that describe the image's size and crop, and its aesthetic score",
    "image_tokens": "tokens of all images of one IP-Adapter",
    "guidance_size": "numbers of the guidance scale's embedding",
    "adapters": "IP-Adapters",
    "blocks": "blocks of the denoiser that read image tokens",
    "vectors": "vectors that one IP-Adapter reads of an image",
    "embedding_size": "numbers of such a vector",
    "image_channels": "channels of a control image",
    "conditions": "control images that one ControlNet-Union reads",
    "types": "types of control images that a ControlNet-Union knows",
    "factors": "numbers in a row of a ControlNet's table; see `sdonnx.compose.control_network`",
    "positions": "patches of an image and its class token",
    "adapter_tokens": "tokens that one IP-Adapter makes of an image",
}
"""The meaning of each symbolic axis. Axes that a model fixes are numbers in its graphs."""


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of a served graph.

    Attributes:
        name: its name. `{}` stands for any suffix: there are as many tensors as the model needs.
        dtype: "float32", "int32", "int64", "bool", "uint8" or COMPONENT; "any" where models differ.
        shape: a number, or a key of AXES, for each axis; None where ranks differ.
        meaning: its content, in one sentence.
        condition: the models that have it; empty for all.
        overwrites: the input that may share its buffer with this output.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    meaning: str
    condition: str = ""
    overwrites: str | None = None

    def matches(self, name: str) -> bool:
        """Return whether a tensor of that name is declared here."""
        prefix, series, _ = self.name.partition("{}")
        return name.startswith(prefix) if series else name == self.name


@dataclass(frozen=True)
class GraphSpec:
    """A served graph.

    Attributes:
        name: the name of the ONNX graph.
        file: its file, next to the component's `model.onnx`.
        role: its part in the pipeline.
        component: the role of the component that has the file in its folder.
        meaning: its function, in one sentence.
        inputs: its inputs.
        outputs: its outputs.
        short_file: the file of its variant for short prompts (`sdonnx.compose.absorption`); None for no variant.
    """

    name: str
    file: str
    role: Role
    component: Role
    meaning: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    short_file: str | None = None

    def input(self, name: str) -> GraphTensor:
        """Return the input of that name; KeyError where the graph has none."""
        return _named(self.inputs, name)

    def output(self, name: str) -> GraphTensor:
        """Return the output of that name; KeyError where the graph has none."""
        return _named(self.outputs, name)


def _named(tensors: tuple[GraphTensor, ...], name: str) -> GraphTensor:
    for tensor in tensors:
        if tensor.matches(name):
            return tensor
    raise KeyError(name)


_LATENT_SHAPE = ("batch", "channels", "height", "width")
_STATE_SHAPE = ("state_rows", *_LATENT_SHAPE)
_PIXEL_SHAPE = ("batch", "image_height", "image_width", 3)
_TOKEN_SHAPE = ("batch_size", "sequence_length")

_XL = "Stable Diffusion XL"
_PIXART = "PixArt"
_PIXART_SIZES = "PixArt-alpha trained at 1024 pixels"
_IP_ADAPTER = "IP-Adapter"
_INPAINTING = "denoisers trained to inpaint"
_DISTILLED = "UNets with distilled guidance (`time_cond_proj_dim`)"

_INPUT_IDS = GraphTensor(INPUT_IDS, "int32", _TOKEN_SHAPE, "token ids")
_LAYER_INDEX = GraphTensor(
    LAYER_INDEX,
    "int64",
    ("batch_size",),
    "the row of each prompt's layer: the number of last layers to skip (diffusers' clip_skip, which does not apply to"
    " negative prompts) times the number of prompts, plus the prompt's own row",
    condition="CLIP, where the graph's layers can be identified",
)

_NOISE = GraphTensor(NOISE, "float32", _LATENT_SHAPE, "fresh noise, for samplers that add it")
_PARAMETERS = GraphTensor(PARAMETERS, "float32", (CALLS, "row"), "one row for each call (`sdonnx.samplers.plans`)")
_CONDITIONING = (
    GraphTensor(
        ENCODER_HIDDEN_STATES,
        COMPONENT,
        (*_TOKEN_SHAPE, "prompt_channels"),
        "hidden states of the prompts, unconditional prompts first",
    ),
    GraphTensor(TEXT_EMBEDS, COMPONENT, ("batch_size", "pooled_size"), "pooled prompts", condition=_XL),
    GraphTensor(
        TIME_IDS, "float32", ("batch_size", "size_count"), "original size, crop and target size", condition=_XL
    ),
    GraphTensor(CAPTION_MASK, "int32", _TOKEN_SHAPE, "1 for tokens of the caption, 0 for padding", condition=_PIXART),
    GraphTensor(
        TIMESTEP_COND,
        COMPONENT,
        ("batch_size", "guidance_size"),
        "the embedding of each image's guidance scale",
        condition=_DISTILLED,
    ),
    GraphTensor(RESOLUTION, "float32", (1, 2), "height and width in pixels", condition=_PIXART_SIZES),
    GraphTensor(ASPECT_RATIO, "float32", (1, 1), "height over width", condition=_PIXART_SIZES),
    GraphTensor(
        f"{IMAGE_EMBEDS}.{{}}",
        COMPONENT,
        ("batch_size", "image_tokens", "prompt_channels"),
        "image tokens of one IP-Adapter, by its number",
        condition=_IP_ADAPTER,
    ),
    GraphTensor(
        ADAPTER_SCALE,
        "float32",
        ("adapters", "blocks"),
        "the weight of each IP-Adapter in each block",
        condition=_IP_ADAPTER,
    ),
)
_PRECOMPUTED = GraphTensor(
    f"{PRECOMPUTED}{{}}",
    "any",
    None,
    "a step-invariant value, by its name in the denoiser's graph",
    condition="where the precompute graph exists",
)

TEXT = GraphSpec(
    "text",
    "text.onnx",
    Role.TEXT_ENCODER,
    Role.TEXT_ENCODER,
    "Token ids to hidden states.",
    (
        _INPUT_IDS,
        GraphTensor(
            ATTENTION_MASK, "int32", _TOKEN_SHAPE, "1 for tokens of the caption, 0 for padding", condition=_PIXART
        ),
        _LAYER_INDEX,
    ),
    (
        GraphTensor(
            HIDDEN_STATES,
            COMPONENT,
            (*_TOKEN_SHAPE, "hidden_size"),
            "the output of each prompt's layer through the final norm; for Stable Diffusion XL, that layer's input",
        ),
    ),
)

SECOND_TEXT = GraphSpec(
    "text_2",
    "text.onnx",
    Role.TEXT_ENCODER_2,
    Role.TEXT_ENCODER_2,
    "Token ids to the hidden states of all text encoders and the pooled prompt.",
    (
        _INPUT_IDS,
        _LAYER_INDEX,
        GraphTensor(
            POSITIONS,
            "int64",
            ("batch_size",),
            "the position of each prompt's last token among the tokens of all prompts: row * S + column",
        ),
        GraphTensor(
            IS_NONEMPTY,
            "bool",
            ("batch_size",),
            "false for prompts whose outputs are zero (diffusers' force_zeros_for_empty_prompt)",
        ),
        GraphTensor(
            FIRST_HIDDEN_STATES,
            COMPONENT,
            (*_TOKEN_SHAPE, "hidden_size"),
            "hidden states of the first text encoder",
            condition="pipelines with two text encoders",
        ),
    ),
    (
        GraphTensor(
            HIDDEN_STATES,
            COMPONENT,
            (*_TOKEN_SHAPE, "joined_hidden_size"),
            "hidden states of all text encoders, concatenated",
        ),
        GraphTensor(TEXT_EMBEDS, COMPONENT, ("batch_size", "pooled_size"), "pooled prompts"),
    ),
)

PRECOMPUTE = GraphSpec(
    "precompute",
    "precompute.onnx",
    Role.PRECOMPUTE,
    Role.DENOISER,
    "The step-invariant part of the denoiser, computed once for an image. It exists where there is such a part.",
    (
        GraphTensor(NOISE, "float32", _LATENT_SHAPE, "read for its size only", condition="where that size is needed"),
        GraphTensor(
            PARAMETERS,
            "float32",
            (CALLS, "row"),
            "one row for each call (`sdonnx.samplers.plans`)",
            condition="where the timestep's embedding is tabulated",
        ),
        *_CONDITIONING,
    ),
    (_PRECOMPUTED,),
    short_file="precompute-short.onnx",
)

STEP = GraphSpec(
    "step",
    "step.onnx",
    Role.DENOISER,
    Role.DENOISER,
    "One call of the denoiser: guidance, the denoiser, the sampler's update and the mask. Conditioning inputs that only"
    " the precompute graph reads are absent.",
    (
        GraphTensor(STATE, "float32", _STATE_SHAPE, "row 0: the latents; other rows: the sampler's history"),
        _NOISE,
        _PARAMETERS,
        GraphTensor(STEP_INDEX, "int64", (1,), "the row of this call in the parameter table"),
        _CONDITIONING[0],
        GraphTensor(
            KNOWN_LATENTS, "float32", (2, *_LATENT_SHAPE), "clean latents of the known image, and noise for them"
        ),
        GraphTensor(KEEP_MASK, "bool", _STATE_SHAPE, "true where the known latents replace the computed state"),
        GraphTensor(MASK, "float32", ("batch", 1, "height", "width"), "1 where to inpaint", condition=_INPAINTING),
        GraphTensor(
            MASKED_LATENTS, "float32", _LATENT_SHAPE, "latents of the image without that area", condition=_INPAINTING
        ),
        *_CONDITIONING[1:],
        _PRECOMPUTED,
    ),
    (
        GraphTensor(NEW_STATE, "float32", _STATE_SHAPE, "the state after this call", overwrites=STATE),
        GraphTensor(NEXT_STEP_INDEX, "int64", (1,), "the row of the next call", overwrites=STEP_INDEX),
    ),
    short_file="step-short.onnx",
)

_RESIDUAL = GraphTensor(
    f"{RESIDUAL}{{}}",
    COMPONENT,
    None,
    "a residual that is added to a skip connection or to the output of a block, by its number; channels last where the"
    " graph's convolutions are",
)
_UNION = "ControlNet-Union"

CONTROLLED_STEP = GraphSpec(
    "controlled_step",
    "step-control.onnx",
    Role.CONTROLLED_DENOISER,
    Role.DENOISER,
    "The step graph of a pipeline with ControlNets or T2I-Adapters that also adds their residuals. It reads the same"
    " weights and precomputed values as the step graph, which runs at steps without residuals.",
    (*STEP.inputs, _RESIDUAL),
    STEP.outputs,
)

_CONTROL_CONDITIONING = (
    *_CONDITIONING[:3],
    GraphTensor(CONTROL_IMAGE, COMPONENT, None, "the control images, with a copy for each prompt, 0 to 1"),
    GraphTensor(
        CONTROL_TYPES, "float32", ("batch_size", "types"), "1 for each type that is used, else 0", condition=_UNION
    ),
    GraphTensor(CONTROL_MODES, "int32", ("conditions",), "the type of each image", condition=_UNION),
    GraphTensor(CONDITION_SCALES, "float32", ("conditions",), "the weight of each image", condition=_UNION),
)

CONTROL_PRECOMPUTE = GraphSpec(
    "control_precompute",
    "control-precompute.onnx",
    Role.CONTROLNET_PRECOMPUTE,
    Role.CONTROLNET,
    "The step-invariant part of a ControlNet, computed once for an image.",
    (PRECOMPUTE.inputs[1], *_CONTROL_CONDITIONING),
    (_PRECOMPUTED,),
)

CONTROL = GraphSpec(
    "control",
    "control.onnx",
    Role.CONTROLNET,
    Role.CONTROLNET,
    "One call of a ControlNet: the residuals for the controlled step graph, in addition to those of the ControlNets"
    " before it. Conditioning inputs that only its precompute graph reads are absent.",
    (
        STEP.inputs[0],
        _PARAMETERS,
        GraphTensor(STEP_INDEX, "int64", (1,), "the row of this call in both tables"),
        GraphTensor(
            CONTROL_FACTORS,
            "float32",
            (CALLS, "factors"),
            "for each call 1 to add to the residuals before or 0 to replace them, and the weight of each residual for"
            " each copy of the images",
        ),
        *_CONTROL_CONDITIONING,
        GraphTensor(
            f"{RESIDUAL}{{}}",
            COMPONENT,
            None,
            "a residual of the ControlNets before, by its number",
            condition="every ControlNet but the first",
        ),
        _PRECOMPUTED,
    ),
    (
        GraphTensor(
            f"{NEW_RESIDUAL}{{}}", COMPONENT, None, "a residual with those before it", overwrites=f"{RESIDUAL}{{}}"
        ),
    ),
)

ADAPT = GraphSpec(
    "adapt",
    "adapt.onnx",
    Role.T2I_ADAPTER,
    Role.T2I_ADAPTER,
    "Control images to the residuals of a T2I-Adapter, once for an image.",
    (
        GraphTensor(
            CONTROL_IMAGE,
            "float32",
            ("batch_size", "image_channels", "image_height", "image_width"),
            "control images, 0 to 1",
        ),
    ),
    (GraphTensor(f"{RESIDUAL}{{}}", "float32", None, "a residual for each image, by its number, channels first"),),
)

ENCODE = GraphSpec(
    "encode",
    "encode.onnx",
    Role.IMAGE_ENCODER,
    Role.IMAGE_ENCODER,
    "Images to latents, sampled from the VAE's distribution, with and without noise.",
    (
        GraphTensor(SAMPLE, "float32", ("batch", 3, "image_height", "image_width"), "images, -1 to 1"),
        GraphTensor(POSTERIOR_NOISE, "float32", _LATENT_SHAPE, "noise that samples from the encoder's distribution"),
        GraphTensor(NOISE, "float32", _LATENT_SHAPE, "noise to mix with the latents"),
        GraphTensor(SCALES, "float32", (2,), "the weights of the latents and of `noise` in `noised`"),
    ),
    (
        GraphTensor(LATENTS, "float32", _LATENT_SHAPE, "latents, scaled for the denoiser"),
        GraphTensor(NOISED, "float32", _LATENT_SHAPE, "scales[0] * latents + scales[1] * noise"),
    ),
)

DECODE = GraphSpec(
    "decode",
    "decode.onnx",
    Role.IMAGE_DECODER,
    Role.IMAGE_DECODER,
    "Latents to pixels.",
    (
        GraphTensor(
            LATENTS,
            "float32",
            _LATENT_SHAPE,
            "final latents; the run-time binds row 0 of the step graph's state, without a copy",
        ),
    ),
    (
        GraphTensor(IMAGES, "uint8", _PIXEL_SHAPE, "round(255 * clamp(sample, 0, 1))"),
        GraphTensor(SAMPLE, "float32", _PIXEL_SHAPE, "images, 0 to 1; the decoder may exceed these bounds"),
        GraphTensor(FINITE, "bool", ("batch",), "whether an image is free of NaN and infinity"),
    ),
)

SAFETY_CHECK = GraphSpec(
    "check",
    "check.onnx",
    Role.SAFETY_CHECKER,
    Role.SAFETY_CHECKER,
    "Images to flags of the safety checker.",
    (
        GraphTensor(
            CLIP_INPUT,
            "float32",
            ("batch_size", 3, "clip_size", "clip_size"),
            "images, prepared by CLIP's image processor",
        ),
    ),
    (GraphTensor(HAS_NSFW_CONCEPTS, "bool", ("batch_size",), "whether an image shows a concept of the checker"),),
)

PROMPT = GraphSpec(
    "prompt",
    "prompt.onnx",
    Role.IMAGE_PROMPT_ENCODER,
    Role.IMAGE_PROMPT_ENCODER,
    "Images to the embeddings that IP-Adapters read.",
    (
        GraphTensor(
            PIXEL_VALUES,
            "float32",
            ("batch_size", 3, "clip_size", "clip_size"),
            "images, prepared by CLIP's image processor",
        ),
    ),
    (
        GraphTensor(
            IMAGE_EMBEDS, "float32", ("batch_size", "embedding_size"), "projected embeddings, for plain IP-Adapters"
        ),
        GraphTensor(
            PENULTIMATE_HIDDEN_STATES,
            "float32",
            ("batch_size", "positions", "embedding_size"),
            "inputs of the last layer, for IP-Adapter Plus and full-face adapters",
        ),
    ),
)

PROJECT = GraphSpec(
    "project",
    "project.onnx",
    Role.IMAGE_PROMPT_ADAPTER,
    Role.IMAGE_PROMPT_ADAPTER,
    "Embeddings of images to the tokens that the denoiser attends to.",
    (
        GraphTensor(
            f"{IMAGE_EMBEDS}.{{}}",
            "float32",
            ("images", "vectors", "embedding_size"),
            "embeddings for one IP-Adapter, by its number",
        ),
    ),
    (
        GraphTensor(
            f"{IP_HIDDEN_STATES}.{{}}",
            "float32",
            ("images", "adapter_tokens", "prompt_channels"),
            "tokens of one IP-Adapter, by its number",
        ),
    ),
)

GRAPHS: Mapping[Role, GraphSpec] = {
    spec.role: spec
    for spec in (
        TEXT,
        SECOND_TEXT,
        PRECOMPUTE,
        STEP,
        CONTROL_PRECOMPUTE,
        CONTROL,
        CONTROLLED_STEP,
        ADAPT,
        ENCODE,
        DECODE,
        SAFETY_CHECK,
        PROMPT,
        PROJECT,
    )
}
"""The served graphs by role."""

CONTROL_ROLES = frozenset(role for role, spec in GRAPHS.items() if spec.component is Role.CONTROLNET)
"""The roles of graphs that lie in the folders of ControlNets."""

DENOISER_ROLES = frozenset(role for role, spec in GRAPHS.items() if spec.component is Role.DENOISER)
"""The roles of graphs that lie in the denoiser's folder."""
