"""Images of the trained samples in training: how they are generated, counted by relation, and shown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from sdonnx.sample.shapes.shape_judge import SceneScore, summarize
from sdonnx.sample.shapes.shape_scenes import PHRASES, read_caption

BOUNDS: Mapping[str, float] = MappingProxyType({"colour": 0.97, "shape": 0.95, "relation": 0.9})
"""Shares of right images among 2,000 held-out captions that trained weights reach before they ship."""


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


def summarize_relations(scores: Sequence[SceneScore], prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the same numbers as `summarize` of the measure "relation", for each relation of the captions."""
    relations = [read_caption(prompt).relation for prompt in prompts]
    found = {}
    for name in PHRASES:
        counted = summarize([score for score, relation in zip(scores, relations, strict=True) if relation == name])
        if "relation" in counted:
            found[name] = counted["relation"]
    return found


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
