"""Weights in prompts, compared with the definition of AUTOMATIC1111's web UI, computed by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compel import CompelForSD
from support.drawing import MIN_PSNR_DB, assert_same_images, generator
from support.pipelines import refused

from sdonnx.errors import PromptError
from sdonnx.metrics import psnr
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer
from sdonnx.runtime.inputs.prompt_weights import Chunk, chunks, weighted_parts
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

SIZE: dict[str, Any] = {"height": 32, "width": 40, "num_inference_steps": 2, "output_type": "np"}

# The examples in the docstring of the web UI's parser, and further ones worked out by hand.
PARTS: dict[str, list[tuple[str, float]]] = {
    "": [("", 1)],
    "normal text": [("normal text", 1)],
    "an (important) word": [("an ", 1), ("important", 1.1), (" word", 1)],
    "(unbalanced": [("unbalanced", 1.1)],
    r"\(literal\]": [("(literal]", 1)],
    "(unnecessary)(parens)": [("unnecessaryparens", 1.1)],
    "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).": [
        ("a ", 1),
        ("house", 1.573),
        (" ", 1.1),
        ("on", 1),
        (" a ", 1.1),
        ("hill", 0.55),
        (", sun, ", 1.1),
        ("sky", 1.4641),
        (".", 1.1),
    ],
    "[less]": [("less", 1 / 1.1)],
    "(a: 1.5 ) b": [("a", 1.5), (" b", 1)],
    "(a:-0.5)": [("a", -0.5)],
    "time 12:30 a) b] c:1.2)": [("time 12:30 a) b] c:1.2)", 1)],
    "(one (two:2):1.5)": [("one ", 1.5), ("two", 3)],
    "a BREAK b": [("a", 1), ("BREAK", -1), ("b", 1)],
    r"back\slash \\": [("backslash \\", 1)],
}


@pytest.mark.parametrize("text", PARTS)
def test_parts(text: str) -> None:
    found = weighted_parts(text)
    assert [words for words, _ in found] == [words for words, _ in PARTS[text]]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in PARTS[text]])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a [cat:dog:0.5]", "prompt editing"),
        ("a [cat|dog]", "alternating words"),
        ("a cat AND a dog", "AND in the prompt"),
        ("a cat <lora:style:0.8>", "an extra network"),
        ("a (cat:1.2.3)", "1.2.3"),
    ],
)
def test_unsupported_notation_is_refused(text: str, word: str) -> None:
    with refused(PromptError, word):
        weighted_parts(text)


@pytest.fixture
def tokenizer(ours: OrtDiffusionPipeline) -> PromptTokenizer:
    return ours.tokenizer


def lengths(found: list[Chunk]) -> list[int]:
    assert all(len(chunk.ids) == len(chunk.weights) for chunk in found)
    return [len(chunk.ids) for chunk in found]


def test_chunks(tokenizer: PromptTokenizer) -> None:
    number = len(tokenizer.plain_ids("fox"))
    word = "fox " * (10 // number) if 10 % number == 0 else ""
    assert word, "ten tokens"
    assert lengths(chunks(tokenizer, "")) == [0]
    assert lengths(chunks(tokenizer, word * 7)) == [70]
    assert lengths(chunks(tokenizer, word * 20)) == [75, 75, 50]
    assert lengths(chunks(tokenizer, word + "BREAK " + word)) == [10, 10]
    assert lengths(chunks(tokenizer, word + " BREAK BREAK ")) == [10, 0]
    assert lengths(chunks(tokenizer, word * 6 + "," + word * 6)) == [61, 60], "a comma near the end"
    assert lengths(chunks(tokenizer, word * 5 + "," + word * 6)) == [75, 36], "a comma too far from the end"
    with refused(PromptError, "2400 tokens"):
        chunks(tokenizer, word * 300)


def reference(pipeline: Any, rows: list[list[tuple[str, float]]]) -> torch.Tensor:
    """Return the embeddings of one prompt by the web UI's definition: each row is a chunk of parts."""
    tokenizer, found = pipeline.tokenizer, []
    for parts in rows:
        ids, weights = [tokenizer.bos_token_id], [1.0]
        for words, weight in parts:
            own = tokenizer(words, add_special_tokens=False).input_ids
            ids += own
            weights += [weight] * len(own)
        ids.append(tokenizer.eos_token_id)
        ids += [tokenizer.pad_token_id] * (77 - len(ids))
        weights += [1.0] * (77 - len(weights))
        with torch.inference_mode():
            states = pipeline.text_encoder(torch.tensor([ids]))[0]
        scaled = states * torch.tensor(weights)[None, :, None]
        found.append(scaled * (states.mean() / scaled.mean()))
    return torch.cat(found, dim=1)


