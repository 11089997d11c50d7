"""Names of tensors in original checkpoints, and the parameters of diffusers and transformers that they are.

The original layouts come from github.com/CompVis/latent-diffusion (UNet, autoencoder), github.com/Stability-AI/
generative-models (Stable Diffusion XL), github.com/openai/CLIP and github.com/mlfoundations/open_clip (text encoders).
Most tensors are renamed. OpenCLIP's `in_proj_weight` is split into query, key and value, its `text_projection` is
transposed, and the 1x1 convolutions of the autoencoder's attention are linear layers in diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Shape", "Source", "Sources", "clip_sources", "open_clip_sources", "unet_sources", "vae_sources"]

Shape = tuple[int, ...]

_N = r"(\d{1,3})"  # no number of a layer is longer


@dataclass(frozen=True)
class Source:
    """Where a parameter is in a file.

    Attributes:
        key: Key of the tensor.
        shape: Shape of the parameter. The tensor has the same elements, in this order.
        rows: Rows of the tensor that are the parameter; None for all.
        transposed: Whether the parameter is the transpose of the tensor.
    """

    key: str
    shape: Shape
    rows: slice | None = None
    transposed: bool = False


Sources = dict[str, Source]
"""Where each parameter is in a file, by its name."""

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}

_VAE_MIDDLE = {"block_1": "resnets.0", "attn_1": "attentions.0", "block_2": "resnets.1"}
_VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
# Names of the same layers in autoencoders saved by older versions of diffusers.
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# Layers of training: the discriminator and perceptual loss, and the running average.
_VAE_UNUSED = re.compile(r"(loss|model_ema)\..*")

_OPEN_CLIP = {
    "positional_embedding": "embeddings.position_embedding.weight",
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_OPEN_CLIP_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def unet_sources(shapes: Mapping[str, Shape]) -> tuple[Sources, list[str]]:
    """Return where each of a UNet's parameters is, and the keys that belong to none.

    Args:
        shapes: Shapes of the UNet's tensors, by key without the prefix `model.diffusion_model.`.
    """
    # A block is `layers` pairs of ResNet and attention, and in all but the last one a layer that halves the size.
    layers = next(
        (n - 1 for n in range(1, len(shapes) + 1) if f"input_blocks.{n}.0.op.weight" in shapes),
        sum(f"input_blocks.{n}.0.in_layers.2.weight" in shapes for n in range(1, len(shapes) + 1)),
    )

    def rename(key: str) -> str | None:
        layer, _, end = key.rpartition(".")
        if layer in _UNET:
            return f"{_UNET[layer]}.{end}"
        if found := re.fullmatch(rf"middle_block\.([012])\.(.+)\.{_END}", key):
            return f"mid_block.{_MIDDLE[found[1]]}.{_in_resnet(found[2])}.{found[3]}"
        if not (found := re.fullmatch(rf"(input|output)_blocks\.{_N}\.([012])\.(.+)\.{_END}", key)):
            return None
        side, number, part, name, end = found.groups()
        block, layer_in_block = divmod(int(number) - (side == "input"), layers + 1)
        where = f"{'down' if side == 'input' else 'up'}_blocks.{block}"
        if name == "op":
            return f"{where}.downsamplers.0.conv.{end}"
        if name == "conv":  # the second part of a block without attention, else the third
            return f"{where}.upsamplers.0.conv.{end}"
        kind = "resnets" if part == "0" else "attentions"
        return f"{where}.{kind}.{layer_in_block}.{_in_resnet(name)}.{end}"

    return _renamed(shapes, rename)


def vae_sources(shapes: Mapping[str, Shape]) -> tuple[Sources, list[str]]:
    """Return where each of an autoencoder's parameters is, and the keys that belong to none.

    Args:
        shapes: Shapes of its tensors in the original or diffusers' layout, by key without the checkpoint's prefix.
    """
    levels = {found[1] for key in shapes if (found := re.match(rf"decoder\.up\.{_N}\.", key))}

    def rename(key: str) -> str | None:
        if _IN_DIFFUSERS.match(key):
            layer, _, end = key.rpartition(".")
            before, _, name = layer.rpartition(".")
            return f"{before}.{_OLD_ATTENTION[name]}.{end}" if name in _OLD_ATTENTION else key
        if re.fullmatch(rf"((en|de)coder\.conv_(in|out)|(post_)?quant_conv)\.{_END}", key):
            return key
        if found := re.fullmatch(rf"(encoder|decoder)\.norm_out\.{_END}", key):
            return f"{found[1]}.conv_norm_out.{found[2]}"
        if found := re.fullmatch(rf"(encoder|decoder)\.mid\.(block_1|attn_1|block_2)\.(\w+)\.{_END}", key):
            coder, part, name, end = found.groups()
            name = _VAE_ATTENTION.get(name, name) if part == "attn_1" else _shortcut(name)
            return f"{coder}.mid_block.{_VAE_MIDDLE[part]}.{name}.{end}"
        if not (found := re.fullmatch(rf"(encoder\.down|decoder\.up)\.{_N}\.(.+)\.{_END}", key)):
            return None
        side, number, name, end = found.groups()
        # The decoder's blocks are numbered from the largest image, in diffusers from the smallest.
        block = int(number) if side == "encoder.down" else len(levels) - 1 - int(number)
        if name in ("downsample.conv", "upsample.conv"):
            return f"{side}_blocks.{block}.{name.replace('sample', 'samplers.0')}.{end}"
        if not (resnet := re.fullmatch(rf"block\.{_N}\.(\w+)", name)):
            return None
        return f"{side}_blocks.{block}.resnets.{resnet[1]}.{_shortcut(resnet[2])}.{end}"

    sources, unknown = _renamed(shapes, rename)
    for name, source in sources.items():
        if re.search(r"\.attentions\.\d+\.to_\w+(\.0)?\.weight$", name) and source.shape[2:] in ((1,), (1, 1)):
            sources[name] = Source(source.key, source.shape[:2])
    return sources, [key for key in unknown if not _VAE_UNUSED.fullmatch(key)]


def clip_sources(shapes: Mapping[str, Shape]) -> Sources:
    """Return where each of a CLIP text encoder's parameters is.

    Args:
        shapes: Shapes of its tensors in transformers' layout, by key.
    """
    return {key.removeprefix("text_model."): Source(key, shape) for key, shape in shapes.items()}


def open_clip_sources(shapes: Mapping[str, Shape]) -> Sources:
    """Return where each of an OpenCLIP text encoder's parameters is; other tensors, as for its loss, are omitted.

    Args:
        shapes: Shapes of its tensors, by key without the checkpoint's prefix.
    """
    sources: Sources = {new: Source(old, shapes[old]) for old, new in _OPEN_CLIP.items() if old in shapes}
    if len(shape := shapes.get("text_projection", ())) == 2:
        sources["text_projection.weight"] = Source("text_projection", shape[::-1], transposed=True)
    for key, shape in shapes.items():
        if not (found := re.fullmatch(rf"transformer\.resblocks\.{_N}\.(.+)", key)):
            continue
        layer, name = f"encoder.layers.{found[1]}", found[2]
        if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
            size = shape[0] // 3 if shape and shape[0] % 3 == 0 else 0  # no parameter has the shape of 0 rows
            for part, projection in enumerate("qkv"):
                rows = slice(part * size, (part + 1) * size)
                new = f"{layer}.self_attn.{projection}_proj.{name.rpartition('_')[2]}"
                sources[new] = Source(key, (size, *shape[1:]), rows)
        elif (module := name.rpartition("."))[0] in _OPEN_CLIP_LAYER:
            sources[f"{layer}.{_OPEN_CLIP_LAYER[module[0]]}.{module[2]}"] = Source(key, shape)
    return sources


_END = "(weight|bias)"
_IN_DIFFUSERS = re.compile(
    r"(encoder\.down_blocks|decoder\.up_blocks|(en|de)coder\.mid_block|(en|de)coder\.conv_norm_out)\."
)


def _in_resnet(name: str) -> str:
    return _RESNET.get(name, name)


def _shortcut(name: str) -> str:
    return "conv_shortcut" if name == "nin_shortcut" else name


def _renamed(shapes: Mapping[str, Shape], rename: Callable[[str], str | None]) -> tuple[Sources, list[str]]:
    """Return the sources of renamed tensors, and the keys that are not renamed."""
    names = {key: rename(key) for key in shapes}
    sources = {name: Source(key, shapes[key]) for key, name in names.items() if name is not None}
    return sources, [key for key, name in names.items() if name is None]
