"""What the denoiser is told of an image: its prompts and, of Stable Diffusion XL and PixArt-alpha, its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import FolderError, OptionError, PromptError
from sdonnx.families import CAPTION_MASK, TEXT_MASK, Role
from sdonnx.runtime import captions
from sdonnx.runtime.graphs import GraphSet
from sdonnx.runtime.prompt import PromptTokenizer
from sdonnx.runtime.request import Prompts, Wording, require_number

__all__ = ["Conditioner", "Conditions", "SizeConditions"]

# transformers' CLIPTextTransformer: a configuration of before the id of the token was right says 2, and the last token
# is then the one of the largest id.
_LARGEST_ID = 2

# Captions are filled up to a multiple of this. ONNX Runtime's memory-efficient attention reads a mask whose rows are
# multiples of 16 bytes; for others (300 tokens of PixArt-Sigma) there is a kernel that writes all scores to memory.
_ALIGNED = 8


# Captions are cut to one of these where all tokens fit, if graphs for short prompts are there. Few: each is captured
# on its own.
_SHORT_LENGTHS = (32, 64)


@dataclass(frozen=True)
class Conditions:
    """What is put into buffers before an image, by their names, and what runs on it.

    Attributes:
        inputs: (G*B, ...) each, those to draw away from first.
        encoders: the text encoders to run; none where embeddings are given.
        tokens: how long the prompts are.
        skips: the most layers that are left out of one.
    """

    inputs: dict[str, npt.NDArray[Any]]
    encoders: tuple[Role, ...]
    tokens: int
    skips: int = 0


@dataclass(frozen=True)
class SizeConditions:
    """What Stable Diffusion XL is told beside the prompt (arXiv:2307.01952, section 2.2), as (height, width) or (y, x).

    Attributes:
        original_size: of the image before it was scaled; None for that of the image.
        crops_coords_top_left: where it was cut out.
        target_size: what it was scaled to; None for that of the image.
        negative_original_size: likewise for what is drawn away from; None for as the others.
        negative_crops_coords_top_left: likewise.
        negative_target_size: likewise.
        aesthetic_score: of the refiner, which knows it in place of the target size.
        negative_aesthetic_score: likewise.
    """

    original_size: Sequence[int] | None = None
    crops_coords_top_left: Sequence[int] = (0, 0)
    target_size: Sequence[int] | None = None
    negative_original_size: Sequence[int] | None = None
    negative_crops_coords_top_left: Sequence[int] = (0, 0)
    negative_target_size: Sequence[int] | None = None
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5

    def given(self) -> list[str]:
        """Return the names of what is not as it is by default."""
        usual = SizeConditions()
        pairs = {each.name: (getattr(self, each.name), getattr(usual, each.name)) for each in dataclasses.fields(self)}
        return [name for name, (own, other) in pairs.items() if own is not other and not np.array_equal(own, other)]

    def time_ids(self, height: int, width: int, *, scored: bool, from_image: bool) -> tuple[list[float], list[float]]:
        """Return the numbers for the prompt and for what is drawn away from.

        They are those of diffusers' `_get_add_time_ids`: of StableDiffusionXLPipeline, and `from_image` of
        StableDiffusionXLImg2ImgPipeline.

        Args:
            height: of the image, in pixels.
            width: likewise.
            scored: whether the denoiser knows an aesthetic score.
            from_image: whether an image is started from.

        Raises:
            OptionError: a size is no pair of whole numbers, or a score no number.
        """
        size = (height, width)
        original = _pair("original_size", self.original_size, size)
        target = _pair("target_size", self.target_size, size)
        crops = _pair("crops_coords_top_left", self.crops_coords_top_left, (0, 0))
        other_original = _pair("negative_original_size", self.negative_original_size, original)
        other_target = _pair("negative_target_size", self.negative_target_size, target)
        other_crops = _pair("negative_crops_coords_top_left", self.negative_crops_coords_top_left, (0, 0))
        if scored:
            for name in ("aesthetic_score", "negative_aesthetic_score"):
                require_number(name, getattr(self, name))
            told = _numbers(original, crops, (self.aesthetic_score,))
            return told, _numbers(other_original, other_crops, (self.negative_aesthetic_score,))
        told = _numbers(original, crops, target)
        if from_image:
            return told, _numbers(other_original, crops, other_target)
        if self.negative_original_size is None or self.negative_target_size is None:
            return told, told
        return told, _numbers(other_original, other_crops, other_target)


def _numbers(*parts: Sequence[float]) -> list[float]:
    return [float(number) for part in parts for number in part]


def _pair(name: str, given: Any, default: tuple[int, int]) -> tuple[int, int]:
    if given is None:
        return default
    numbers = list(given) if isinstance(given, list | tuple | np.ndarray) else []
    if len(numbers) != 2 or any(
        isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0 for number in numbers
    ):
        raise OptionError(f"{name} is {given!r}", "two whole numbers from 0 on", "pass for example (1024, 1024)")
    return int(numbers[0]), int(numbers[1])


@dataclass
class Conditioner:
    """Turns prompts and sizes into what the graphs take.

    Args:
        graphs: the graphs.

    Attributes:
        tokenizers: one for each text encoder.

    Raises:
        FolderError: a tokenizer cannot be read, or the denoiser knows other sizes than the pipeline says.
    """

    graphs: GraphSet
    tokenizers: dict[Role, PromptTokenizer] = field(init=False)
    _scored: bool = field(init=False)

    def __post_init__(self) -> None:
        """Read the tokenizers."""
        folder, family = self.graphs.folder, self.graphs.family
        self.tokenizers = {
            spec.role: PromptTokenizer.from_folder(folder.component(spec.extra[0]), family.caption_tokens)
            for spec in family.text_encoders
            if spec.extra is not None
        }
        self._scored = bool(folder.index.get("requires_aesthetics_score", False))
        self._zeroes = bool(folder.index.get("force_zeros_for_empty_prompt", False))
        self._reads_captions = family.caption_tokens is not None
        self._of_length: dict[int, PromptTokenizer] = {}
        lengths = {tokenizer.max_length for tokenizer in self.tokenizers.values()}
        if len(lengths) != 1:
            raise FolderError(
                f"the tokenizers of {folder.path} take {sorted(lengths)} tokens", "the same number", "copy it again"
            )
        self.tokens = lengths.pop()
        sizes, known = self._sizes, 5 if self._scored else 6
        if sizes not in (None, known):
            raise FolderError(
                f"the denoiser of {folder.path} takes {sizes} time_ids",
                f"{known}, as requires_aesthetics_score is {self._scored} in model_index.json",
                "correct model_index.json, or optimize the whole pipeline again",
            )

    @property
    def _sizes(self) -> int | None:
        """How many numbers the denoiser takes beside the prompt; None for none."""
        told = self.graphs.told()
        return int(told.shape("time_ids")[1]) if "time_ids" in told.inputs else None

    @property
    def is_pooled(self) -> bool:
        """Whether the denoiser is told the whole prompt in one vector too."""
        return "text_embeds" in self.graphs.told().inputs

    def lengths(self, prompts: int) -> list[int]:
        """Return to how many tokens prompts may be filled up, if nothing else is asked for; the last is the usual one.

        Args:
            prompts: how many there are, those to draw away from included.
        """
        return self._lengths(prompts, self._filled(self.tokens))

    def _lengths(self, prompts: int, most: int) -> list[int]:
        return [*(tokens for tokens in _SHORT_LENGTHS if tokens < most and self.graphs.is_short(prompts, tokens)), most]

    def _length(self, mask: npt.NDArray[Any]) -> int:
        """Return to how many tokens captions are filled up or cut: behind that, the masks (G*B,S) have none."""
        used = 1 + int(np.flatnonzero(mask.any(axis=0)).max(initial=0))
        return next(each for each in self._lengths(len(mask), self._filled(mask.shape[1])) if each >= used)

    def _filled(self, tokens: int) -> int:
        return -(-tokens // _ALIGNED) * _ALIGNED if self._reads_captions else tokens

    def require(self, wording: Wording, prompts: Prompts, sizes: SizeConditions) -> None:
        """Raise for what this pipeline has no use for, or lacks.

        Raises:
            PromptError: prompts or embeddings do not suit the text encoders.
            OptionError: sizes that nothing reads, or a clip_skip beyond the layers.
        """
        if not self._reads_captions and (given := wording.of_captions()):
            raise PromptError(f"{', '.join(given)} given", "a pipeline that reads captions", "leave them out")
        if prompts.clean:
            captions.prepared("", clean=True)
        if self._sizes is None and (given := sizes.given()):
            raise OptionError(f"{', '.join(given)} given", "a pipeline that is told sizes", "leave them out")
        if prompts.seconds is not None and len(self.tokenizers) < 2:
            raise PromptError("prompt_2 or negative_prompt_2", "a pipeline of two text encoders", "leave them out")
        if prompts.texts is None:
            self._require_embeddings(prompts)
            return
        for role in self.tokenizers:
            layers = self.graphs.config(role).get("num_hidden_layers")
            if isinstance(layers, int) and prompts.skips.max() >= layers:
                raise OptionError(
                    f"clip_skip is {prompts.skips.max()}",
                    f"less than the text encoder's {layers} layers",
                    "leave out fewer",
                )

    def _require_embeddings(self, prompts: Prompts) -> None:
        assert prompts.embeddings is not None
        graph = self.graphs.told()
        width = graph.shape("encoder_hidden_states")[2]
        if prompts.embeddings.shape[2] != width:
            raise OptionError(
                f"prompt_embeds of width {prompts.embeddings.shape[2]}", f"{width}", "use this pipeline's encoder"
            )
        if self._reads_captions and prompts.mask is None:
            raise PromptError("prompt_embeds without prompt_attention_mask", "both", "pass both, or texts")
        if not self.is_pooled:
            if prompts.pooled is not None:
                raise PromptError("pooled_prompt_embeds", "a pipeline that is told them", "leave them out")
            return
        if prompts.pooled is None:
            raise PromptError("prompt_embeds without pooled_prompt_embeds", "both", "pass both, or texts")
        wanted = (len(prompts.embeddings), graph.shape("text_embeds")[1])
        if prompts.pooled.shape != wanted:
            raise PromptError(
                f"pooled_prompt_embeds of shape {prompts.pooled.shape}", f"{wanted}", "use this pipeline's encoder"
            )

    def conditions(
        self, prompts: Prompts, sizes: SizeConditions, height: int, width: int, *, guided: bool, from_image: bool
    ) -> Conditions:
        """Return what is put into buffers.

        Args:
            prompts: what `require` accepted.
            sizes: likewise.
            height: of the images, in pixels.
            width: likewise.
            guided: whether there is something to draw away from.
            from_image: whether an image is started from.
        """
        inputs: dict[str, npt.NDArray[Any]] = {}
        graph = self.graphs.told()
        if self._sizes is not None:
            told, other = sizes.time_ids(height, width, scored=self._scored, from_image=from_image)
            rows = [other] * prompts.count * guided + [told] * prompts.count
            inputs["time_ids"] = np.array(rows, np.float32)
        if "resolution" in graph.inputs:
            inputs["resolution"] = np.array([[height, width]], np.float32)
            inputs["aspect_ratio"] = np.array([[height / width]], np.float32)
        if prompts.texts is None:
            assert prompts.embeddings is not None
            inputs["encoder_hidden_states"] = prompts.embeddings.astype(graph.dtype("encoder_hidden_states"))
            if prompts.pooled is not None:
                inputs["text_embeds"] = prompts.pooled.astype(graph.dtype("text_embeds"))
            length = prompts.embeddings.shape[1]
            if prompts.mask is not None:
                length = self._length(prompts.mask)
                inputs[CAPTION_MASK] = _fitted(prompts.mask.astype(graph.dtype(CAPTION_MASK)), length)
            inputs["encoder_hidden_states"] = _fitted(inputs["encoder_hidden_states"], length)
            return Conditions(inputs, (), length)
        if self._reads_captions:
            texts = [captions.prepared(text, prompts.clean) for text in prompts.texts]
            captioned, mask = self._tokenizer(Role.TEXT_ENCODER, prompts).encode_masked(texts)
            length = self._length(mask)
            inputs[f"{Role.TEXT_ENCODER.value}.input_ids"] = _fitted(captioned.astype(np.int32), length)
            inputs[f"{Role.TEXT_ENCODER.value}.{TEXT_MASK}"] = _fitted(mask.astype(np.int32), length)
            inputs[CAPTION_MASK] = _fitted(mask.astype(graph.dtype(CAPTION_MASK)), length)
            return Conditions(inputs, tuple(self.tokenizers), length, int(prompts.skips.max()))
        for role, tokenizer in self.tokenizers.items():
            texts = prompts.texts if role is Role.TEXT_ENCODER or prompts.seconds is None else prompts.seconds
            ids = tokenizer.encode(texts).astype(np.int32)
            inputs[f"{role.value}.input_ids"] = ids
            indices = np.arange(len(ids), dtype=np.int64)
            inputs[f"{role.value}.layers"] = prompts.skips * len(ids) + indices
            if role is Role.TEXT_ENCODER_2:
                columns = self._last_tokens(role, ids)
                inputs[f"{role.value}.positions"] = indices * ids.shape[1] + columns
                inputs[f"{role.value}.given"] = prompts.given if self._zeroes else np.ones(len(ids), np.bool_)
        return Conditions(inputs, tuple(self.tokenizers), self.tokens, int(prompts.skips.max()))

    def _tokenizer(self, role: Role, prompts: Prompts) -> PromptTokenizer:
        """Return the tokenizer of a text encoder, for prompts of the length that is asked for."""
        own = self.tokenizers[role]
        if prompts.length in (None, own.max_length):
            return own
        if prompts.length not in self._of_length:
            self._of_length[prompts.length] = own.of_length(prompts.length)
        return self._of_length[prompts.length]

    def _last_tokens(self, role: Role, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return where each prompt ends, as transformers' CLIPTextModel looks for it."""
        end = self.graphs.config(role).get("eos_token_id", _LARGEST_ID)
        found = ids if end == _LARGEST_ID else ids == end
        columns: npt.NDArray[np.int64] = found.argmax(axis=1).astype(np.int64)
        return columns


def _fitted(values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return values (G*B,S,...) of captions, cut or with zeros behind them; what is cut or added is masked."""
    missing = max(length - values.shape[1], 0)
    return np.pad(values[:, :length], [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)])
