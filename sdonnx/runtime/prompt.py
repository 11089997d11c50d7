"""Prompts to token ids: `tokenizer.json` read by the tokenizers library, without transformers."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

from sdonnx.errors import FolderError, PromptError, SdonnxError
from sdonnx.folder import read_json
from sdonnx.runtime.clip_tokenizer import MERGES, VOCABULARY, clip_tokenizer

__all__ = ["PromptTokenizer", "PromptTruncatedWarning", "require_text"]

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

# Of transformers' named special tokens, the ones that CLIP and T5 have.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

# Published ones have up to 20 MB.
_LARGEST_TOKENIZER = 64 << 20

# CLIP's and T5's replace spaces, one or two of them by one character.
_LARGEST_GROWTH = 100

# transformers writes 10**30 where a tokenizer has no limit; no text encoder takes a thousandth of this.
_NO_LIMIT = 10**6


class PromptTruncatedWarning(UserWarning):
    """A prompt is longer than the text encoder takes, and its end was cut away."""


@dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a pipeline folder.

    Attributes:
        tokenizer: the tokenizers library's, set to cut at `max_length` and not to pad.
        max_length: how many tokens the text encoder takes, with the special ones.
        pad_token_id: what fills a prompt up.
    """

    tokenizer: Tokenizer
    max_length: int
    pad_token_id: int

    @classmethod
    def from_folder(cls, path: Path, length: int | None = None) -> PromptTokenizer:
        """Read a pipeline's `tokenizer` folder.

        Args:
            path: the folder.
            length: to how many tokens prompts are filled up or cut; None for what the folder says.

        Raises:
            FolderError: `tokenizer.json` (or `vocab.json` and `merges.txt`) or `tokenizer_config.json` is missing,
                broken or incomplete.
        """
        older = not (path / TOKENIZER).exists() and (path / VOCABULARY).is_file() and (path / MERGES).is_file()
        tokenizer = None if older else _read_tokenizer(path / TOKENIZER)
        config = _special_tokens_config(path)
        names = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
        tokenizer = tokenizer or clip_tokenizer(path, names)
        max_length = config.get("model_max_length") if length is None else length
        specials = tokenizer.num_special_tokens_to_add(is_pair=False)
        if not isinstance(max_length, int) or not specials < max_length < _NO_LIMIT:
            raise FolderError(
                f"{path / TOKENIZER_CONFIG} has model_max_length = {max_length!r}",
                f"the number of tokens that the text encoder takes, more than {specials}",
                "export the pipeline again",
            )
        pad_token_id = tokenizer.token_to_id(names.get("pad_token", ""))
        if pad_token_id is None:
            raise FolderError(
                f"{path} has pad_token = {names.get('pad_token')!r}",
                f"a token of {TOKENIZER}",
                "export the pipeline again",
            )
        # As transformers: "!" as the pad token is also a token of its own wherever it stands in a prompt.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [name for name in dict.fromkeys(names.values()) if name not in added]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length)
        return cls(tokenizer, max_length, pad_token_id)

    def of_length(self, length: int) -> PromptTokenizer:
        """Return the tokenizer for prompts of another length."""
        other = Tokenizer.from_str(self.tokenizer.to_str())
        other.enable_truncation(length)
        return PromptTokenizer(other, length, self.pad_token_id)

    def encode(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Return the token ids of `encode_masked`."""
        return self.encode_masked(prompts)[0]

    def encode_masked(self, prompts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the prompts' token ids, (B, max_length), each with its special tokens, padded on the right.

        Beside them, of the same shape, 1 for each token and 0 for padding.

        Warns:
            PromptTruncatedWarning: a prompt was cut; the warning holds the part that is gone.

        Raises:
            PromptError: there are no prompts, or one is no text.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or len(prompts) == 0:
            raise PromptError(f"prompts are {prompts!r}", "a list of one prompt or more", "give a prompt")
        ids = np.full((len(prompts), self.max_length), self.pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for row, present, prompt in zip(ids, mask, prompts, strict=True):
            text = require_text(prompt)
            with _told(f"a prompt of {len(text)} characters", PromptError, "one that the folder's tokenizer can read"):
                encoding = self.tokenizer.encode(text)
            row[: len(encoding.ids)] = encoding.ids
            present[: len(encoding.ids)] = 1
            if encoding.overflowing:
                cut = prompt[_first_character(encoding.overflowing[0]) :].strip()
                message = f"the text encoder takes {self.max_length} tokens; this end of a prompt was cut: {cut}"
                warnings.warn(PromptTruncatedWarning(message), stacklevel=3)
        return ids, mask


def _read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file that may be anything.

    Its expressions end by themselves: Oniguruma gives up a match after ten million steps back.
    """
    if not path.is_file():
        raise FolderError(f"{path} is missing", "the tokenizer of an exported pipeline", "export it again")
    if (size := path.stat().st_size) > _LARGEST_TOKENIZER:
        raise FolderError(f"{path} has {size} bytes", f"{_LARGEST_TOKENIZER} at most", "export the pipeline again")
    with _told(str(path), FolderError, "a file of the tokenizers library"):
        tokenizer = Tokenizer.from_file(str(path))
        growth = 1 if tokenizer.normalizer is None else _growth(json.loads(tokenizer.normalizer.__getstate__()))
    if growth > _LARGEST_GROWTH:
        raise FolderError(
            f"{path} makes a prompt {growth:.1e} times as long before it is read",
            f"{_LARGEST_GROWTH} times at most",
            "export the pipeline again",
        )
    return tokenizer


def _growth(normalizer: Any) -> int:
    """Return how many times as long a text can get by the replacements of a normalizer, one after another."""
    if isinstance(normalizer, list):
        return math.prod(map(_growth, normalizer))
    if not isinstance(normalizer, dict):
        return 1
    # What replaces the empty text, or an expression that matches it, stands between all characters.
    own = 1 + len(str(normalizer.get("content") or normalizer.get("prepend") or "").encode("utf-8", "replace"))
    return own * _growth(normalizer.get("normalizers"))


@contextlib.contextmanager
def _told(what: str, error: type[SdonnxError], expected: str) -> Iterator[None]:
    """Make an error of ours of whatever the tokenizers library raises; a panic of Rust is no Exception."""
    try:
        yield
    except (SdonnxError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as failure:
        raise error(f"{what} cannot be read ({failure})", expected, "export the pipeline again") from failure


def _special_tokens_config(path: Path) -> Mapping[str, Any]:
    """Return `tokenizer_config.json`, in older folders with `special_tokens_map.json` over it.

    Source: `PreTrainedTokenizerBase._from_pretrained` of transformers, which tells older folders by the
    absence of "added_tokens_decoder".
    """
    config = read_json(path / TOKENIZER_CONFIG)
    special = path / SPECIAL_TOKENS_MAP
    if "added_tokens_decoder" in config or not special.is_file():
        return config
    return {**config, **read_json(special)}


def _content(token: Any) -> str:
    """Return a special token's text; transformers writes it alone or with its flags."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def require_text(prompt: object) -> str:
    """Return the prompt; PromptError where it is no text, or none that can be written down."""
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is {prompt!r}", "text", "give every prompt as text")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise PromptError(
            f"a prompt is {prompt!r}", "text without half characters (lone surrogates)", "correct the prompt"
        ) from None
    return prompt


def _first_character(encoding: Encoding) -> int:
    """Return where in the prompt an encoding's own text begins."""
    return next(
        start for (start, _), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True) if not special
    )
