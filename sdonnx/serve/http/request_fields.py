"""The fields of requests for images: OpenAI's, and the extensions of image servers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from sdonnx.errors import OptionError
from sdonnx.serve.http.conditioning_fields import ConditioningFields, ConditioningTexts, Finite
from sdonnx.serve.http.lora_fields import LoraFields
from sdonnx.serve.image_request import ImageRequest

__all__ = ["EditFields", "GenerationFields", "ImageFields"]

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")

Ignored = Annotated[str | None, Field(max_length=1000, description="accepted for compatibility, without effect")]


class ImageFields(ConditioningFields, LoraFields):
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


class GenerationFields(ImageFields, ConditioningTexts):
    """The body of /v1/images/generations."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EditFields(ImageFields):
    """The fields of the form of /v1/images/edits, next to its files."""

    model_config = ConfigDict(extra="forbid")

    input_fidelity: Ignored = None
    strength: Finite | None = Field(None, ge=0, le=1, description="share of the image to replace, 0 to 1")
