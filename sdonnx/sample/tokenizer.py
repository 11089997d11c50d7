"""Tokenizers of CLIP and T5 with few words: the published layouts of ids, and pieces made of `WORDS`.

CLIP (OpenAI's `simple_tokenizer.py`): ids 0 to 255 are the bytes, 256 to 511 the bytes that end a word, then come
the merges, and last the two special tokens. T5 (`t5-v1_1-xxl/spiece.model`): padding, end and unknown, then pieces,
and last a hundred sentinels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.sample.architectures import T5TokenizerSpec, TokenizerSpec
from sdonnx.sample.words import WORDS

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, T5Tokenizer

__all__ = ["build_tokenizer", "save_tokenizer"]

_END_OF_WORD = "</w>"
_SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space
_SENTINELS = 100


def _learn_merges(symbols: list[str]) -> Any:
    """Return the merges that make every word of `WORDS` one token, as pairs, the most frequent first."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE(end_of_word_suffix=_END_OF_WORD))
    trainer = BpeTrainer(
        vocab_size=len(symbols) + sum(map(len, WORDS)),
        min_frequency=1,
        # Symbols named here have their ids before the first word is read, so ties are always broken alike.
        special_tokens=symbols,
        end_of_word_suffix=_END_OF_WORD,
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def build_tokenizer(spec: TokenizerSpec | T5TokenizerSpec) -> CLIPTokenizer | T5Tokenizer:
    """Return a working tokenizer."""
    return _build_t5(spec) if isinstance(spec, T5TokenizerSpec) else _build_clip(spec)


def _build_t5(spec: T5TokenizerSpec) -> T5Tokenizer:
    """Return a T5 tokenizer: words, the characters of words, and names that no text leads to.

    A word is likelier than its characters together, and a longer piece of it than a shorter one.
    """
    from transformers import T5Tokenizer

    words = [_WORD_START + word for word in dict.fromkeys(WORDS)]
    characters = sorted({character for word in words for character in word} | set("0123456789.,:;!?'-()\""))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -8.0) for word in words if len(word) > 1]
    pieces += [(character, -12.0) for character in characters]
    unused = spec.vocab_size - len(pieces) - _SENTINELS
    pieces += [(f"<unused{number}>", -100.0) for number in range(unused)]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(_SENTINELS))]
    return T5Tokenizer(vocab=pieces, extra_ids=_SENTINELS, model_max_length=spec.model_max_length)


def _build_clip(spec: TokenizerSpec) -> CLIPTokenizer:
    """Return a working CLIP tokenizer with the ids of the published ones.

    The tokens between the learned ones and the special ones have names, so that the size is right,
    but no text leads to them.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    # In the order of their code points, which is CLIP's: printable bytes first, so "!" is 0.
    byte_symbols = sorted(ByteLevel.alphabet())
    symbols = byte_symbols + [symbol + _END_OF_WORD for symbol in byte_symbols]
    merges = _learn_merges(symbols)
    tokens = symbols + [left + right for left, right in merges]
    tokens += [f"<|unused{number}|>" for number in range(len(tokens), spec.vocab_size - len(_SPECIAL_TOKENS))]
    tokens += _SPECIAL_TOKENS
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        pad_token=spec.pad_token,
        model_max_length=spec.model_max_length,
    )


def save_tokenizer(tokenizer: CLIPTokenizer | T5Tokenizer, folder: Path) -> None:
    """Write `tokenizer` into `folder`; CLIP's with the files of transformers 4 beside those of 5.

    Published pipelines have both, and some loaders read only the older ones.
    """
    from transformers import CLIPTokenizer

    tokenizer.save_pretrained(folder)
    if not isinstance(tokenizer, CLIPTokenizer):
        return
    tokenizer.backend_tokenizer.model.save(str(folder))
    special = json.dumps(tokenizer.special_tokens_map, indent=2, sort_keys=True) + "\n"
    (folder / "special_tokens_map.json").write_text(special, encoding="utf-8")
