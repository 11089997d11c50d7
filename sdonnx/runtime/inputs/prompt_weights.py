r"""Weights in prompts, in the notation of AUTOMATIC1111's web UI: `(word)`, `(word:1.3)`, `[word]` and `\(`.

The text becomes chunks of tokens with a weight each, so that a prompt may be longer than the text encoder accepts.
Source: `parse_prompt_attention` in modules/prompt_parser.py and `tokenize_line` in modules/sd_hijack_clip.py of
stable-diffusion-webui.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sdonnx.errors import PromptError
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer

__all__ = ["NOTATIONS", "Chunk", "arrays", "chunks", "weighted_parts"]

NOTATIONS = ("a1111",)
"""Values of `prompt_weighting`."""

# The factor of a pair of brackets without a number.
_STEP = 1.1

# Ends a chunk, as a part of its own.
_BREAK = "BREAK"

_PIECES = re.compile(r"\\[()\[\]\\]|\\|[(\[)\]]|:\s*(?P<weight>[+-]?[.\d]+)\s*\)|:|[^\\()\[\]:]+")
_BREAKS = re.compile(rf"\s*\b{_BREAK}\b\s*")

# Notations of the web UI that change the prompt from step to step, combine prompts or load weights.
_UNSUPPORTED = {
    "prompt editing": re.compile(r"(?<!\\)\[[^\[\]]*:\s*[+-]?[.\d]+\s*\]"),
    "alternating words": re.compile(r"(?<!\\)\[[^\[\]]*\|[^\[\]]*\]"),
    "AND": re.compile(r"\bAND\b"),
    "an extra network": re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>"),
}

# If a chunk is full, up to this number of tokens behind the last comma move to the next chunk; the web UI's default.
_COMMA_BACKTRACK = 20

# A prompt of more tokens than 32 * 75 is likely an accident, and each chunk costs memory and time at every step.
_MAX_CHUNKS = 32


def weighted_parts(text: str) -> list[tuple[str, float]]:
    """Return the parts of a prompt with their weights; the part "BREAK" with weight -1 ends a chunk.

    Raises:
        PromptError: the notation is not supported, or a weight is not a number.
    """
    for name, pattern in _UNSUPPORTED.items():
        if found := pattern.search(text):
            raise PromptError(
                f"{name} in the prompt ({found.group()[:60]!r})", "weights of words only", "leave it out, or escape it"
            )
    parts: list[list[str | float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}
    factors = {"(": _STEP, "[": 1 / _STEP}

    def scale(start: int, factor: float) -> None:
        for part in parts[start:]:
            part[1] = float(part[1]) * factor

    for piece in _PIECES.finditer(text):
        token, weight = piece.group(), piece.group("weight")
        if token in opened:
            opened[token].append(len(parts))
        elif weight is not None and opened["("]:
            scale(opened["("].pop(), _number(weight))
        elif token == ")" and opened["("]:
            scale(opened["("].pop(), factors["("])
        elif token == "]" and opened["["]:
            scale(opened["["].pop(), factors["["])
        elif token.startswith("\\"):
            parts.append([token[1:], 1.0])
        else:
            for number, words in enumerate(_BREAKS.split(token)):
                parts += [[_BREAK, -1.0]] if number else []
                parts.append([words, 1.0])
    for bracket, starts in opened.items():  # brackets that are not closed reach to the end
        for start in starts:
            scale(start, factors[bracket])
    return _merged([(str(words), float(weight)) for words, weight in parts] or [("", 1.0)])


def _merged(parts: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Join neighbors of one weight, which are then encoded as one text."""
    merged = parts[:1]
    for words, weight in parts[1:]:
        if weight == merged[-1][1]:
            merged[-1] = (merged[-1][0] + words, weight)
        else:
            merged.append((words, weight))
    return merged


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PromptError(f"the weight {text!r} in the prompt", "a number", "write for example (word:1.3)") from None


@dataclass
class Chunk:
    """Tokens of one run of the text encoder, without special tokens.

    Attributes:
        ids: token ids.
        weights: weight of each token.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def split(self, start: int) -> Chunk:
        """Remove the tokens from `start` on, and return them."""
        rest = Chunk(self.ids[start:], self.weights[start:])
        del self.ids[start:], self.weights[start:]
        return rest


def chunks(tokenizer: PromptTokenizer, text: str) -> list[Chunk]:
    """Return the chunks of a prompt, at least one.

    A chunk that is full ends behind its last comma if that is near.

    Raises:
        PromptError: the prompt cannot be read, or it is far too long.
    """
    size = tokenizer.max_length - len(tokenizer.special_ids)
    comma = tokenizer.tokenizer.token_to_id(",</w>")
    made = [Chunk()]
    last_comma = -1
    for words, weight in weighted_parts(text):
        if (words, weight) == (_BREAK, -1.0):
            made.append(Chunk())
            last_comma = -1
            continue
        for number in tokenizer.plain_ids(words):
            chunk = made[-1]
            if number == comma:
                last_comma = len(chunk.ids)
            if len(chunk.ids) == size:
                near = number != comma and last_comma >= 0 and size - last_comma <= _COMMA_BACKTRACK
                made.append(chunk.split(last_comma + 1) if near else Chunk())
                last_comma = -1
            made[-1].ids.append(number)
            made[-1].weights.append(weight)
            if len(made) > _MAX_CHUNKS:
                raise PromptError(f"a prompt of more than {_MAX_CHUNKS * size} tokens", "a shorter one")
    if len(made) > 1 and not made[-1].ids:
        made.pop()
    return made


def arrays(
    tokenizer: PromptTokenizer, prompts: list[list[Chunk]], count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return token ids and weights of prompts, (count*B,S) each: the first chunk of all prompts, then the second, ...

    Special tokens and padding have weight 1. Prompts of fewer chunks are continued with empty ones.
    """
    start, end = tokenizer.special_ids
    ids = np.full((count * len(prompts), tokenizer.max_length), tokenizer.pad_token_id, np.int32)
    weights = np.ones(ids.shape, np.float32)
    for row, number in enumerate(np.ndindex(count, len(prompts))):
        chunk = prompts[number[1]][number[0]] if number[0] < len(prompts[number[1]]) else Chunk()
        used = 1 + len(chunk.ids)
        ids[row, : used + 1] = [start, *chunk.ids, end]
        weights[row, 1:used] = chunk.weights
    return ids, weights
