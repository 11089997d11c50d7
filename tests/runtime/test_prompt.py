"""Prompt tokenizer, compared with transformers' CLIPTokenizer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.pipelines import edit_json, refused
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer

from sdonnx.errors import FolderError, OptionError, PromptError
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer, PromptTruncatedWarning

MAX_LENGTH = 77
PAD_TOKENS = ("<|endoftext|>", "!")
MERGES = ["t h", "th e</w>", "a n", "an d</w>", "c a", "ca t</w>", "d o", "do g</w>", "! !</w>", "1 2"]


def write_tokenizer(folder: Path, pad_token: str) -> Path:
    """Write a CLIP tokenizer of ten merges, ids in the published order: bytes, word ends, merges, special."""
    symbols = sorted(ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols)]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    merges: Any = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        pad_token=pad_token,
        model_max_length=MAX_LENGTH,
    )
    tokenizer.save_pretrained(folder)
    return folder


class Pair:
    """One folder, read by transformers and by this project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.theirs = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        self.ours = PromptTokenizer.from_folder(folder)

    def expected(self, prompts: Sequence[str]) -> NDArray[np.int64]:
        encoded = self.theirs(
            list(prompts), padding="max_length", max_length=MAX_LENGTH, truncation=True, return_tensors="np"
        )
        ids: NDArray[np.int64] = encoded.input_ids
        return ids

    def assert_same(self, prompts: Sequence[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PromptTruncatedWarning)
            found = self.ours.encode(prompts)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, self.expected(prompts))


@pytest.fixture(scope="module", params=PAD_TOKENS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", "<|endoftext|>")


PROMPTS = [
    "",
    " ",
    "\t\n  \u00a0\u3000",
    "the cat and the dog",
    "The CAT  and\nthe dog!",
    "!",
    "!!",
    "wow!!! a cat !",
    "don't we'll they'd I'm",
    "12345 1 2 12",
    "café cafe\u0301 Ａ ß İ ﬁ",  # noqa: RUF001
    "猫と犬 кошка кот גדי قط",
    "🐱 👩‍👩‍👧‍👦 🇨🇦 🏳️‍🌈",
    "<|endoftext|>",
    "a <|endoftext|> b <|startoftext|>c",
    "<|ENDOFTEXT|> <|endoftext |>",
    "\x00\x01\x7f\ufeff\u200b",
    "a photo of a cat, (masterpiece:1.2), [blurry], <lora:x:0.5>",
    "the cat " * 200,
    "x" * 500,
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts(pair: Pair, prompt: str) -> None:
    pair.assert_same([prompt])


def test_batch(pair: Pair) -> None:
    pair.assert_same(PROMPTS)


pieces = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="the cat and dog!12' \n", max_size=60),
    st.sampled_from(["<|endoftext|>", "<|startoftext|>", "!", " ", "🐱", "é", "e\u0301", "the cat ", "\u2028"]),
)


@settings(max_examples=300, deadline=None)
@given(prompts=st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=3))
def test_any_text(pair: Pair, prompts: list[str]) -> None:
    pair.assert_same(prompts)


@settings(max_examples=30, deadline=None)
@given(words=st.integers(70, 80), end=st.sampled_from(["", " ", "!", "<|endoftext|>", "🐱"]))
def test_prompts_around_the_maximum_length(pair: Pair, words: int, end: str) -> None:
    prompt = "cat " * words + end
    pair.assert_same([prompt])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.ours.encode([prompt])
    # diffusers warns if the whole prompt has more ids than the text encoder accepts.
    whole = pair.theirs([prompt], padding="longest", return_tensors="np").input_ids
    assert bool(caught) == (whole.shape[1] > MAX_LENGTH)


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        ("The DOG 🐱 and ", "The DOG 🐱 and"),
        ("<|endoftext|> the end", "<|endoftext|> the end"),  # special tokens can be truncated
        ("dog " * 500, f"{('dog ' * 20).strip()} ... (1999 characters)"),
    ],
)
def test_warning_contains_the_lost_part(pair: Pair, end: str, lost: str) -> None:
    with pytest.warns(PromptTruncatedWarning, match="77 tokens") as caught:
        pair.ours.encode(["a cat", "cat " * 75 + end])
    assert len(caught) == 1
    assert str(caught[0].message).endswith(f": {lost}")
    assert caught[0].filename == __file__


