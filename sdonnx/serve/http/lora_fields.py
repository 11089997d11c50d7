"""The field for LoRAs, in JSON and in forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from sdonnx.serve.served_loras import MAX_LORA_WEIGHT, MAX_LORAS

__all__ = ["FIELD", "LoraFields", "is_lora_field", "read_lora_form"]

FIELD = "loras"

_MAX_NAME = 255  # characters of a file's name


def _no_boolean(value: Any) -> Any:
    """Return None, which is no number, for a boolean, which would be read as 0 or 1."""
    return None if isinstance(value, bool) else value


_Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
_Weight = Annotated[
    float, Field(allow_inf_nan=False, ge=-MAX_LORA_WEIGHT, le=MAX_LORA_WEIGHT), BeforeValidator(_no_boolean)
]


class LoraFields(BaseModel):
    """LoRAs of a request."""

    loras: dict[_Name, _Weight] | None = Field(
        None, max_length=MAX_LORAS, description="weights of LoRAs by the names that /v1/loras lists"
    )


def is_lora_field(name: str) -> bool:
    """Return whether a part of a form is `loras` or `loras[NAME]`."""
    return name == FIELD or (name.startswith(f"{FIELD}[") and name.endswith("]"))


def read_lora_form(parts: Sequence[tuple[str, str]]) -> Any:
    """Return the value of the field, which pydantic checks.

    Args:
        parts: names and texts of a form: one with JSON, or one `loras[NAME]` for each LoRA, as OpenAI's client sends a
            mapping.
    """
    if len(parts) == 1 and parts[0][0] == FIELD:
        try:
            return json.loads(parts[0][1])
        except (ValueError, RecursionError):
            return parts[0][1]
    names = [name[len(FIELD) + 1 : -1] for name, _ in parts]
    if FIELD in (name for name, _ in parts) or len(set(names)) < len(names):
        return [text for _, text in parts]  # no mapping, which is refused
    return dict(zip(names, (text for _, text in parts), strict=True))
