"""The fields of requests for images: OpenAI's, and the extensions of image servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from sdonnx.errors import OptionError
from sdonnx.runtime.inputs.conditioning_images import (
    CONDITIONING_ARGUMENTS,
    MAX_CONDITIONING_IMAGES,
    ConditioningArgument,
    single_values,
)
from sdonnx.serve.image_request import ImageRequest
from sdonnx.serve.served_loras import MAX_LORA_WEIGHT, MAX_LORAS

__all__ = [
    "LISTED_FIELDS",
    "LORAS",
    "EditFields",
    "Finite",
    "GenerationFields",
    "ImageFields",
    "LoraFields",
    "is_lora_field",
    "read_lora_form",
]

_MAX = 1e6

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _listed(value: Any) -> Any:
    """Return one value as a list, so that messages name the value and not the alternatives of a union."""
    return value if isinstance(value, list) or value is None else [value]


def _one_or_list(kind: dict[str, Any]) -> list[Any]:
    array = {"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_CONDITIONING_IMAGES}
    schema = {"anyOf": [kind, array]}
    return [
        Field(min_length=1, max_length=MAX_CONDITIONING_IMAGES),
        BeforeValidator(_listed),
        WithJsonSchema(schema),
    ]


_Weight = Annotated[float, Field(allow_inf_nan=False, ge=-_MAX, le=_MAX)]
_Share = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
_Type = Annotated[int, Field(ge=0, le=1000)]
Weights = Annotated[list[_Weight], *_one_or_list({"type": "number", "minimum": -_MAX, "maximum": _MAX})]
Shares = Annotated[list[_Share], *_one_or_list({"type": "number", "minimum": 0, "maximum": 1})]
Types = Annotated[list[_Type], *_one_or_list({"type": "integer", "minimum": 0, "maximum": 1000})]
Texts = Annotated[list[str], *_one_or_list({"type": "string"})]


_KINDS = {"images": Texts, "weights": Weights, "shares": Shares, "types": Types, "share": _Share, "flag": bool}


def _fields(arguments: Iterable[ConditioningArgument], note: str = "") -> Any:
    """Return a model with fields for arguments of the pipeline. mypy does not know its fields."""
    given: dict[str, Any] = {
        each.name: (_KINDS[each.kind] | None, Field(None, description=each.help + note)) for each in arguments
    }
    return create_model("Conditioning", **given)


_IMAGES = [each for each in CONDITIONING_ARGUMENTS if each.kind == "images"]
_NUMBERS = [each for each in CONDITIONING_ARGUMENTS if each.kind != "images"]

LISTED_FIELDS = {each.name for each in _NUMBERS if each.kind not in ("share", "flag")}
"""Fields that a form may repeat."""


LORAS = "loras"

_MAX_LORA_NAME = 255  # characters of a file's name


def _no_boolean(value: Any) -> Any:
    """Return None, which is no number, for a boolean, which would be read as 0 or 1."""
    return None if isinstance(value, bool) else value


_LoraName = Annotated[str, Field(min_length=1, max_length=_MAX_LORA_NAME)]
_LoraWeight = Annotated[
    float, Field(allow_inf_nan=False, ge=-MAX_LORA_WEIGHT, le=MAX_LORA_WEIGHT), BeforeValidator(_no_boolean)
]


class LoraFields(BaseModel):
    """LoRAs of a request."""

    loras: dict[_LoraName, _LoraWeight] | None = Field(
        None, max_length=MAX_LORAS, description="weights of LoRAs by the names that /v1/loras lists"
    )


def is_lora_field(name: str) -> bool:
    """Return whether a part of a form is `loras` or `loras[NAME]`."""
    return name == LORAS or (name.startswith(f"{LORAS}[") and name.endswith("]"))


def read_lora_form(parts: Sequence[tuple[str, str]]) -> Any:
    """Return the value of the field, which pydantic checks.

    Args:
        parts: names and texts of a form: one with JSON, or one `loras[NAME]` for each LoRA, as OpenAI's client sends a
            mapping.
    """
    if len(parts) == 1 and parts[0][0] == LORAS:
        try:
            return json.loads(parts[0][1])
        except (ValueError, RecursionError):
            return parts[0][1]
    names = [name[len(LORAS) + 1 : -1] for name, _ in parts]
    if LORAS in (name for name, _ in parts) or len(set(names)) < len(names):
        return [text for _, text in parts]  # no mapping, which is refused
    return dict(zip(names, (text for _, text in parts), strict=True))


_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")

Ignored = Annotated[str | None, Field(max_length=1000, description="accepted for compatibility, without effect")]


class ImageFields(_fields(_NUMBERS), LoraFields):  # type: ignore[misc]
    """Fields of every request for images. A new one is added here, and passed on by `to_request`."""

    prompt: str = Field(max_length=32_000, description="description of the image")
    model: str | None = Field(None, max_length=200, description="name of a model of /v1/models; by default the first")
    n: int | None = Field(None, ge=1, le=1000, description="number of images; by default 1")
    size: str | None = Field(
        None,
        max_length=20,
        description="WIDTHxHEIGHT in pixels, or auto: that of the image, or the model's own",
        # `height_and_width` checks it with a clearer message.
        json_schema_extra={"pattern": f"^(auto|{_SIZE.pattern})$"},
    )
    response_format: Literal["b64_json"] | None = Field(None, description="images are always part of the response")
    output_format: Literal["png", "jpeg", "webp"] | None = Field(None, description="by default png")
    output_compression: int | None = Field(None, ge=0, le=100, description="quality of jpeg and webp; by default 95")
    background: Literal["auto", "opaque"] | None = Field(None, description="images have no transparency")
    stream: bool | None = Field(None, description="answer with server-sent events")
    partial_images: int | None = Field(None, ge=0, le=3, description="previews of each image, with stream")
    quality: Ignored = None
    style: Ignored = None
    moderation: Ignored = None
    user: Ignored = None
    negative_prompt: str | None = Field(None, max_length=32_000, description="content to avoid")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="seed of the first image; the next images have the next seeds"
    )
    num_inference_steps: int | None = Field(None, ge=1, le=100_000, description="denoising steps")
    guidance_scale: Finite | None = Field(None, ge=-1e6, le=1e6, description="weight of the prompt")
    scheduler: str | None = Field(None, max_length=100, description="euler, dpmsolver++, DPM++ 2M Karras, ...")
    stream_progress: bool | None = Field(None, description="with stream, also an event after each step")

    def height_and_width(self) -> tuple[int, int] | None:
        """Return the size in pixels; None for the default.

        Raises:
            OptionError: it is not WIDTHxHEIGHT.
        """
        if self.size in (None, "auto"):
            return None
        match = _SIZE.fullmatch(self.size or "")
        if match is None or 0 in (sizes := (int(match[2]), int(match[1]))):
            raise OptionError(f"size is {self.size!r}", "WIDTHxHEIGHT such as 512x512, or auto")
        return sizes

    def conditioning(self) -> dict[str, Any]:
        """Return the numbers that belong to images next to the prompt by name, a single one without its list."""
        return single_values({each.name: getattr(self, each.name) for each in _NUMBERS})

    def to_request(self) -> ImageRequest:
        """Return the request, without images.

        Raises:
            OptionError: the size cannot be used.
        """
        height, width = self.height_and_width() or (None, None)
        return ImageRequest(
            prompt=self.prompt,
            model=self.model,
            negative_prompt=self.negative_prompt,
            height=height,
            width=width,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            scheduler=self.scheduler,
            num_images=1 if self.n is None else self.n,
            seed=self.seed,
            num_previews=(self.partial_images or 0) if self.stream else 0,
            loras=self.loras,
            **self.conditioning(),
        )


class GenerationFields(ImageFields, _fields(_IMAGES, ": base64 or a data URL")):  # type: ignore[misc]
    """The body of /v1/images/generations."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EditFields(ImageFields):
    """The fields of the form of /v1/images/edits, next to its files."""

    model_config = ConfigDict(extra="forbid")

    input_fidelity: Ignored = None
    strength: Finite | None = Field(None, ge=0, le=1, description="share of the image to replace, 0 to 1")
