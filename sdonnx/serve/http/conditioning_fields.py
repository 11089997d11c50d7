"""Fields for images next to the prompt: ControlNets, T2I-Adapters and IP-Adapters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from sdonnx.serve.conditioning_images import MAX_CONDITIONING_IMAGES

__all__ = ["LISTED_FIELDS", "ConditioningFields", "ConditioningTexts", "Finite"]

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


class ConditioningFields(BaseModel):
    """Numbers that belong to images next to the prompt. They have the names of the pipeline's arguments."""

    controlnet_conditioning_scale: Weights | None = Field(None, description="weight of all ControlNets, or of each")
    control_guidance_start: Shares | None = Field(None, description="share of the steps at which ControlNets start")
    control_guidance_end: Shares | None = Field(None, description="share of the steps at which ControlNets end")
    guess_mode: bool | None = Field(None, description="scale residuals with depth, and apply them to the prompt only")
    control_mode: Types | None = Field(None, description="type of each image of a ControlNet-Union")
    adapter_conditioning_scale: Weights | None = Field(None, description="weight of all T2I-Adapters, or of each")
    adapter_conditioning_factor: _Share | None = Field(None, description="share of the steps with T2I-Adapters")
    ip_adapter_scale: Weights | None = Field(None, description="weight of all IP-Adapters, or of each")

    def conditioning(self) -> dict[str, Any]:
        """Return the numbers by name, a single one without its list."""
        values = {name: getattr(self, name) for name in ConditioningFields.model_fields}
        return {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()
        }


class ConditioningTexts(BaseModel):
    """Images next to the prompt in JSON: base64, or a data URL."""

    control_image: Texts | None = Field(None, description="image for each ControlNet: base64 or a data URL")
    adapter_image: Texts | None = Field(None, description="image for each T2I-Adapter: base64 or a data URL")
    ip_adapter_image: Texts | None = Field(None, description="image for each IP-Adapter: base64 or a data URL")


LISTED_FIELDS = frozenset(
    {
        "controlnet_conditioning_scale",
        "control_guidance_start",
        "control_guidance_end",
        "control_mode",
        "adapter_conditioning_scale",
        "ip_adapter_scale",
    }
)
"""Fields that a form may repeat."""
