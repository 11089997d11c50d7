"""Tokens of textual inversions in a tokenizer: multi-vector tokens, and tokens that older folders list separately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sdonnx.errors import FolderError, PromptError
from sdonnx.folder.pipeline_folder import read_json

__all__ = ["add_listed_tokens", "expand", "multi_vector_tokens"]

ADDED_TOKENS = "added_tokens.json"

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

# Text encoders accept less than a thousandth of this. It bounds the memory that tokens of a hostile folder can take.
_MAX_CHARACTERS = 10**7


def multi_vector_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the added tokens that stand for several vectors, with the tokens of all their vectors.

    diffusers' `load_textual_inversion` adds the tokens NAME, NAME_1, NAME_2, ... for an embedding of several vectors.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    found = {}
    for name in added:
        names = [name]
        while f"{name}_{len(names)}" in added:
            names.append(f"{name}_{len(names)}")
        if len(names) > 1:
            found[name] = " ".join(names)
    return found


def expand(text: str, tokens: Iterable[str], multi_vector: Mapping[str, str]) -> str:
    """Return a prompt in which each multi-vector token is followed by the tokens of its other vectors.

    Source: `TextualInversionLoaderMixin.maybe_convert_prompt` of diffusers, which replaces every occurrence of the
    token's text if the token occurs. Names with capital letters do not occur, since CLIP's tokenizer has only lower
    case; diffusers does not expand them either. Replacements follow the prompt's order; in diffusers the order is
    random, which matters only if one name contains another.

    Args:
        text: the prompt.
        tokens: tokens of the prompt, as the tokenizer spells them.
        multi_vector: see `multi_vector_tokens`.

    Raises:
        PromptError: the result is far too long.
    """
    for name in dict.fromkeys(tokens):
        if (replacement := multi_vector.get(name)) is not None:
            length = len(text) + text.count(name) * (len(replacement) - len(name))
            if length > _MAX_CHARACTERS:
                raise PromptError(
                    f"the vectors of {name[:40]!r} make the prompt {length} characters long",
                    f"at most {_MAX_CHARACTERS}",
                    "name it less often",
                )
            text = text.replace(name, replacement)
    return text


def add_listed_tokens(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that folders without `tokenizer.json` list in `tokenizer_config.json` or `added_tokens.json`.

    Args:
        tokenizer: tokenizer of the vocabulary, to which the tokens are added.
        folder: the tokenizer's folder.
        config: content of `tokenizer_config.json`.

    Raises:
        FolderError: a token is malformed, or its id does not follow the vocabulary's ids.
    """
    listed: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    if (folder / ADDED_TOKENS).is_file():
        listed = {name: (number, {}) for name, number in read_json(folder / ADDED_TOKENS).items()}
    described = config.get("added_tokens_decoder")
    for number, flags in described.items() if isinstance(described, Mapping) else ():
        if isinstance(flags, Mapping) and isinstance(flags.get("content"), str):
            listed[flags["content"]] = int(number) if str(number).isdecimal() else number, flags
    vocabulary = tokenizer.get_vocab()
    new = {name: entry for name, entry in listed.items() if name not in vocabulary}
    if not all(isinstance(number, int) for number, _ in new.values()):
        raise _broken(folder, "has a token whose id is not a number")
    for name, (number, flags) in sorted(new.items(), key=lambda item: item[1][0]):
        options = {flag: bool(flags[flag]) for flag in _FLAGS if flag in flags}
        tokenizer.add_tokens([AddedToken(name, special=bool(flags.get("special", False)), **options)])
        if (found := tokenizer.token_to_id(name)) != number:
            raise _broken(folder, f"numbers the token {name!r} {number}, after a vocabulary of {found}")


def _broken(folder: Path, found: str) -> FolderError:
    return FolderError(
        f"{folder} {found}", "added tokens that are numbered after the vocabulary", "copy the tokenizer again"
    )