def test_image_agrees(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    prompt = r"a (red fox:1.4) in [deep] snow, \(ink\), ((soft light))"
    parts = [("a ", 1), ("red fox", 1.4), (" in ", 1), ("deep", 1 / 1.1), (" snow, (ink), ", 1), ("soft light", 1.21)]
    own = reference(theirs, [parts])
    negative = reference(theirs, [[("grey", 0.6), (" fog", 1)]])
    given = {"prompt_embeds": own, "negative_prompt_embeds": negative}
    expected = theirs(**given, **SIZE, generator=generator()).images
    texts: dict[str, Any] = {"negative_prompt": "(grey:0.6) fog", "prompt_weighting": "a1111"}
    assert psnr(ours(prompt, **texts, **SIZE, seed=0).images, expected) > MIN_PSNR_DB
    assert psnr(ours(prompt, negative_prompt="(grey:0.6) fog", **SIZE, seed=0).images, expected) < 60
    found = ours.encode_prompt(prompt, **texts)
    np.testing.assert_allclose(np.stack(found), torch.stack((own, negative)).numpy(), atol=1e-4)  # type: ignore[arg-type]


def test_long_prompts_agree(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """The prompt has two chunks, and the shorter negative prompt is continued by an empty one."""
    own = reference(theirs, [[("a red fox", 1)], [("an ", 1), ("owl", 1.5)]])
    negative = reference(theirs, [[("grey", 1)], []])
    given = {"prompt_embeds": own, "negative_prompt_embeds": negative}
    expected = theirs(**given, **SIZE, generator=generator()).images
    found = ours(
        "a red fox BREAK an (owl:1.5)", negative_prompt="grey", prompt_weighting="a1111", **SIZE, seed=0
    ).images
    assert psnr(found, expected) > MIN_PSNR_DB


def test_shapes_of_long_prompts_are_captured(micro_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a capture, each graph runs once with the buffers of its shape; CLIP cannot run with 154 tokens."""
    prepared: list[str] = []

    def prepare(run: Run) -> None:
        prepared.append(run._graph.path.parent.name)
        run._run()

    monkeypatch.setattr(Run, "prepare", prepare)
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        pipeline("a red fox", **SIZE)
        assert {"text_encoder", "unet"} <= set(prepared)
        prepared.clear()
        pipeline("a red fox BREAK an owl", prompt_weighting="a1111", **SIZE)
    assert "unet" in prepared
    assert "text_encoder" not in prepared


def test_prompts_without_weights_are_unchanged(ours: OrtDiffusionPipeline) -> None:
    arguments: dict[str, Any] = {"prompt": ["a red fox", "an owl"], "num_images_per_prompt": 2, **SIZE, "seed": 0}
    expected = ours(**arguments, clip_skip=1).images
    found = ours(**arguments, clip_skip=1, prompt_weighting="a1111").images
    assert psnr(found, expected) > MIN_PSNR_DB


def test_unknown_notation_is_refused(ours: OrtDiffusionPipeline) -> None:
    with refused(PromptError, "prompt_weighting is 'compel'", "a1111"):
        ours("a fox", prompt_weighting="compel", **SIZE)
    embeds, _ = ours.encode_prompt("a fox", do_classifier_free_guidance=False)
    with refused(PromptError, "prompt_weighting given"):
        ours(prompt_embeds=embeds, guidance_scale=1.0, prompt_weighting="a1111", **SIZE)


@pytest.mark.parametrize("prompt", ["a cat playing with a ball++ in the forest", "a (red fox)1.4 in deep-- snow"])
def test_the_image_of_compel_agrees(prompt: str, ours: OrtDiffusionPipeline, theirs: Any) -> None:
    """compel runs the text encoder of diffusers' pipeline, as in docs/how-to/prompt-weights.md."""
    with torch.inference_mode():
        embeds = CompelForSD(theirs)(prompt).embeds
    _, negative = ours.encode_prompt("", negative_prompt="blurry")
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": torch.from_numpy(np.asarray(negative))}
    found = assert_same_images(ours, theirs, **SIZE, prompt=..., **given)
    plain = prompt.translate({ord(sign): None for sign in "()+-."}).replace("14", "")
    assert psnr(found, ours(plain, negative_prompt="blurry", **SIZE, seed=0).images) < 60
