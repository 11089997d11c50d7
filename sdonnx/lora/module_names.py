"""Names of modules, as diffusers and transformers spell them, from the spellings of adapter files.

Every spelling is compared in its flat form, in which dots are underscores: kohya's files have only that one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

__all__ = ["COMPONENTS", "ModuleNames", "is_original_block"]

COMPONENTS = ("unet", "text_encoder", "text_encoder_2")
"""Components that adapters change."""

# transformers 5 removed this prefix from CLIPTextModel; files have it, and CLIPTextModelWithProjection too.
_TEXT_MODEL = "text_model_"

_FIRST_WORDS = {
    "unet": (
        "add_embedding", "class_embedding", "conv_in", "conv_norm_out", "conv_out", "down_blocks", "mid_block",
        "time_embedding", "up_blocks",
    ),
    "text_encoder": ("text_model", "text_projection"),
}  # fmt: skip
_WORDS = {
    "unet": (
        "attentions", "attn1", "attn2", "cond_proj", "conv", "conv1", "conv2", "conv_shortcut", "downsamplers", "ff",
        "linear_1", "linear_2", "net", "norm", "norm1", "norm2", "norm3", "proj", "proj_in", "proj_out", "resnets",
        "time_emb_proj", "to_k", "to_out", "to_q", "to_v", "transformer_blocks", "upsamplers", r"\d{1,3}",
    ),
    "text_encoder": (
        "embeddings", "encoder", "fc1", "fc2", "final_layer_norm", "k_proj", "layer_norm1", "layer_norm2", "layers",
        "mlp", "out_proj", "position_embedding", "q_proj", "self_attn", "token_embedding", "v_proj", r"\d{1,3}",
    ),
}  # fmt: skip

# The original repositories number the layers of all blocks together. A block of the published UNets has two layers,
# and a sampler as its third one; up blocks have three layers.
_LAYERS_PER_BLOCK = 2
_ORIGINAL_BLOCK = re.compile(r"(input|output)_blocks_(\d{1,3})_([012])_(.+)|middle_block_([012])_(.+)")
_ORIGINAL_TOPS = {
    "input_blocks_0_0": "conv_in",
    "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
    "out_0": "conv_norm_out",
    "out_2": "conv_out",
    "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2",
}
_ORIGINAL_RESNET = {
    "emb_layers_1": "time_emb_proj",
    "in_layers_0": "norm1",
    "in_layers_2": "conv1",
    "out_layers_0": "norm2",
    "out_layers_3": "conv2",
    "skip_connection": "conv_shortcut",
}


def _pattern(first: Iterable[str], words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of flat names that tries the longest words first."""
    word = "|".join(sorted(words, key=len, reverse=True))
    return re.compile(rf"(?:{'|'.join(sorted(first, key=len, reverse=True))})(?:_(?:{word}))*+")


_FLAT = {kind: _pattern(_FIRST_WORDS[kind], _WORDS[kind]) for kind in _WORDS}
_WORD = {
    kind: re.compile("|".join(sorted((*_FIRST_WORDS[kind], *_WORDS[kind]), key=len, reverse=True))) for kind in _WORDS
}


class ModuleNames:
    """Names of the modules that adapters can change.

    Args:
        names: names of the weights in the state dict of each component. By default, names of any depth and width that
            Stable Diffusion's architectures can have.
    """

    def __init__(self, names: Mapping[str, Collection[str]] | None = None) -> None:
        self._known: dict[str, dict[str, str]] | None = None
        self._layers_per_block = _LAYERS_PER_BLOCK
        if names is not None:
            self._known = {part: {name.replace(".", "_"): name for name in each} for part, each in names.items()}
            first = (re.match(r"down_blocks\.0\.resnets\.(\d+)\.", name) for name in names.get("unet", ()))
            self._layers_per_block = len({match[1] for match in first if match}) or _LAYERS_PER_BLOCK

    def weight_name(self, component: str, flat: str, parameter: str = "weight") -> str | None:
        """Return the name of a parameter in the component's state dict, or None if it has none.

        Args:
            component: one of `COMPONENTS`.
            flat: the flat name of a module, also as in the original repositories.
            parameter: "weight" or "bias".
        """
        for spelling in self._spellings(component, flat):
            if self._known is None:
                if (dotted := _dotted(component, spelling)) is not None:
                    return f"{dotted}.{parameter}"
            elif (name := self._known.get(component, {}).get(f"{spelling}_{parameter}")) is not None:
                return name
        return None

    def _spellings(self, component: str, flat: str) -> Iterable[str]:
        """Yield the flat names of diffusers and transformers that a flat name may stand for."""
        if component == "unet":
            yield _from_original(flat, self._layers_per_block + 1) or flat
        else:
            bare = flat.removeprefix(_TEXT_MODEL)
            yield from (f"{_TEXT_MODEL}{bare}", bare)


def is_original_block(flat: str) -> bool:
    """Return whether a flat name names a UNet's block in the original repositories."""
    return flat not in _ORIGINAL_TOPS and _ORIGINAL_BLOCK.fullmatch(flat) is not None


def _dotted(component: str, flat: str) -> str | None:
    """Return a name with dots between its words, or None if these architectures have no such module."""
    kind = "unet" if component == "unet" else "text_encoder"
    if _FLAT[kind].fullmatch(flat) is None:
        return None
    return ".".join(_WORD[kind].findall(flat))  # the whole name consists of words


def _from_original(flat: str, per_block: int) -> str | None:
    """Return diffusers' flat name for one of the original repositories, or None for another name.

    Args:
        flat: the name.
        per_block: entries of a block in the original numbering.
    """
    if flat in _ORIGINAL_TOPS:
        return _ORIGINAL_TOPS[flat]
    match = _ORIGINAL_BLOCK.fullmatch(flat)
    if match is None:
        return None
    if match[5]:
        number, rest = int(match[5]), match[6]
        place = "mid_block_attentions_0" if number == 1 else f"mid_block_resnets_{number // 2}"
        return f"{place}_{_ORIGINAL_RESNET.get(rest, rest)}"
    side, number, part, rest = match[1], int(match[2]), int(match[3]), match[4]
    # The first input block is conv_in.
    block, layer = divmod(number - 1 if side == "input" else number, per_block)
    place = f"{'down' if side == 'input' else 'up'}_blocks_{block}"
    if rest == "op":
        return f"{place}_downsamplers_0_conv"
    if rest == "conv" and part > 0:
        return f"{place}_upsamplers_0_conv"
    if part == 0:
        return f"{place}_resnets_{layer}_{_ORIGINAL_RESNET.get(rest, rest)}"
    return f"{place}_attentions_{layer}_{rest}"
