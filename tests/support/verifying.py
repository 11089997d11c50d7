"""A verification with known numbers and pictures, as if a folder had been verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sdonnx.metrics import Proportion
from sdonnx.sample.shapes.shape_judge import wilson_interval
from sdonnx.verify.findings import AccuracyFinding, ComponentFinding, ImageFinding, judge
from sdonnx.verify.verification import ImageTriple, Verification, VerificationRequest
from support.comparison import ENVIRONMENT, sample_image

__all__ = ["PROMPTS", "accuracy", "verification"]

PROMPTS = (
    "a photograph of an old lighthouse in a storm, waves breaking over the rocks",
    "a wide view of an old town by the sea at night, painted in oil: on the left a stone castle with a red light",
)


def accuracy(measure: str, right: int, torch_right: int, count: int) -> AccuracyFinding:
    """Return a finding with the Wilson intervals of these numbers of images."""
    ours, torch = (
        Proportion(number, count, number / count, *wilson_interval(number, count)) for number in (right, torch_right)
    )
    return AccuracyFinding(measure, ours, torch, "float16")


def verification(
    *, passing: bool = True, accuracies: Sequence[AccuracyFinding] = ()
) -> tuple[Verification, dict[str, Any]]:
    """Return a verification of two images, and its certificate. Unless it is to pass, the second image is another."""
    count = accuracies[0].ours.count if accuracies else 0
    request = VerificationRequest(prompts=PROMPTS, accuracy_prompts=count)
    found = Verification(Path("fast"), Path("sd15"), request, accuracy=list(accuracies))
    wide = sample_image()
    half = wide.copy()
    half[::3, ::2, 1] += 2
    for index, prompt in enumerate(PROMPTS):
        wrong = index == 1 and not passing
        ours = np.ascontiguousarray(wide[::-1]) if wrong else half
        found.pictures.append(ImageTriple(prompt, 0, *(Image.fromarray(each) for each in (wide, half, ours))))
        decibels = 9.2 if wrong else None
        found.images.append(ImageFinding(prompt, 0, decibels, decibels or 54.7, 54.7, 0.99, 0, False, False, False))
    for name, output, shape in (
        ("text_encoder", "last_hidden_state", (1, 77, 768)),
        ("unet", "out_sample", (2, 4, 64, 64)),
        ("vae_decoder", "sample", (1, 3, 512, 512)),
    ):
        found.components.append(ComponentFinding(name, output, shape, 1.1e-3, 1.0e-3, 0.0, 0.0))
    found.judgement = judge(found.components, found.images, found.request.thresholds, found.accuracy)
    certificate = {
        "time": "2026-11-05T12:00:00+00:00",
        "sdonnx": "0.2.0",
        "precision": "float16",
        "command": "sdonnx verify fast --against sd15",
        "environment": ENVIRONMENT,
        "files": {"unet/model.onnx": {}},
        "original": {"files": {"model_index.json": {}}},
    }
    return found, certificate
