"""Prompts to token ids with the tokenizers library, without transformers.

CLIP's tokenizer is also read from `vocab.json` and `merges.txt`, which transformers up to version 4 and diffusers'
conversion script write instead of `tokenizer.json`.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from sdonnx.errors import FolderError, OptionError, PromptError, SdonnxError
from sdonnx.folder.pipeline_folder import read_json
from sdonnx.runtime.interface.component_handles import FrozenConfig

__all__ = ["MERGES", "VOCABULARY", "PromptTokenizer", "PromptTruncatedWarning", "require_text"]

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

# Named special tokens of transformers that CLIP and T5 have.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

# In bytes; published tokenizers have up to 20 MB.
_MAX_TOKENIZER_SIZE = 64 << 20

# Maximum growth of a text by its normalizer. Normalizers of CLIP and T5 replace one or two spaces by one character.
_MAX_GROWTH = 100

# transformers writes 10**30 for a tokenizer without a limit; text encoders accept less than a thousandth of this.
_NO_LIMIT = 10**6

_SHOWN = 80  # characters of a prompt in a warning


class PromptTruncatedWarning(UserWarning):
    """A prompt is longer than the text encoder accepts, and was truncated."""


@dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a pipeline folder.

    Attributes:
        tokenizer: tokenizer of the tokenizers library, which truncates at `max_length` and does not pad.
        max_length: length of prompts in tokens, including special tokens.
        pad_token_id: token with which prompts are padded.
        multi_vector: tokens of textual inversions with several vectors; see `textual_inversion.multi_vector_tokens`.
    """

    tokenizer: Tokenizer
    max_length: int
    pad_token_id: int
    multi_vector: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, path: Path, length: int | None = None) -> PromptTokenizer:
        """Read a pipeline's `tokenizer` folder.

        Args:
            path: the folder.
            length: length to which prompts are padded or truncated; None for the folder's `model_max_length`.

        Raises:
            FolderError: `tokenizer.json` (or `vocab.json` and `merges.txt`) or `tokenizer_config.json` is missing,
                broken or incomplete.
        """
        from sdonnx.runtime.inputs import textual_inversion

        older = not (path / TOKENIZER).exists() and (path / VOCABULARY).is_file() and (path / MERGES).is_file()
        tokenizer = None if older else _read_tokenizer(path / TOKENIZER)
        config = _special_tokens_config(path)
        names = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
        if tokenizer is None:
            tokenizer = _clip_tokenizer(path, names)
            textual_inversion.add_listed_tokens(tokenizer, path, config)
        max_length = config.get("model_max_length") if length is None else length
        specials = tokenizer.num_special_tokens_to_add(is_pair=False)
        if not isinstance(max_length, int) or not specials < max_length < _NO_LIMIT:
            raise FolderError(
                f"{path / TOKENIZER_CONFIG} has model_max_length = {max_length!r}",
                f"the maximum number of tokens of the text encoder, more than {specials}",
                "export the pipeline again",
            )
        pad_token_id = tokenizer.token_to_id(names.get("pad_token", ""))
        if pad_token_id is None:
            raise FolderError(
                f"{path} has pad_token = {names.get('pad_token')!r}",
                f"a token of {TOKENIZER}",
                "export the pipeline again",
            )
        # As in transformers, a pad token such as "!" is also a token of its own inside a prompt.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [name for name in dict.fromkeys(names.values()) if name not in added]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length)
        return cls(tokenizer, max_length, pad_token_id, textual_inversion.multi_vector_tokens(tokenizer))

    def of_length(self, length: int) -> PromptTokenizer:
        """Return the tokenizer for prompts of another length."""
        other = Tokenizer.from_str(self.tokenizer.to_str())
        other.enable_truncation(length)
        return replace(self, tokenizer=other, max_length=length)

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Special tokens of every prompt: for CLIP, the start token and the end token."""
        return tuple(self.tokenizer.encode("").ids)

    @property
    def model_max_length(self) -> int:
        """The name of `max_length` in transformers."""
        return self.max_length

    @cached_property
    def _of_any_length(self) -> PromptTokenizer:
        return self.of_length(_NO_LIMIT)

    def __call__(self, text: str | Sequence[str], **options: Any) -> FrozenConfig:
        """Return the `input_ids` and the `attention_mask` of a text of any length or of several, as transformers does.

        Args:
            text: a text, or a list of texts.
            **options: `add_special_tokens`, by default True. Padding, truncation and tensors are not supported.

        Raises:
            OptionError: there is another option.
            PromptError: it is not text.
        """
        special = options.pop("add_special_tokens", True)
        if options:
            raise OptionError(
                f"the option {next(iter(options))} of the tokenizer",
                "only add_special_tokens",
                "leave it out, or load the folder's tokenizer with transformers' AutoTokenizer",
            )
        whole = self._of_any_length
        rows = [
            whole._encode(require_text(each), special=bool(special))[1].ids
            for each in ([text] if isinstance(text, str) else text)
        ]
        masks = [[1] * len(ids) for ids in rows]
        found = (rows[0], masks[0]) if isinstance(text, str) else (rows, masks)
        return FrozenConfig({"input_ids": found[0], "attention_mask": found[1]})

    def plain_ids(self, text: str) -> list[int]:
        """Return the token ids of a text of any length, without special tokens.

        Raises:
            PromptError: the text cannot be encoded.
        """
        _, encoding = self._encode(require_text(text), special=False)
        return [number for part in (encoding, *encoding.overflowing) for number in part.ids]

    def encode(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        """Return the token ids of `encode_masked`."""
        return self.encode_masked(prompts)[0]

    def encode_masked(self, prompts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the token ids of prompts with special tokens, padded on the right, and their attention mask.

        Returns:
            The ids and the mask, both (B, max_length); the mask is 1 for tokens and 0 for padding.

        Warns:
            PromptTruncatedWarning: a prompt was truncated; the warning contains the start of the lost part.

        Raises:
            PromptError: there are no prompts, or one is not text.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or len(prompts) == 0:
            raise PromptError(f"prompts are {prompts!r}", "a list of one prompt or more")
        ids = np.full((len(prompts), self.max_length), self.pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for row, present, prompt in zip(ids, mask, prompts, strict=True):
            text, encoding = self._encode(require_text(prompt))
            row[: len(encoding.ids)] = encoding.ids
            present[: len(encoding.ids)] = 1
            if encoding.overflowing:
                cut = text[_first_character(encoding.overflowing[0]) :].strip()
                shown = cut if len(cut) <= _SHOWN else f"{cut[:_SHOWN]}... ({len(cut)} characters)"
                message = f"the text encoder accepts {self.max_length} tokens; this end of a prompt was cut: {shown}"
                warnings.warn(PromptTruncatedWarning(message), stacklevel=3)
        return ids, mask

    def _encode(self, text: str, *, special: bool = True) -> tuple[str, Encoding]:
        """Return a prompt with its multi-vector tokens expanded, and its encoding."""
        with _read_errors(
            f"a prompt of {len(text)} characters", PromptError, "one that the folder's tokenizer can read"
        ):
            encoding = self.tokenizer.encode(text, add_special_tokens=special)
            if self.multi_vector:
                from sdonnx.runtime.inputs import textual_inversion

                tokens = [token for part in (encoding, *encoding.overflowing) for token in part.tokens]
                expanded = textual_inversion.expand(text, tokens, self.multi_vector)
                if expanded != text:
                    text, encoding = expanded, self.tokenizer.encode(expanded, add_special_tokens=special)
        return text, encoding


def _read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of an untrusted file.

    Its regular expressions always terminate: Oniguruma aborts a match after ten million backtracking steps.
    """
    if not path.is_file():
        raise FolderError(f"{path} is missing", "the tokenizer of an exported pipeline")
    if (size := path.stat().st_size) > _MAX_TOKENIZER_SIZE:
        raise FolderError(f"{path} has {size} bytes", f"at most {_MAX_TOKENIZER_SIZE}", "export the pipeline again")
    with _read_errors(str(path), FolderError, "a file of the tokenizers library"):
        tokenizer = Tokenizer.from_file(str(path))
        growth = 1 if tokenizer.normalizer is None else _growth(json.loads(tokenizer.normalizer.__getstate__()))
    if growth > _MAX_GROWTH:
        raise FolderError(
            f"{path} makes a prompt {growth:.1e} times as long by its normalizer",
            f"at most {_MAX_GROWTH} times",
            "export the pipeline again",
        )
    return tokenizer