@given(
    texts=st.lists(st.text(max_size=20) | st.integers(70, 90).map(lambda words: "the cat " * words), max_size=3),
    special=st.booleans(),
)
def test_tokens_can_be_counted(pair: Pair, texts: list[str], special: bool) -> None:
    """As in diffusers' scripts, `pipe.tokenizer(prompt).input_ids` are all ids of a prompt."""
    for given_texts in (texts, *texts):
        found = pair.ours(given_texts, add_special_tokens=special)
        expected = pair.theirs(given_texts, add_special_tokens=special) if given_texts != [] else {"input_ids": []}
        assert found["input_ids"] == found.input_ids == expected["input_ids"]
    assert pair.ours.model_max_length == pair.theirs.model_max_length


def test_tensors_of_tokens_are_refused(pair: Pair) -> None:
    with refused(OptionError, "the option padding", "transformers' AutoTokenizer"):
        pair.ours("a cat", padding="max_length", truncation=True, return_tensors="pt")
    with refused(PromptError, "a prompt is 5"):
        pair.ours([5])  # type: ignore[list-item]


def test_padding_and_truncation_of_the_file_are_ignored(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "$",
    }
    expected = PromptTokenizer.from_folder(folder).encode(["the cat and the dog and the dog"])
    edit_json(folder / "tokenizer.json", truncation=truncation, padding=padding)
    found = PromptTokenizer.from_folder(folder).encode(["the cat and the dog and the dog"])
    np.testing.assert_array_equal(found, expected)


def test_pad_token_that_the_file_does_not_list(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "!")
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit_json(folder / "tokenizer.json", added_tokens=[token for token in added if token["content"] != "!"])
    pair = Pair(folder)
    pair.assert_same(["wow!!! a cat !", "!", "a!b"])
    assert list(pair.ours.encode(["a!b"])[0, 2:4]) == [0, pair.expected(["b"])[0, 1]]


FLAGS = {"content": "!", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    ("file", "pad_token"),
    [
        ("tokenizer_config.json", "!"),
        ("tokenizer_config.json", {"__type": "AddedToken", **FLAGS}),
        ("special_tokens_map.json", "!"),
        ("special_tokens_map.json", FLAGS),
    ],
)
def test_sources_of_the_pad_token(folder: Path, file: str, pad_token: Any) -> None:
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    edit_json(folder / file, pad_token=pad_token)
    pair = Pair(folder)
    assert pair.ours.pad_token_id == 0
    pair.assert_same(PROMPTS)


def test_special_tokens_map_is_ignored_in_newer_folders(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "!"}))
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder={})
    pair = Pair(folder)
    assert pair.ours.pad_token_id == pair.theirs.pad_token_id != 0


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_files(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(FolderError, match=f"{missing} is missing"):
        PromptTokenizer.from_folder(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', "\x00"])
@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files(folder: Path, broken: str, content: str) -> None:
    (folder / broken).write_text(content)
    with pytest.raises(FolderError, match=broken):
        PromptTokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("model_max_length", value) for value in (..., None, 10**30, 1e30, 0, 2, -1, "77")),
        *(("pad_token", value) for value in (..., None, "<|pad|>", {"content": "<|pad|>"}, {})),
    ],
)
def test_rejected_entries(folder: Path, entry: str, value: Any) -> None:
    edit_json(folder / "tokenizer_config.json", **{entry: value})
    with pytest.raises(FolderError, match=entry):
        PromptTokenizer.from_folder(folder)


@pytest.mark.parametrize("prompts", [[], (), "a cat", None, {"a cat"}, ["a cat", None], [b"a cat"], [["a"]]])
def test_rejected_lists_of_prompts(pair: Pair, prompts: Any) -> None:
    with pytest.raises(PromptError):
        pair.ours.encode(prompts)


def test_lone_surrogates(pair: Pair) -> None:
    with pytest.raises(PromptError, match="surrogates"):
        pair.ours.encode(["a \ud83d cat"])


def write_older(folder: Path, pad_token: str) -> Path:
    """Write a tokenizer as transformers 4 does for its tokenizer in Python, without tokenizer.json."""
    whole = json.loads((write_tokenizer(folder, pad_token) / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.mark.parametrize("pad_token", PAD_TOKENS)
def test_folder_with_only_vocabulary_and_merges(pad_token: str, tmp_path: Path) -> None:
    pair = Pair(write_older(tmp_path, pad_token))
    pair.assert_same(["The cat and the dog!!", "", "  ÀÉ e\u0301 12 !", "the<|endoftext|> cat's 漢字 😀", "a " * 200])


@pytest.mark.parametrize(
    ("file", "content"), [("vocab.json", "{"), ("vocab.json", json.dumps({"a": 0})), ("merges.txt", "a b c d")]
)
def test_broken_vocabulary(file: str, content: str, tmp_path: Path) -> None:
    (write_older(tmp_path, "!") / file).write_text(content)
    with pytest.raises(FolderError, match=file):
        PromptTokenizer.from_folder(tmp_path)
