"""Conditioning of PixArt: captions for T5 with their masks, the resolution, and the sizes of the training images.

Source: diffusers' PixArtAlphaPipeline and PixArtSigmaPipeline (the ASPECT_RATIO tables), and PixArtImageProcessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError, PromptError
from sdonnx.models import abi
from sdonnx.models.spec import CAPTION_MASK, TEXT_MASK, Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.argument_checks import require_multiple
from sdonnx.runtime.inputs.conditioning import ArgumentGroup, Array, Conditioning, FamilyInputs
from sdonnx.runtime.inputs.image_geometry import ImageGeometry
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments, embeddings
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer
from sdonnx.runtime.inputs.text_encoding import PromptHalf, joined, require_width

__all__ = [
    "PixArtInputs",
    "closest",
]

# Height and width in 64ths of the model's size, sorted by their ratio. All models share one table; the largest one has
# further sizes.
_SIZES = (
    (32, 128), (32, 116), (36, 112), (36, 108), (36, 104), (40, 100), (40, 96), (44, 92), (44, 88), (44, 84), (48, 84),
    (48, 80), (52, 76), (52, 72), (56, 72), (56, 68), (60, 68), (60, 64), (64, 64), (64, 60), (68, 60), (68, 56),
    (72, 56), (72, 52), (76, 52), (80, 48), (84, 48), (88, 44), (92, 44), (96, 40), (100, 40), (108, 36), (128, 32),
)  # fmt: skip
_MORE = {2048: ((32, 124), (32, 120), (104, 36), (112, 36), (116, 32), (120, 32), (124, 32))}
_KNOWN = (256, 512, 1024, 2048)


def _has_table(trained: int) -> bool:
    """Return whether there is a table of sizes for models that were trained for this height and width, in pixels."""
    return trained in _KNOWN


def closest(height: int, width: int, trained: int) -> tuple[int, int]:
    """Return the training size (height, width) in pixels with the closest aspect ratio.

    Args:
        height: requested height in pixels.
        width: requested width in pixels.
        trained: height and width that the model was trained for, in pixels.

    Raises:
        OptionError: there is no table for such a model.
    """
    if not _has_table(trained):
        raise OptionError(
            f"a model for {trained} pixels has no table of sizes",
            f"one for {', '.join(map(str, _KNOWN))} pixels",
            "pass use_resolution_binning=False",
        )
    # As in diffusers' tables, ratios are rounded; ties use the first one.
    sizes = sorted((*_SIZES, *_MORE.get(trained, ())), key=lambda size: size[0] / size[1])
    best = min(sizes, key=lambda size: abs(round(size[0] / size[1], 2) - height / width))
    return best[0] * trained // 64, best[1] * trained // 64


# Captions are padded to a multiple of this. ONNX Runtime's memory-efficient attention reads masks if their rows are
# multiples of 16 bytes; other lengths (300 tokens of PixArt-Sigma) use a kernel that writes all scores to memory.
_ALIGNMENT = 8

# Lengths to which captions are cut if all tokens fit and the folder has graphs for short prompts. Few, since each
# length is captured separately.
_SHORT_LENGTHS = (32, 64)

# Accepted values of `max_sequence_length`; the maximum exceeds the length that any pipeline was trained with. The
# minimum is one token and the end token.
_MIN_LENGTH, _MAX_LENGTH = 2, 2048

# Maximum ratio of the requested size to the size that the model was trained for.
_MAX_ENLARGEMENT = 8

_MASKS = ArgumentGroup(
    {"prompt_attention_mask": None, "negative_prompt_attention_mask": None}, "a PixArt pipeline", error=PromptError
)
_CAPTIONS = ArgumentGroup({"max_sequence_length": None, "clean_caption": None}, "a PixArt pipeline", error=PromptError)
_BINNING = ArgumentGroup(
    {"use_resolution_binning": None}, "a PixArt pipeline", ignored={"use_resolution_binning": False}
)


class PixArtInputs(FamilyInputs):
    """Captions to the token ids and the mask of T5, and the image size to the denoiser's resolution inputs."""

    ARGUMENTS = (_MASKS, _CAPTIONS, _BINNING)
    EMBEDDINGS = (
        "prompt_embeds",
        "prompt_attention_mask",
        "negative_prompt_embeds",
        "negative_prompt_attention_mask",
    )
    PROMPT_TENSORS = (abi.ENCODER_HIDDEN_STATES, CAPTION_MASK)
    ENCODING_ORDER = (
        "do_classifier_free_guidance",
        "negative_prompt",
        "num_images_per_prompt",
        "device",
        "prompt_embeds",
        "negative_prompt_embeds",
        "prompt_attention_mask",
        "negative_prompt_attention_mask",
        "clean_caption",
        "max_sequence_length",
    )

    def __init__(self, graphs: GraphSet) -> None:
        super().__init__(graphs)
        self._by_length: dict[int, PromptTokenizer] = {}

    @property
    def prompt_length(self) -> int | None:
        """Length to which the family pads captions, in tokens."""
        return self.graphs.family.defaults.max_sequence_length

    @property
    def max_text_tokens(self) -> int | None:
        """None: T5 has relative positions, and accepts texts of any length."""
        return None

    def prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return token ids and masks of the captions, or embeddings with their masks."""
        return self._read(prompts, arguments, whole=False)

    def whole_prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return token ids and masks of captions that are padded to the maximum length."""
        return self._read(prompts, arguments, whole=True)

    def _read(self, prompts: PromptArguments, arguments: Mapping[str, Any], *, whole: bool) -> Conditioning:
        masks, options = _MASKS.values(arguments), _CAPTIONS.values(arguments)
        from sdonnx.runtime.inputs import captions

        length, clean = _require_length(options["max_sequence_length"]), options["clean_caption"]
        if clean:
            captions.require_packages()
        prompts.require_one_of_each({})
        for name, embeds in (("", prompts.prompt_embeds), ("negative_", prompts.negative_prompt_embeds)):
            if embeds is None and masks[f"{name}prompt_attention_mask"] is not None:
                raise PromptError(f"{name}prompt_attention_mask without {name}prompt_embeds", "both")
        if prompts.prompt_embeds is not None:
            return self._embedded(prompts, masks, clean, whole=whole)
        if prompts.prompt is not None and prompts.negative_prompt_embeds is not None:  # as in diffusers
            raise PromptError(
                "prompt and negative_prompt_embeds", "prompt_embeds with negative_prompt_embeds", "encode_prompt both"
            )
        texts = [captions.prepared(text, clean) for text in prompts.texts()]
        return self._tokenized(prompts, texts, length, whole=whole)

    def size_inputs(
        self, arguments: Mapping[str, Any], images: int, size: tuple[int, int], *, guided: bool, from_image: bool
    ) -> dict[str, Array]:
        """Return the resolution (1,2) in pixels and the aspect ratio (1,1) of all images."""
        del arguments, images, guided, from_image
        if abi.RESOLUTION not in self.graphs.conditioning_graph().inputs:
            return {}  # a transformer trained without size conditioning
        height, width = size
        return {
            abi.RESOLUTION: np.array([[height, width]], np.float32),
            abi.ASPECT_RATIO: np.array([[height / width]], np.float32),
        }

    def generated_size(
        self, arguments: Mapping[str, Any], size: tuple[int, int], *, from_image: bool
    ) -> tuple[int, int]:
        """Return the closest of the sizes that the model was trained with, unless binning is disabled.

        Images to start from are not binned: the pixels that they keep would move. By default a model without a table
        of sizes generates the requested size, where diffusers expects `use_resolution_binning=False`.
        """
        binned = _BINNING.values(arguments)["use_resolution_binning"]
        if binned and from_image:
            raise OptionError("image and use_resolution_binning", "one of them")
        default_size = ImageGeometry(self.graphs).default_size
        if not (not from_image and _has_table(default_size) if binned is None else binned):
            return size
        maximum = _MAX_ENLARGEMENT * default_size
        for name, value in zip(("height", "width"), size, strict=True):
            require_multiple(name, value, 1)
            if value > maximum:
                raise OptionError(f"{name} is {value}", f"at most {maximum}, {_MAX_ENLARGEMENT} times the model's")
        return closest(*size, default_size)

    def lengths(self, prompts: int) -> list[int]:
        """Return the prompt lengths that generation may use, in tokens, the default one last."""
        return self._lengths(prompts, _aligned(self.tokens))

    def _lengths(self, prompts: int, maximum: int) -> list[int]:
        short = [each for each in _SHORT_LENGTHS if each < maximum and self.graphs.is_short(prompts, each)]
        return [*short, maximum]

    def _length(self, mask: Array) -> int:
        """Return the length to which captions are padded or cut so that no token of the masks (G*B,S) is lost."""
        used = 1 + int(np.flatnonzero(mask.any(axis=0)).max(initial=0))
        return next(each for each in self._lengths(len(mask), _aligned(mask.shape[1])) if each >= used)

    def _tokenized(
        self, prompts: PromptArguments, texts: list[str], max_length: int | None, *, whole: bool = False
    ) -> Conditioning:
        role = Role.TEXT_ENCODER
        ids, mask = self._tokenizer(role, max_length).encode_masked(texts)
        length = mask.shape[1] if whole else self._length(mask)
        inputs = {
            f"{role.value}.{abi.INPUT_IDS}": _fitted(ids.astype(np.int32), length),
            f"{role.value}.{TEXT_MASK}": _fitted(mask.astype(np.int32), length),
            **self.typed({CAPTION_MASK: _fitted(mask, length)}),
        }
        return Conditioning(inputs, len(texts) // prompts.copies, length, (role,), prompts.clip_skip)

    def _embedded(self, prompts: PromptArguments, masks: Mapping[str, Any], clean: Any, *, whole: bool) -> Conditioning:
        """Return the conditioning by embeddings of captions, and embeddings or texts of negative ones."""
        halves = [self._half("", prompts.prompt_embeds, masks)]
        if prompts.guided and prompts.negative_prompt_embeds is not None:
            halves.insert(0, self._half("negative_", prompts.negative_prompt_embeds, masks))
        elif prompts.guided:
            count, length = halves[0].size
            arguments = prompts.half(count)
            from sdonnx.runtime.inputs import captions

            texts = [captions.prepared(text, clean) for text in arguments.texts()]
            encoded = self._tokenized(arguments, texts, length, whole=True)
            given = {CAPTION_MASK: encoded.inputs[f"{Role.TEXT_ENCODER.value}.{TEXT_MASK}"]}
            halves.insert(0, PromptHalf("negative_prompt", encoded, given))
        mask = np.concatenate([np.repeat(half.given[CAPTION_MASK], prompts.images_per_prompt, 0) for half in halves])
        length = mask.shape[1] if whole else self._length(mask)
        return joined(
            self,
            halves,
            prompts.images_per_prompt,
            lambda inputs: {name: _fitted(values, length) for name, values in inputs.items()},
            length,
        )

    def _half(self, prefix: str, values: Any, masks: Mapping[str, Any]) -> PromptHalf:
        """Return embeddings that the caller passed, with their mask."""
        name, mask_name = f"{prefix}prompt_embeds", f"{prefix}prompt_attention_mask"
        states = embeddings(values, name)
        require_width(self, states, name)
        if masks[mask_name] is None:
            raise PromptError(f"{name} without {mask_name}", "both", "pass both, or texts")
        mask = embeddings(masks[mask_name], mask_name, 2)
        _require_mask(mask, states.shape[:2], prefix)
        return PromptHalf(name, given={abi.ENCODER_HIDDEN_STATES: states, CAPTION_MASK: mask})

    def _tokenizer(self, role: Role, length: int | None) -> PromptTokenizer:
        """Return the tokenizer of a text encoder, for captions of the requested length."""
        default = self.tokenizers[role]
        if length is None or length == default.max_length:
            return default
        if length not in self._by_length:
            self._by_length[length] = default.of_length(length)
        return self._by_length[length]


def _require_length(length: Any) -> int | None:
    if length is None:
        return None
    whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
    if not (whole and _MIN_LENGTH <= length <= _MAX_LENGTH):
        raise OptionError(f"max_sequence_length is {length!r}", f"a whole number from {_MIN_LENGTH} to {_MAX_LENGTH}")
    return int(length)


def _require_mask(mask: npt.NDArray[np.float32], shape: tuple[int, ...], prefix: str) -> None:
    if mask.shape != shape:
        raise PromptError(
            f"{prefix}prompt_attention_mask of shape {mask.shape}",
            f"{shape}, as {prefix}prompt_embeds",
            "pass the mask that the tokenizer returns",
        )
    if not np.isin(mask, (0, 1)).all() or not mask.any(axis=1).all():
        raise PromptError(
            f"{prefix}prompt_attention_mask has other values than 0 and 1, or no 1",
            "1 for tokens and 0 for padding",
            "pass the mask that the tokenizer returns",
        )


def _aligned(tokens: int) -> int:
    return -(-tokens // _ALIGNMENT) * _ALIGNMENT


def _fitted(values: Array, length: int) -> Array:
    """Return captions' values (G*B,S,...) cut or padded with zeros to `length`; the mask covers the difference."""
    missing = max(length - values.shape[1], 0)
    return np.pad(values[:, :length], [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)])