def _growth(normalizer: Any) -> int:
    """Return the maximum factor by which the replacements of a normalizer lengthen a text."""
    if isinstance(normalizer, list):
        return math.prod(map(_growth, normalizer))
    if not isinstance(normalizer, dict):
        return 1
    # A replacement of empty text, or of an expression that matches it, is inserted between all characters.
    own = 1 + len(str(normalizer.get("content") or normalizer.get("prepend") or "").encode("utf-8", "replace"))
    return own * _growth(normalizer.get("normalizers"))


@contextlib.contextmanager
def _read_errors(what: str, error: type[SdonnxError], expected: str) -> Iterator[None]:
    """Convert errors of the tokenizers library, including panics of Rust, which are not subclasses of Exception."""
    try:
        yield
    except (SdonnxError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as failure:
        raise error(f"{what} cannot be read ({failure})", expected, "export the pipeline again") from failure


def _special_tokens_config(path: Path) -> Mapping[str, Any]:
    """Return `tokenizer_config.json`; in older folders `special_tokens_map.json` overrides it.

    Source: `PreTrainedTokenizerBase._from_pretrained` of transformers, which recognizes older folders by the absence
    of "added_tokens_decoder".
    """
    config = read_json(path / TOKENIZER_CONFIG)
    special = path / SPECIAL_TOKENS_MAP
    if "added_tokens_decoder" in config or not special.is_file():
        return config
    return {**config, **read_json(special)}


def _content(token: Any) -> str:
    """Return the text of a special token, which transformers writes with or without its flags."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def require_text(prompt: object) -> str:
    """Return the prompt, or raise PromptError if it is not text or cannot be encoded."""
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is {prompt!r}", "text", "pass every prompt as text")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise PromptError(f"a prompt is {prompt!r}", "text without lone surrogates") from None
    return prompt


def _first_character(encoding: Encoding) -> int:
    """Return the position in the prompt at which the text of an encoding starts."""
    return next(
        start for (start, _), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True) if not special
    )


VOCABULARY, MERGES = "vocab.json", "merges.txt"

# Radford et al., arXiv:2103.00020, section 2.4; the expression is from OpenAI's simple_tokenizer.py.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_START, _END = "<|startoftext|>", "<|endoftext|>"


def _clip_tokenizer(folder: Path, names: Mapping[str, str]) -> Tokenizer:
    """Return CLIP's tokenizer: lower case, byte-level BPE, a suffix at the end of each word.

    Source: `CLIPTokenizer.__init__` of transformers.

    Args:
        folder: folder with `vocab.json` and `merges.txt`.
        names: special tokens of the folder by name: unk_token, bos_token and eos_token.

    Raises:
        FolderError: a file is missing or broken, or a special token is not in the vocabulary.
    """
    vocabulary, merges = folder / VOCABULARY, folder / MERGES
    try:
        model = models.BPE.from_file(
            str(vocabulary),
            str(merges),
            unk_token=names.get("unk_token", _END),
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            fuse_unk=False,
        )
    except Exception as error:  # the library raises plain Exception
        raise FolderError(
            f"{VOCABULARY} and {MERGES} in {folder} cannot be read ({error})",
            "CLIP's vocabulary and merges",
            "export the pipeline again",
        ) from None
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    start, end = names.get("bos_token", _START), names.get("eos_token", _END)
    numbers = tokenizer.get_vocab()
    for token in (start, end):
        if token not in numbers:
            raise FolderError(
                f"{vocabulary} lacks {token!r}", "the special tokens of the folder", "export the pipeline again"
            )
    tokenizer.post_processor = processors.RobertaProcessing(
        (end, numbers[end]), (start, numbers[start]), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer
