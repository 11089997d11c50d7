"""Conditioning of Stable Diffusion XL: two text encoders, pooled text and image sizes (arXiv:2307.01952)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sdonnx.errors import FolderError, OptionError, PromptError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.argument_checks import require_number
from sdonnx.runtime.inputs.conditioning import ArgumentGroup, Array, Conditioning
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments, embeddings, negative_list
from sdonnx.runtime.inputs.stable_diffusion_inputs import WEIGHTING, ClipInputs, layer_index
from sdonnx.runtime.inputs.text_encoding import PromptHalf, joined, require_width

__all__ = ["SizeConditions", "StableDiffusionXlInputs"]

# transformers' CLIPTextTransformer: configurations written before the end token's id was corrected have eos_token_id
# 2, and the position of the largest id is used instead.
_LEGACY_END_ID = 2

_PIPELINE = "a Stable Diffusion XL pipeline"
_SECOND_TEXTS = ArgumentGroup({"prompt_2": None, "negative_prompt_2": None}, _PIPELINE, error=PromptError)
_POOLED = ArgumentGroup(
    {"pooled_prompt_embeds": None, "negative_pooled_prompt_embeds": None}, _PIPELINE, error=PromptError
)
_SIZES = ArgumentGroup(
    {
        "original_size": None,
        "crops_coords_top_left": (0, 0),
        "target_size": None,
        "negative_original_size": None,
        "negative_crops_coords_top_left": (0, 0),
        "negative_target_size": None,
        "aesthetic_score": 6.0,
        "negative_aesthetic_score": 2.5,
    },
    _PIPELINE,
)

_MAX_SIZE = 10**6  # pixels; float16 ends at 65504, and no image is larger


@dataclass(frozen=True)
class SizeConditions:
    """Size and crop conditioning (arXiv:2307.01952, section 2.2): (height, width) or (top, left) in pixels.

    Attributes:
        original_size: size of the training image before it was resized; None for the image size.
        crops_coords_top_left: top left corner of the crop.
        target_size: size of the training image after resizing; None for the image size.
        negative_original_size: `original_size` of the negative prompt; None for `original_size`.
        negative_crops_coords_top_left: `crops_coords_top_left` of the negative prompt.
        negative_target_size: `target_size` of the negative prompt; None for `target_size`.
        aesthetic_score: score of the image, read by the refiner instead of the target size.
        negative_aesthetic_score: `aesthetic_score` of the negative prompt.
    """

    original_size: Sequence[int] | None = None
    crops_coords_top_left: Sequence[int] = (0, 0)
    target_size: Sequence[int] | None = None
    negative_original_size: Sequence[int] | None = None
    negative_crops_coords_top_left: Sequence[int] = (0, 0)
    negative_target_size: Sequence[int] | None = None
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5

    def time_ids(self, height: int, width: int, *, scored: bool, from_image: bool) -> tuple[list[float], list[float]]:
        """Return the values of `time_ids` for the prompt and for the negative prompt.

        Source: `_get_add_time_ids` of diffusers' StableDiffusionXLPipeline and, with `from_image`, of
        StableDiffusionXLImg2ImgPipeline.

        Args:
            height: height of the image in pixels.
            width: width of the image in pixels.
            scored: whether the denoiser reads an aesthetic score (the refiner).
            from_image: whether generation starts from an image.

        Raises:
            OptionError: a size is not a pair of whole numbers, or a score is not a number.
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
            values = _numbers(original, crops, (self.aesthetic_score,))
            return values, _numbers(other_original, other_crops, (self.negative_aesthetic_score,))
        values = _numbers(original, crops, target)
        if from_image:
            return values, _numbers(other_original, crops, other_target)
        if self.negative_original_size is None or self.negative_target_size is None:
            return values, values
        return values, _numbers(other_original, other_crops, other_target)


class StableDiffusionXlInputs(ClipInputs):
    """Prompts and sizes to the inputs of one or two CLIP text encoders and of the denoiser.

    Raises:
        FolderError: as in the base class, or `time_ids` of the denoiser contradicts `requires_aesthetics_score`.
    """

    ARGUMENTS = (_SECOND_TEXTS, _POOLED, _SIZES, WEIGHTING)
    EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    PROMPT_TENSORS = (abi.ENCODER_HIDDEN_STATES, abi.TEXT_EMBEDS)
    STEP_TENSORS: ClassVar[Mapping[str, str]] = {
        "prompt_embeds": abi.ENCODER_HIDDEN_STATES,
        "add_text_embeds": abi.TEXT_EMBEDS,
        "add_time_ids": abi.TIME_IDS,
    }
    ENCODING_ORDER = (
        "prompt_2",
        "device",
        "num_images_per_prompt",
        "do_classifier_free_guidance",
        "negative_prompt",
        "negative_prompt_2",
        *EMBEDDINGS,
        "lora_scale",
        "clip_skip",
    )

    def __init__(self, graphs: GraphSet) -> None:
        super().__init__(graphs)
        index = graphs.folder.index
        self._scored = bool(index.get("requires_aesthetics_score", False))
        self._zeroes_empty = bool(index.get("force_zeros_for_empty_prompt", False))
        found, known = graphs.conditioning_graph().shape(abi.TIME_IDS)[1], 5 if self._scored else 6
        if found != known:
            raise FolderError(
                f"the denoiser of {graphs.folder.path} reads {found} time_ids",
                f"{known}, as requires_aesthetics_score is {self._scored} in model_index.json",
                "correct model_index.json, or optimize the whole pipeline again",
            )

    def prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return token ids for each text encoder, or embeddings with their pooled output."""
        seconds, pooled = _SECOND_TEXTS.values(arguments), _POOLED.values(arguments)
        prompt_2, negative_prompt_2 = (text or None for text in seconds.values())
        prompts.require_one_of_each({"prompt_2": prompt_2, "negative_prompt_2": negative_prompt_2})
        weighting = WEIGHTING.values(arguments)["prompt_weighting"]
        if prompts.is_text and all(values is None for values in pooled.values()):
            return self.encoded_texts(prompts, self._texts(prompts, prompt_2, negative_prompt_2), weighting)
        halves = [self._half("prompt", prompts.prompt_embeds, pooled, prompts.half, prompt_2, weighting)]
        if prompts.guided:
            halves.insert(0, self._negative_half(prompts, pooled, negative_prompt_2, weighting, halves[0]))
        if all(half.encoded is None for half in halves):
            WEIGHTING.refuse(arguments)
        return joined(self, halves, prompts.images_per_prompt)

    def _negative_half(
        self, prompts: PromptArguments, pooled: Mapping[str, Any], second: Any, weighting: Any, own: PromptHalf
    ) -> PromptHalf:
        """Return the negative prompts of embeddings, or of texts next to embeddings."""
        values, name = prompts.negative_prompt_embeds, "negative_prompt"
        if values is None and prompts.negative_prompt is None and self._zeroes_empty:
            (count, tokens), graph = own.size, self.graphs.conditioning_graph()
            shapes = {
                abi.ENCODER_HIDDEN_STATES: (count, tokens, graph.shape(abi.ENCODER_HIDDEN_STATES)[2]),
                abi.TEXT_EMBEDS: (count, graph.shape(abi.TEXT_EMBEDS)[1]),
            }
            zeros = {each: np.zeros([int(size) for size in shape], np.float32) for each, shape in shapes.items()}
            return PromptHalf(name, given=zeros)
        count, length = own.size
        texts = None if second is None else negative_list(second, count)
        return self._half(name, values, pooled, lambda: prompts.half(count), texts, weighting, length)

    def _half(
        self,
        name: str,
        values: Any,
        pooled: Mapping[str, Any],
        texts: Callable[[], PromptArguments],
        second: Any,
        weighting: Any,
        length: int | None = None,
    ) -> PromptHalf:
        """Return one half of the batch, by embeddings or else by texts; pooled output of the caller comes first."""
        pooled_name = f"{name.replace('prompt', 'pooled_prompt')}_embeds"
        pooled_values = pooled[pooled_name]
        if values is None:
            arguments = texts()
            half = PromptHalf(
                name, self.encoded_texts(arguments, self._texts(arguments, second, None), weighting, length)
            )
        else:
            states = embeddings(values, f"{name}_embeds")
            require_width(self, states, f"{name}_embeds")
            if pooled_values is None:
                raise PromptError(f"{name}_embeds without {pooled_name}", "both", "pass both, or texts")
            half = PromptHalf(f"{name}_embeds", given={abi.ENCODER_HIDDEN_STATES: states})
        if pooled_values is None:
            return half
        array = embeddings(pooled_values, pooled_name, 2)
        expected = (half.size[0], self.graphs.conditioning_graph().shape(abi.TEXT_EMBEDS)[1])
        if array.shape != expected:
            raise PromptError(
                f"{pooled_name} of shape {array.shape}", f"{expected}", "use the text encoder of this pipeline"
            )
        return replace(half, given={**half.given, abi.TEXT_EMBEDS: array})

    def size_inputs(
        self, arguments: Mapping[str, Any], images: int, size: tuple[int, int], *, guided: bool, from_image: bool
    ) -> dict[str, Array]:
        """Return `time_ids` (G*B,6), or (G*B,5) with an aesthetic score; see `SizeConditions`."""
        sizes = SizeConditions(**_SIZES.values(arguments))
        own, negative = sizes.time_ids(*size, scored=self._scored, from_image=from_image)
        rows = [negative] * images * guided + [own] * images
        return {abi.TIME_IDS: np.array(rows, np.float32)}

    def encoder_inputs(
        self, ids: Mapping[Role, npt.NDArray[np.int32]], skipped: npt.NDArray[np.int64], nonempty: npt.NDArray[np.bool_]
    ) -> dict[str, Array]:
        """Return token ids and layers, and for the second text encoder the last tokens and the empty prompts."""
        inputs: dict[str, Array] = {}
        for role, numbers in ids.items():
            inputs[f"{role.value}.{abi.INPUT_IDS}"] = numbers
            inputs[f"{role.value}.{abi.LAYER_INDEX}"] = layer_index(skipped)
            if role is Role.TEXT_ENCODER_2:
                starts = np.arange(len(numbers), dtype=np.int64) * numbers.shape[1]
                inputs[f"{role.value}.{abi.POSITIONS}"] = starts + self._last_tokens(role, numbers)
                inputs[f"{role.value}.{abi.IS_NONEMPTY}"] = nonempty if self._zeroes_empty else np.ones_like(nonempty)
        return inputs

    def _texts(self, prompts: PromptArguments, prompt_2: Any, negative_prompt_2: Any) -> dict[Role, list[str]]:
        """Return the texts of the batch (G*B) for each text encoder."""
        texts = seconds = prompts.texts()
        if prompt_2 is not None or negative_prompt_2 is not None:
            if len(self.tokenizers) < 2:
                raise PromptError("prompt_2 or negative_prompt_2", "a pipeline of two text encoders")
            seconds = prompts.texts(prompt_2, negative_prompt_2)
        return {role: texts if role is Role.TEXT_ENCODER else seconds for role in self.tokenizers}

    def _last_tokens(self, role: Role, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the position of each prompt's end token, as transformers' CLIPTextModel finds it."""
        end = self.graphs.config(role).get("eos_token_id", _LEGACY_END_ID)
        found = ids if end == _LEGACY_END_ID else ids == end
        columns: npt.NDArray[np.int64] = found.argmax(axis=1).astype(np.int64)
        return columns


def _numbers(*parts: Sequence[float]) -> list[float]:
    return [float(number) for part in parts for number in part]


def _pair(name: str, value: Any, default: tuple[int, int]) -> tuple[int, int]:
    if value is None:
        return default
    numbers = list(value) if isinstance(value, list | tuple | np.ndarray) else []
    if len(numbers) != 2 or any(
        isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number <= _MAX_SIZE
        for number in numbers
    ):
        expected = f"two whole numbers from 0 to {_MAX_SIZE}"
        raise OptionError(f"{name} is {value!r}", expected, "pass for example (1024, 1024)")
    return int(numbers[0]), int(numbers[1])
