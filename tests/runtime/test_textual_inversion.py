"""Textual inversions of several vectors, compared with diffusers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.loaders.textual_inversion import TextualInversionLoaderMixin
from support.diffusers_pipelines import in_diffusers
from support.drawing import generator
from support.inversions import with_inversions
from support.pipeline_cache import PipelineCache
from support.pipelines import edit_json, refused
from transformers import CLIPTokenizer

from sdonnx.errors import FolderError, PromptError
from sdonnx.metrics import psnr
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer, PromptTruncatedWarning
from sdonnx.runtime.inputs.textual_inversion import expand
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

SIZE: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np"}

PROMPTS = [
    "a <cat-toy> in snow",
    "<cat-toy>",
    "A <CAT-TOY>, <cat-toy> and a<cat-toy>b",
    "a <cat-toy>_1 alone",
    "<cat-toy> and <cat-toy>_1",
    "a <one> and a <Four>, a <three> and a <four>",
    "nothing of these",
    "",
    "a " * 60 + "<three> " * 20,
]


@pytest.fixture(scope="module")
def inverted(pipelines: PipelineCache) -> Path:
    """`micro` with textual inversions of two vectors and of one, a diffusers folder."""
    return with_inversions(pipelines)


@pytest.mark.parametrize("negative", [False, True])
def test_image_agrees(negative: bool, inverted: Path, pipelines: PipelineCache) -> None:
    prompts: dict[str, Any] = {"prompt": "a <cat-toy> in snow with <one>"}
    if negative:
        prompts = {"prompt": "a fox", "negative_prompt": "a <cat-toy>"}
    expected = in_diffusers(inverted)(**prompts, generator=generator(), **SIZE).images
    folder = pipelines.optimized(pipelines.exported(inverted), provider="cpu")
    with OrtDiffusionPipeline.from_pretrained(folder) as pipeline:
        found = pipeline(**prompts, seed=0, **SIZE).images
        single = pipeline(
            **{name: text.replace("<cat-toy>", "a") for name, text in prompts.items()}, seed=0, **SIZE
        ).images
    assert psnr(found, expected) > 90
    assert psnr(single, expected) < 60, "the token changes the image"


@pytest.fixture
def tokenizers(pipelines: PipelineCache, tmp_path: Path) -> list[Path]:
    """Two tokenizers of Stable Diffusion XL, which pad differently and hold different added tokens."""
    source = pipelines.micro("sdxl-tiny")
    folders = []
    for name, tokens in (("tokenizer", ("<one>", "<cat-toy>")), ("tokenizer_2", ("<Four>", "<three>"))):
        tokenizer = CLIPTokenizer.from_pretrained(source / name, local_files_only=True)
        tokenizer.add_tokens([f"{token}{end}" for token in tokens for end in ("", "_1", "_2")])
        tokenizer.save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    return folders


def assert_same(folder: Path, texts: list[str]) -> None:
    theirs = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    converted = TextualInversionLoaderMixin().maybe_convert_prompt(texts, theirs)
    expected = theirs(converted, padding="max_length", max_length=77, truncation=True, return_tensors="np").input_ids
    np.testing.assert_array_equal(PromptTokenizer.from_folder(folder).encode(texts), expected)


@pytest.mark.filterwarnings(f"ignore::{PromptTruncatedWarning.__module__}.PromptTruncatedWarning")
def test_both_tokenizers_expand_their_own_tokens(tokenizers: list[Path]) -> None:
    for folder in tokenizers:
        assert_same(folder, PROMPTS)
    first, second = (PromptTokenizer.from_folder(folder).encode(["<cat-toy>"])[0] for folder in tokenizers)
    assert len(set(first.tolist())) != len(set(second.tolist()))


def test_tokenizer_of_another_length_expands_too(tokenizers: list[Path]) -> None:
    tokenizer = PromptTokenizer.from_folder(tokenizers[0])
    whole = tokenizer.encode(["a <cat-toy>"])
    np.testing.assert_array_equal(tokenizer.of_length(20).encode(["a <cat-toy>"]), whole[:, :20])


def test_warning_contains_the_lost_vectors(tokenizers: list[Path]) -> None:
    tokenizer = PromptTokenizer.from_folder(tokenizers[0])
    with pytest.warns(PromptTruncatedWarning, match=": <cat-toy>_1 <cat-toy>_2 and more$"):
        tokenizer.encode(["the " * 74 + "<cat-toy> and more"])


def older(folder: Path, name: str) -> None:
    """Rewrite a tokenizer as transformers 4 writes it without the tokenizers library."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer.json").unlink()
    tokens = {str(token.pop("id")): token for token in whole["added_tokens"]}
    if name == "tokenizer_config.json":
        edit_json(folder / name, added_tokens_decoder=tokens)
    else:
        (folder / name).write_text(json.dumps({token["content"]: int(number) for number, token in tokens.items()}))
        edit_json(folder / "tokenizer_config.json", added_tokens_decoder=...)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.filterwarnings(f"ignore::{PromptTruncatedWarning.__module__}.PromptTruncatedWarning")
def test_older_folders_list_their_tokens_elsewhere(name: str, tokenizers: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizers[0], tmp_path / "older")
    expected = PromptTokenizer.from_folder(folder).encode(PROMPTS)
    older(folder, name)
    np.testing.assert_array_equal(PromptTokenizer.from_folder(folder).encode(PROMPTS), expected)
    if name == "tokenizer_config.json":
        assert_same(folder, PROMPTS)


@pytest.mark.parametrize("number", ["x", 7, 10**9])
def test_token_with_a_wrong_number_is_refused(number: Any, tokenizers: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizers[0], tmp_path / "older")
    older(folder, "added_tokens.json")
    edit_json(folder / "added_tokens.json", **{"<one>": number})
    with refused(FolderError, "copy the tokenizer again"):
        PromptTokenizer.from_folder(folder)


def test_expansion_is_bounded() -> None:
    with refused(PromptError, "name it less often"):
        expand("a" * 10**6, ["a"], {"a": "a a_1 a_2 a_3 a_4"})
