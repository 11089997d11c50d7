"""Captions of drawings: the scenes they describe, those that are held out, and their tokens."""

from __future__ import annotations

import pytest

from sdonnx.errors import OptionError
from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_judge import held_out_captions
from sdonnx.sample.shapes.shape_scenes import (
    MIRRORED,
    PHRASES,
    VOCABULARY,
    Scene,
    Thing,
    all_scenes,
    captions,
    is_caption,
    is_held_out,
    read_caption,
)
from sdonnx.sample.tokenizer import build_tokenizer

SCENES = tuple(all_scenes())


def _mirrored(scene: Scene) -> Scene:
    assert scene.relation is not None
    assert scene.second is not None
    return Scene(scene.second, MIRRORED[scene.relation], scene.first)


def test_every_caption_describes_its_scene() -> None:
    written = {text: scene for scene in SCENES for text in captions(scene)}
    assert len(written) == sum(len(captions(scene)) for scene in SCENES)
    assert all(read_caption(text) == scene for text, scene in written.items())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a red",
        "a huge red circle",
        "a red circle near a blue square",
        "a red circle above",
        "a red circle above a blue square above a green cross",
    ],
)
def test_other_prompts_are_refused(text: str) -> None:
    assert not is_caption(text)
    with pytest.raises(OptionError, match="a caption such as"):
        read_caption(text)


def test_capitals_and_spaces_around_a_caption_are_accepted() -> None:
    assert read_caption("  A small Red circle over a blue SQUARE ") == Scene(
        Thing("circle", "red", "small"), "above", Thing("square", "blue")
    )


def test_a_scene_is_held_out_from_both_of_its_sides_and_in_all_sizes() -> None:
    for scene in SCENES:
        if scene.second is not None:
            assert is_held_out(_mirrored(scene)) == is_held_out(scene)
        without_sizes = [Thing(thing.shape, thing.colour) for thing in scene.things]
        assert is_held_out(Scene(without_sizes[0], scene.relation, *without_sizes[1:])) == is_held_out(scene)


@pytest.mark.parametrize("relation", [None, *PHRASES])
def test_some_scenes_of_each_relation_are_held_out(relation: str | None) -> None:
    held_out = [is_held_out(scene) for scene in SCENES if scene.relation == relation]
    # 15 % of 24 shapes or of 480 pairs: the hash chooses them, so that the share varies.
    assert 0.05 < sum(held_out) / len(held_out) < 0.3


def test_evaluation_uses_held_out_captions_of_every_relation() -> None:
    chosen = [read_caption(text) for text in held_out_captions(200, seed=3)]
    assert all(is_held_out(scene) for scene in chosen)
    counts = {relation: sum(scene.relation == relation for scene in chosen) for relation in (None, *PHRASES)}
    assert all(counts[relation] == (20 if relation is None else 30) for relation in counts)
    assert held_out_captions(200, seed=3) != held_out_captions(200, seed=4)


@pytest.mark.parametrize("name", TRAINED)
def test_each_word_is_a_token(name: str) -> None:
    spec = TRAINED[name].tokenizers["tokenizer"]
    tokenizer = build_tokenizer(spec)
    longest = max((text for scene in SCENES for text in captions(scene)), key=lambda text: len(text.split()))
    for text in (*VOCABULARY, longest):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.split())
        assert tokenizer.unk_token_id not in ids or tokenizer.unk_token_id == tokenizer.eos_token_id
        assert str(tokenizer.decode(ids)).strip() == text
    assert len({tuple(tokenizer(word).input_ids) for word in VOCABULARY}) == len(VOCABULARY)
