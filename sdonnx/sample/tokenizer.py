"""A CLIP tokenizer with few words: the published layout of ids, and pieces learned from `WORDS`.

Ids 0 to 255 are the bytes, 256 to 511 the bytes that end a word, then come the merges, and last the two
special tokens. Source: OpenAI CLIP's `simple_tokenizer.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.sample.architectures import TokenizerSpec
from sdonnx.sample.words import WORDS

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

__all__ = ["build_tokenizer", "save_tokenizer"]

_END_OF_WORD = "</w>"
_SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>")


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


def build_tokenizer(spec: TokenizerSpec) -> CLIPTokenizer:
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


def save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write `tokenizer` into `folder`, with the files of transformers 4 beside those of 5.

    Published pipelines have both, and some loaders read only the older ones.
    """
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))
    special = json.dumps(tokenizer.special_tokens_map, indent=2, sort_keys=True) + "\n"
    (folder / "special_tokens_map.json").write_text(special, encoding="utf-8")
