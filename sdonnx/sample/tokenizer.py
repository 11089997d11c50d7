"""Tokenizers of CLIP and T5 with few words: the published layouts of ids, with tokens made from a few words.

CLIP (OpenAI's `simple_tokenizer.py`): ids 0 to 255 are bytes, 256 to 511 bytes that end a word, followed by the merges
and the two special tokens. T5 (`t5-v1_1-xxl/spiece.model`): padding, end and unknown, followed by pieces and a hundred
sentinels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.sample.architecture import T5TokenizerSpec, TokenizerSpec

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, T5Tokenizer

__all__ = ["build_tokenizer", "save_tokenizer"]

_END_OF_WORD = "</w>"
_SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space
_SENTINELS = 100


def _learn_merges(symbols: list[str], words: tuple[str, ...]) -> Any:
    """Return the merges that turn every word into one token, as pairs, most frequent first."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE(end_of_word_suffix=_END_OF_WORD))
    trainer = BpeTrainer(
        vocab_size=len(symbols) + sum(map(len, words)),
        min_frequency=1,
        # These symbols get their ids before the first word is read, so ties are always broken the same way.
        special_tokens=symbols,
        end_of_word_suffix=_END_OF_WORD,
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def build_tokenizer(spec: TokenizerSpec | T5TokenizerSpec) -> CLIPTokenizer | T5Tokenizer:
    """Return a tokenizer with the published layout of ids."""
    return _build_t5(spec) if isinstance(spec, T5TokenizerSpec) else _build_clip(spec)


def _build_t5(spec: T5TokenizerSpec) -> T5Tokenizer:
    """Return a T5 tokenizer with words, characters, and filler tokens that no text is encoded to.

    A word is more likely than the sequence of its characters, and a longer piece more likely than shorter ones.
    """
    from transformers import T5Tokenizer

    words = [_WORD_START + word for word in dict.fromkeys(spec.words)]
    characters = sorted({character for word in words for character in word} | set("0123456789.,:;!?'-()\""))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -8.0) for word in words if len(word) > 1]
    pieces += [(character, -12.0) for character in characters]
    unused = spec.vocab_size - len(pieces) - _SENTINELS
    pieces += [(f"<unused{number}>", -100.0) for number in range(unused)]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(_SENTINELS))]
    return T5Tokenizer(vocab=pieces, extra_ids=_SENTINELS, model_max_length=spec.model_max_length)


def _build_clip(spec: TokenizerSpec) -> CLIPTokenizer:
    """Return a CLIP tokenizer with the layout of ids of the published ones.

    Filler tokens between the learned and the special ones bring the vocabulary to the published size. No text is
    encoded to them.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    # Sorted by code point, which is CLIP's order: printable bytes first, so the id of "!" is 0.
    byte_symbols = sorted(ByteLevel.alphabet())
    symbols = byte_symbols + [symbol + _END_OF_WORD for symbol in byte_symbols]
    merges = _learn_merges(symbols, spec.words)
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
    """Write `tokenizer` to `folder`; a CLIP tokenizer with the files of transformers 4 and 5.

    Published pipelines have both, and some loaders read only the older files.
    """
    from transformers import CLIPTokenizer

    tokenizer.save_pretrained(folder)
    if not isinstance(tokenizer, CLIPTokenizer):
        return
    tokenizer.backend_tokenizer.model.save(str(folder))
    special = json.dumps(tokenizer.special_tokens_map, indent=2, sort_keys=True) + "\n"
    (folder / "special_tokens_map.json").write_text(special, encoding="utf-8")
