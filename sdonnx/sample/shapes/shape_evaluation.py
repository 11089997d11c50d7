"""Measure how often a pipeline draws what a caption says."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from sdonnx.sample.shapes.shape_judge import SceneScore, judge_image, wilson_interval
from sdonnx.sample.shapes.shape_scenes import PHRASES, Scene, all_scenes, captions, is_held_out, read_caption

__all__ = [
    "BOUNDS",
    "MEASURES",
    "contact_sheet",
    "draw_batches",
    "generate",
    "held_out_captions",
    "score_images",
    "summarize",
    "summarize_relations",
]

MEASURES = ("colour", "shape", "size", "relation", "right")
"""The attributes of `SceneScore` that are counted."""

BOUNDS: Mapping[str, float] = MappingProxyType({"colour": 0.97, "shape": 0.95, "relation": 0.9})
"""Shares of right images among 2,000 held-out captions that trained weights reach before they ship."""

_SINGLE_SHARE = 0.1

_BATCH = 20


def held_out_captions(count: int, seed: int) -> tuple[str, ...]:
    """Return captions that training leaves out: a tenth with one shape, and the others equally of each relation."""
    source = random.Random(seed)
    by_relation: dict[str | None, list[Scene]] = {}
    for scene in all_scenes():
        if is_held_out(scene):
            by_relation.setdefault(scene.relation, []).append(scene)
    single = round(count * _SINGLE_SHARE)
    relations = [None] * single + list(itertools.islice(itertools.cycle(PHRASES), count - single))
    return tuple(source.choice(captions(source.choice(by_relation[relation]))) for relation in relations)


def generate(
    pipeline: Any, prompts: Sequence[str], *, steps: int, guidance_scale: float, seed: int, batch: int
) -> npt.NDArray[np.uint8]:
    """Return an image (N,H,W,3) for each prompt, by a pipeline of diffusers; the noise is from the CPU, by the seed."""
    import torch

    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    side, channels = denoiser.config.sample_size, denoiser.config.in_channels
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn(len(prompts), channels, side, side, generator=generator)
    pixels = side * pipeline.vae_scale_factor
    # PixArt replaces sizes by its training sizes otherwise.
    extra = {} if hasattr(pipeline, "unet") else {"use_resolution_binning": False, "clean_caption": False}
    images = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        made = pipeline(
            part,
            height=pixels,
            width=pixels,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            latents=noise[start : start + batch].to(pipeline.device, denoiser.dtype),
            output_type="np",
            **extra,
        ).images
        images.append(np.round(made * 255).clip(0, 255).astype(np.uint8))
    return np.concatenate(images)


def draw_batches(
    generate: Callable[[list[str], int], Sequence[Image.Image]], prompts: Sequence[str], seed: int
) -> list[npt.NDArray[np.uint8]]:
    """Return an image (H,W,3) of each caption. The same seed gives the same noise to each engine.

    Args:
        generate: returns an image of each of several prompts, from a seed.
        prompts: the captions.
        seed: the first seed; each batch has another one.
    """
    images = []
    for start in range(0, len(prompts), _BATCH):
        # Of a batch, the images are drawn from consecutive random numbers of one seed.
        images += [
            np.asarray(each.convert("RGB")) for each in generate(list(prompts[start : start + _BATCH]), seed + start)
        ]
    return images


def score_images(
    images: Iterable[npt.NDArray[np.uint8]], prompts: Sequence[str], processes: int = 1
) -> list[SceneScore]:
    """Judge an image (H,W,3) for each caption.

    Args:
        images: the images.
        prompts: their captions.
        processes: number of processes; more than one needs a main module that can be imported.
    """
    judged = [(image, read_caption(prompt)) for image, prompt in zip(images, prompts, strict=True)]
    if processes == 1:
        return [judge_image(image, scene) for image, scene in judged]
    # Not by fork: a forked process must not use the GPU of its parent.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(judge_image, *zip(*judged, strict=True), chunksize=25))


def summarize(scores: Sequence[SceneScore]) -> dict[str, dict[str, Any]]:
    """Return `right`, `count`, `share` and the Wilson interval `low` to `high` of each of `MEASURES` that applies."""
    measured = {measure: [getattr(score, measure) for score in scores] for measure in MEASURES}
    return {measure: counted for measure, values in measured.items() if (counted := _count(values)) is not None}


def summarize_relations(scores: Sequence[SceneScore], prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the same numbers as `summarize` of the measure "relation", for each relation of the captions."""
    relations = [read_caption(prompt).relation for prompt in prompts]
    by_relation = {
        name: [score.relation for score, relation in zip(scores, relations, strict=True) if relation == name]
        for name in PHRASES
    }
    return {name: counted for name, values in by_relation.items() if (counted := _count(values)) is not None}


def _count(values: Iterable[bool | None]) -> dict[str, Any] | None:
    """Return how many of the values are true, without those that are None; None if there are no others."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = wilson_interval(sum(known), len(known))
    return {"right": sum(known), "count": len(known), "share": sum(known) / len(known), "low": low, "high": high}


def contact_sheet(rows: Mapping[str, tuple[Sequence[str], npt.NDArray[np.uint8]]], columns: int) -> Image.Image:
    """Return images at twice their size with captions, under a title for each group of images."""
    cell, text, title = 2 * 64, 34, 18
    groups = {name: (prompts, images) for name, (prompts, images) in rows.items() if len(images)}
    heights = [title + -(-len(images) // columns) * (cell + text) for _, images in groups.values()]
    sheet = Image.new("RGB", (columns * cell, sum(heights)), "white")
    canvas = ImageDraw.Draw(sheet)
    top = 0
    for (name, (prompts, images)), height in zip(groups.items(), heights, strict=True):
        canvas.text((4, top + 2), name, fill="black")
        for index, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            left, upper = index % columns * cell, top + title + index // columns * (cell + text)
            sheet.paste(Image.fromarray(image).resize((cell, cell), Image.Resampling.NEAREST), (left, upper))
            canvas.multiline_text((left + 3, upper + cell + 1), _wrapped(prompt), fill="black", font_size=9, spacing=1)
        top += height
    return sheet


def _wrapped(prompt: str) -> str:
    return "\n".join(textwrap.wrap(prompt, 26)[:3])
