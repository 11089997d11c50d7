"""Keys of adapter files: which tensor of which module of which component a key names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sdonnx.lora.module_names import COMPONENTS

__all__ = ["AdapterKey", "enclosing_modules", "format_of", "parse_key", "unsupported_method"]

# kohya's prefixes. Files for pipelines with one text encoder have lora_te_, those for two the two others.
_FLAT_PREFIXES = {
    "lora_unet_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
_DOTTED_PREFIXES = {
    **{f"{component}.": component for component in COMPONENTS},
    "model.diffusion_model.": "unet",
    "diffusion_model.": "unet",
}
_PEFT = "base_model.model."

# Tensors that are matrices of a product: `lora_A.weight`, `lora_A.default.weight`, `lora_down.weight`,
# `to_q_lora.down.weight`, `lora.down.weight`, `lora_linear_layer.down.weight`.
_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<joint>\.lora_linear_layer\.|[._]lora[._])(?P<half>A|B|up|down|mid)"
    r"(?:\.(?!weight$|bias$)[\w-]+)?(?:\.(?P<end>weight|bias))?"
)
_OTHER = re.compile(
    r"(?P<module>.+?)(?:[._]lora)?\.(?P<part>alpha|dora_scale|lora_magnitude_vector|magnitude|hada_(?:w[12]_[ab]|t[12])"
    r"|lokr_(?:w[12](?:_[ab])?|t2)|diff|diff_b|w_norm|b_norm)(?:\.[\w-]+){0,2}"
)
_PARTS = {"A": "down", "B": "up", "w_norm": "diff", "b_norm": "diff_b", "magnitude": "lora_magnitude_vector"}

# Tensors of methods that are not supported, after the module's name.
_METHODS = (
    ("BOFT", re.compile(r"boft_.*")),
    ("OFT", re.compile(r"oft_.*")),
    ("GLoRA", re.compile(r"(a|b|bm)[12](\..*)?")),
    ("IA3", re.compile(r"on_input|ia3_l(\..*)?")),
    ("VeRA", re.compile(r"vera_.*")),
)

# The attention processors of older versions of diffusers -> the modules of CLIP.
_OLD_TEXT_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
_TEXT_STARTS = ("text_model.", "text_model_", "text_projection", "encoder.layers.", "embeddings.")


@dataclass(frozen=True)
class AdapterKey:
    """What a key of an adapter file names.

    Attributes:
        component: the component, or "" if the key does not say which text encoder it is.
        module: the module's flat name.
        part: "down", "up", "mid", "up_bias", "alpha", "lora_magnitude_vector", "dora_scale", "diff", "diff_b", or a
            tensor of LoHa or LoKr, such as "hada_w1_a".
        spelling: "kohya", "peft", "diffusers" or "diffusers-old".
    """

    component: str
    module: str
    part: str
    spelling: str


def enclosing_modules(key: str) -> Iterator[AdapterKey]:
    """Yield the modules that a key of any form may belong to, the innermost first, with the rest of the key as part."""
    words = key.split(".")
    for end in range(len(words) - 1, 0, -1):
        yield _key_of(".".join(words[:end]), ".".join(words[end:]))


def unsupported_method(parts: Iterable[str]) -> str | None:
    """Return the name of a method that is not supported and has one of these tensors, or None."""
    parts = list(parts)
    return next((name for name, pattern in _METHODS if any(map(pattern.fullmatch, parts))), None)


def parse_key(key: str) -> AdapterKey | None:
    """Return what a key names, or None if it has no known form."""
    if match := _FACTOR.fullmatch(key):
        part = _PARTS.get(match["half"], match["half"])
        if match["end"] == "bias":
            if part != "up":
                return None
            part = "up_bias"
        is_old = match["half"] not in ("A", "B") and "lora_down" not in key and "lora_up" not in key
    elif match := _OTHER.fullmatch(key):
        part, is_old = _PARTS.get(match["part"], match["part"]), False
    else:
        return None
    found = _key_of(match["module"], part)
    is_old = is_old and found.spelling == "diffusers" and part != "mid"
    return replace(found, spelling="diffusers-old") if is_old else found


def _key_of(module: str, part: str) -> AdapterKey:
    component, name, spelling = _located(module)
    flat = name.replace(".processor.", ".").replace(".", "_")
    return AdapterKey(component, _renamed(component, flat), part, spelling)


def _located(module: str) -> tuple[str, str, str]:
    """Return the component, the module's name in it, and the spelling of a name."""
    for prefix, component in _FLAT_PREFIXES.items():
        if module.startswith(prefix):
            return component, module.removeprefix(prefix), "kohya"
    spelling = "diffusers"
    if module.startswith(_PEFT):
        module, spelling = module.removeprefix(_PEFT), "peft"
    found = None
    for prefix, component in _DOTTED_PREFIXES.items():
        if module.startswith(prefix):
            found, module = component, module.removeprefix(prefix)
            break
    if module.startswith(_PEFT):
        module, spelling = module.removeprefix(_PEFT), "peft"
    if found is None:
        found = "" if module.startswith(_TEXT_STARTS) else "unet"
    return found, module, spelling


def _renamed(component: str, flat: str) -> str:
    """Return the flat name of the module that an attention processor's projection stands for."""
    start, _, end = flat.rpartition("_to_")
    if component == "unet":
        return f"{flat}_0" if end == "out" else flat
    if start.endswith("self_attn") and f"to_{end}" in _OLD_TEXT_PROJECTIONS:
        return f"{start}_{_OLD_TEXT_PROJECTIONS[f'to_{end}']}"
    return flat


def format_of(keys: Iterable[AdapterKey]) -> str:
    """Return the name of a file's format: "lycoris" for other methods than LoRA with kohya's names."""
    keys = list(keys)
    spellings = {key.spelling for key in keys}
    if "kohya" in spellings:
        others = ("hada_", "lokr_", "diff", "mid")
        return "lycoris" if any(key.part.startswith(others) for key in keys) else "kohya"
    return next((each for each in ("peft", "diffusers-old", "diffusers") if each in spellings), "unknown")
