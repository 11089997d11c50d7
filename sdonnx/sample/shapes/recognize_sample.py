"""Recognize pipelines that read the captions of `shape_scenes`, and captions to try them with."""

from __future__ import annotations

from typing import Any

from sdonnx.folder.pipeline_folder import PipelineFolder, read_json
from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_scenes import VOCABULARY

__all__ = ["EXAMPLE_CAPTION", "GUIDANCE_SCALE", "default_captions", "reads_shape_captions"]

EXAMPLE_CAPTION = "a large red circle to the left of a green triangle"

GUIDANCE_SCALE = 4.0
"""The guidance scale of the accuracy in docs/results/train-shapes.json; 7.5 makes more mistakes there."""

_LONG = 8  # repetitions of the example with more than 64 tokens

# Published tokenizers, which have these words as well, have at least 32,100 tokens.
_MAX_TOKENS = max(spec.vocab_size for each in TRAINED.values() for spec in each.tokenizers.values())


def reads_shape_captions(folder: PipelineFolder) -> bool:
    """Return whether the tokenizer of a pipeline knows the words of the captions and few others.

    This holds for the trained samples, also if they are trained further, exported or optimized.

    Raises:
        FolderError: `tokenizer.json` cannot be read.
    """
    path = folder.path / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        return False
    model: Any = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or len(vocabulary) > _MAX_TOKENS:
        return False
    # A list has pairs of a token and its score.
    tokens = [each[0] if isinstance(each, list) and each else each for each in vocabulary]
    # CLIP marks the end of a word, and SentencePiece its start.
    words = {each.removesuffix("</w>").lstrip("\N{LOWER ONE EIGHTH BLOCK}") for each in tokens if isinstance(each, str)}
    return words >= set(VOCABULARY)


def default_captions(variable_length: bool) -> tuple[str, ...]:
    """Return captions to try a folder with by default, as `sdonnx.folder.prompt_file.default_prompts` does.

    Args:
        variable_length: whether the pipeline pads prompts to several lengths. If so, one of the prompts is long.
    """
    other = " ".join([EXAMPLE_CAPTION] * _LONG) if variable_length else "a small black cross inside a yellow square"
    return EXAMPLE_CAPTION, other
