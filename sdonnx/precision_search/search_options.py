"""Settings of searches and calibrations, and bounds on the effect of quantized modules."""

from __future__ import annotations

from dataclasses import dataclass

from sdonnx.errors import OptionError

__all__ = ["AUTO", "CALIBRATION_CALLS", "METHODS", "Bounds", "ProbeSettings"]

AUTO = "auto"
"""Value of `--force_fp32_ops` that starts the search."""

CALIBRATION_CALLS = 256
"""Calls of the denoiser that a calibration measures: four of each of 64 images."""

METHODS = ("max", "percentile", "mse")
"""How a calibration chooses the largest magnitude of a matmul's activations from those that were measured."""


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


_MAX_PSNR_DB = 144.0  # of a difference of 2**-24, half a unit in the last place of a float32 number just below 1


@dataclass(frozen=True)
class Bounds:
    """Bounds that a set of quantized modules must meet; None for no bound. Without any, the error is bounded.

    Attributes:
        max_error: largest relative error of the denoiser's output on recorded inputs, between 0 and 1.
        min_psnr_db: smallest PSNR of a generated image to the image in float32, in dB.
        min_accuracy: smallest share of images that show their captions, in percent, for trained samples.
        captions: number of captions to judge, by one image each.
        caption_steps: denoising steps of these images.

    Raises:
        OptionError: a bound is NaN or impossible, or a number is not positive.
    """

    max_error: float | None = None
    min_psnr_db: float | None = None
    min_accuracy: float | None = None
    captions: int = 100
    caption_steps: int = 20

    DEFAULT_MAX_ERROR = 0.1
    """The largest error of a quantized component that `sdonnx verify` accepts by default."""

    def __post_init__(self) -> None:
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise OptionError(f"--max_error {self.max_error:g}", "a number between 0 and 1")
        if self.min_psnr_db is not None and not 0 < self.min_psnr_db <= _MAX_PSNR_DB:
            expected = f"a number of dB above 0 and up to {_MAX_PSNR_DB:g}, the rounding of float32"
            raise OptionError(f"--min_psnr {self.min_psnr_db:g}", expected)
        if self.min_accuracy is not None and not 1 <= self.min_accuracy <= 100:
            expected = "a percentage from 1 to 100"
            raise OptionError(f"--min_accuracy {self.min_accuracy:g}", expected, "pass for example 95 for 95 %")
        if self.captions < 1:
            raise OptionError(f"--accuracy_prompts {self.captions}", "a number of at least 1")
        if self.caption_steps < 1:
            raise OptionError(f"--calibration_steps {self.caption_steps}", "a number of at least 1")
        if self.max_error is None and not self.needs_images:
            object.__setattr__(self, "max_error", self.DEFAULT_MAX_ERROR)

    @property
    def needs_images(self) -> bool:
        """Whether images have to be generated for each set of modules."""
        return self.min_psnr_db is not None or self.min_accuracy is not None

    def as_json(self) -> dict[str, float]:
        """Return the bounds that were given as JSON values."""
        bounds = {"max_error": self.max_error, "min_psnr_db": self.min_psnr_db, "min_accuracy": self.min_accuracy}
        found = {name: bound for name, bound in bounds.items() if bound is not None}
        captions = {"captions": self.captions, "caption_steps": self.caption_steps}
        return found if self.min_accuracy is None else found | captions

    def __str__(self) -> str:
        """Return the bounds in words."""
        bounds = (
            ("error of at most {:g}", self.max_error),
            ("PSNR of at least {:g} dB", self.min_psnr_db),
            ("accuracy of at least {:g} %", self.min_accuracy),
        )
        return ", ".join(text.format(bound) for text, bound in bounds if bound is not None)
