"""Drawings of scenes: where shapes lie, and that the judge sees what is right and what is wrong in them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFilter
from shape_drawing import SceneTable, draw, place
from shape_evaluation import summarize_relations

from sdonnx.sample.shapes.shape_judge import (
    SceneScore,
    find_objects,
    judge_image,
    label_regions,
    score_images,
    summarize,
    wilson_interval,
)
from sdonnx.sample.shapes.shape_scenes import (
    COLOURS,
    IMAGE_SIZE,
    MIRRORED,
    PHRASES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    all_scenes,
    captions,
)

OF_EACH_KIND = 45  # scenes: 315 in all
FEW = 5  # every fifth scene
ALL_RIGHT = SceneScore(colour=True, shape=True, size=None, relation=None)

Change = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]


@functools.cache
def _drawings() -> tuple[tuple[Scene, npt.NDArray[np.uint8]], ...]:
    """Return scenes of every kind with their drawings (H,W,3)."""
    source = random.Random(5)
    everything = list(all_scenes())
    scenes: list[Scene] = []
    for relation in (None, *PHRASES):
        scenes += source.choices([scene for scene in everything if scene.relation == relation], k=OF_EACH_KIND)
    images = draw(place(SceneTable(scenes, "cpu"), torch.arange(len(scenes)), torch.Generator().manual_seed(7)))
    pixels = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return tuple(zip(scenes, pixels, strict=True))


def _pairs() -> list[tuple[Scene, npt.NDArray[np.uint8]]]:
    return [(scene, image) for scene, image in _drawings() if scene.second is not None]


def _is_of(image: npt.NDArray[np.uint8], colour: str) -> npt.NDArray[np.bool_]:
    """Return the pixels (H,W) that are nearer to this colour than to white."""
    values = image.astype(np.int64)
    return np.asarray(((values - COLOURS[colour]) ** 2).sum(-1) < ((values - 255) ** 2).sum(-1))


def test_shapes_stay_inside_the_image() -> None:
    for _, image in _drawings():
        edges = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        # Outlines are smooth: a corner of a triangle may tint the pixel next to it.
        assert (edges > 150).all()


@pytest.mark.parametrize("relation", ["left", "right", "above", "below"])
def test_shapes_keep_a_gap(relation: str) -> None:
    axis = 0 if relation in ("left", "right") else 1
    for scene, image in _pairs():
        if scene.relation != relation or scene.second is None:
            continue
        names = [scene.first.colour, scene.second.colour]
        if relation in ("right", "below"):
            names.reverse()
        # A pixel is of one colour only where the shapes' outlines do not mix.
        distances = [((image.astype(float) - COLOURS[name]) ** 2).sum(-1) < 50**2 for name in names]
        before, after = (np.flatnonzero(mask.any(axis)) for mask in distances)
        assert after.min() - before.max() > 3


def test_inner_shapes_are_surrounded() -> None:
    for scene, image in _pairs():
        if scene.relation not in ("inside", "around") or scene.second is None:
            continue
        inner, outer = (scene.first, scene.second) if scene.relation == "inside" else (scene.second, scene.first)
        found = {each.colour: each for each in find_objects(image)}
        mask = _is_of(image, inner.colour) & found[inner.colour].filled
        assert mask.sum() > 90
        assert found[outer.colour].filled[mask].all()


def _plain(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return image


def _blurred(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.7)))


def _noisy(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    noise = np.random.default_rng(int(image.sum())).normal(0, 8, image.shape)
    return np.clip(np.round(image + noise), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(("changed", "every"), [(_plain, 1), (_blurred, 4), (_noisy, 4)])
def test_the_judge_accepts_drawings_of_their_scenes(changed: Change, every: int) -> None:
    right = [judge_image(changed(image), scene).right for scene, image in _drawings()[::every]]
    assert sum(right) / len(right) >= 0.995


def _next_of(names: tuple[str, ...], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]


def test_the_judge_notices_a_wrong_colour() -> None:
    for scene, image in _drawings()[::FEW]:
        used = {thing.colour for thing in scene.things}
        free = next(colour for colour in COLOURS if colour not in used)
        score = judge_image(image, replace(scene, first=replace(scene.first, colour=free)))
        assert not score.colour
        assert not score.right


def test_the_judge_notices_a_wrong_shape() -> None:
    wrong = []
    for scene, image in _drawings()[::FEW]:
        last = scene.second or scene.first
        other = replace(last, shape=_next_of(SHAPES, last.shape))
        score = judge_image(image, Scene(other) if scene.second is None else replace(scene, second=other))
        wrong.append(score.colour and not score.shape and not score.right)
    assert all(wrong)


def test_the_judge_notices_a_wrong_size() -> None:
    sized = [(scene, image) for scene, image in _drawings()[::FEW] if scene.first.size is not None]
    assert len(sized) > 20
    for scene, image in sized:
        assert scene.first.size is not None
        score = judge_image(image, replace(scene, first=replace(scene.first, size=_next_of(SIZES, scene.first.size))))
        assert score.colour
        assert score.size is False
        assert not score.right


def test_the_judge_notices_a_wrong_relation() -> None:
    for number, (scene, image) in enumerate(_pairs()[::FEW]):
        assert scene.relation is not None
        others = [relation for relation in PHRASES if relation != scene.relation]
        for relation in (MIRRORED[scene.relation], others[number % len(others)]):
            assert judge_image(image, replace(scene, relation=relation)).relation is False


def test_the_judge_notices_an_extra_or_missing_shape() -> None:
    for scene, image in _drawings()[::FEW]:
        if scene.second is not None:
            changed = Scene(scene.first)
        else:
            colour = next(name for name in COLOURS if name != scene.first.colour)
            changed = Scene(scene.first, "left", Thing("circle", colour))
        assert not judge_image(image, changed).colour


def test_the_judge_notices_a_colour_that_captions_do_not_have() -> None:
    scene = Scene(Thing("square", "red"))
    image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 255, np.uint8)
    image[8:20, 8:20] = COLOURS["red"]
    assert judge_image(image, scene) == ALL_RIGHT
    image[40:52, 40:52] = (0, 255, 255)
    assert not judge_image(image, scene).colour


def test_the_judge_works_at_twice_the_size() -> None:
    for scene, image in _drawings()[::OF_EACH_KIND]:
        assert judge_image(image.repeat(2, 0).repeat(2, 1), scene).right


def test_regions_are_connected_by_sides() -> None:
    classes = np.array([[1, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]])
    # Row 2 starts a region that reaches the column at the right by the lowest row; (1, 1) touches it by a corner.
    assert label_regions(classes).tolist() == [[5, 5, 10, 15], [4, 5, 10, 15], [15, 10, 10, 15], [15, 15, 15, 15]]


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals(successes: int, count: int, low: float, high: float) -> None:
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "count"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_intervals_of_impossible_counts(successes: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} of {count}"):
        wilson_interval(successes, count)


def test_summaries_count_each_measure_and_relation() -> None:
    chosen = _drawings()[:: OF_EACH_KIND // 3]
    prompts = [captions(scene)[0] for scene, _ in chosen]
    images = np.stack([image for _, image in chosen])
    scores = score_images(images, prompts)
    # Images of other captions are wrong.
    scores[-1] = score_images(images[:1], prompts[-1:])[0]
    summary, relations = summarize(scores), summarize_relations(scores, prompts)
    assert summary["right"]["count"] == len(chosen)
    assert summary["right"]["right"] == len(chosen) - 1
    assert summary["relation"]["count"] == sum(each["count"] for each in relations.values()) == len(chosen) - 3
    assert {name: each["share"] for name, each in relations.items()} == {
        **dict.fromkeys(PHRASES, 1.0),
        "around": pytest.approx(2 / 3),
    }
