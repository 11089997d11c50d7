"""Settings of a search for the nodes that must stay out of float16."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AUTO", "CALIBRATION_CALLS", "METHODS", "ProbeSettings"]

AUTO = "auto"
"""Value of `--force_fp32_ops` that starts the search."""

CALIBRATION_CALLS = 256
"""Calls of the denoiser that a calibration measures: four of each of 64 images."""

METHODS = ("max", "percentile", "mse")
"""How a calibration chooses the largest magnitude of a product's activations from those that were measured."""


@dataclass(frozen=True)
class ProbeSettings:
    """Images to generate in order to record the inputs of the components, and again to prove the result.

    Attributes:
        prompts: one image is generated for each; None for the default prompts of the pipeline's family.
        steps: denoising steps. A few are enough to cover all noise levels.
        size: height and width in pixels; None for the pipeline's default.
        seed: seed of the first image; the next image has the next number.
        calls: maximum number of calls of each component that are recorded, evenly spaced over all images and steps.
    """

    prompts: tuple[str, ...] | None = None
    steps: int = 4
    size: int | None = None
    seed: int = 0
    calls: int = 4
