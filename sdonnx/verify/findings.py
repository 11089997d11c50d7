"""Findings for components and images, and whether they meet the thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sdonnx.metrics import Proportion

__all__ = [
    "ROUNDING",
    "AccuracyFinding",
    "ComponentFinding",
    "ImageFinding",
    "Judgement",
    "Thresholds",
    "judge",
]

ROUNDING = 2.0**-11
"""Relative rounding error of float16, half a unit in the last place. Errors up to this value always pass.

It is the measure of folders in float32, too. Their errors are 1e-6 on a CPU, and up to 1e-3 on a GPU with TF32.
"""

_MAX_ERROR_WITHOUT_TORCH = 1e-2  # if torch in float16 returns NaN or Inf


@dataclass(frozen=True)
class Thresholds:
    """The thresholds that a folder must meet.

    Attributes:
        min_psnr_db: PSNR of an image to torch's image in the folder's type, or in float32 if torch in float16 has no
            image.
        max_error: error of a component relative to torch in float32, as a multiple of the error of torch in float16;
            of a folder in float32, as a multiple of `ROUNDING`.
        max_quantized_error: error of a quantized component relative to torch in float32. The default is nearly three
            times the error of a product of factors in e4m3, 3.7e-2
            (docs/decisions/0165-judge-quantized-folders-by-component.md).
        max_accuracy_loss: torch's share of images with a right colour, shape and so on, less the folder's share, in
            percentage points; for trained samples.
    """

    min_psnr_db: float = 35.0
    max_error: float = 2.0
    max_quantized_error: float = 0.1
    max_accuracy_loss: float = 1.5


@dataclass(frozen=True)
class ComponentFinding:
    """One output of a component, for one call.

    Attributes:
        component: name of the component.
        output: name of the output.
        shape: shape of the output.
        error: ||ours - float32|| / ||float32||; infinity if our output contains NaN or Inf.
        torch_error: the same error for torch in float16; None for a folder in float32.
        not_finite: share of NaN and Inf in our output.
        torch_not_finite: share of NaN and Inf in the output of torch in float16; None for a folder in float32.
        quantized: quantization types of the component; empty for none.
    """

    component: str
    output: str
    shape: tuple[int, ...]
    error: float
    torch_error: float | None
    not_finite: float
    torch_not_finite: float | None
    quantized: tuple[str, ...] = ()

    def limit(self, thresholds: Thresholds) -> float:
        """Return the largest error that passes."""
        if self.quantized:
            return thresholds.max_quantized_error
        if self.torch_error is None:
            return thresholds.max_error * ROUNDING
        if not math.isfinite(self.torch_error):
            return _MAX_ERROR_WITHOUT_TORCH
        return max(thresholds.max_error * self.torch_error, ROUNDING)

    def failure(self, thresholds: Thresholds) -> str | None:
        """Return the reason for which the output fails, or None if it passes."""
        name = f"{self.component}, {self.output} of {'x'.join(map(str, self.shape))}"
        if self.not_finite:
            return f"{name}: {100 * self.not_finite:.3g} % of its values are NaN or Inf"
        limit = self.limit(thresholds)
        if not self.error <= limit:
            reason = "in float32" if self.torch_error is None else f"torch in float16: {self.torch_error:.2e}"
            reason = f"in {', '.join(self.quantized)}" if self.quantized else reason
            return f"{name}: error {self.error:.2e}, at most {limit:.2e} ({reason})"
        return None


@dataclass(frozen=True)
class ImageFinding:
    """One image.

    Attributes:
        prompt: the prompt.
        seed: seed of the noise.
        psnr_db: our image to torch's image in the folder's type; None if they are identical.
        wide_psnr_db: our image to torch's image in float32.
        torch_psnr_db: torch's image in the folder's type to torch's image in float32.
        ssim: structural similarity of our image to torch's image in the folder's type.
        max_difference: largest difference to the image of torch in the folder's type, of values from 0 to 255.
        is_constant: whether our image has a single colour, such as black.
        torch_is_constant: whether the image of torch in the folder's type has a single colour.
        wide_is_constant: whether the image of torch in float32 has a single colour.
        quantized: whether a component is quantized. PSNR then is information: a small difference in an early step
            leads to another image of the same prompt.
        precision: the folder's type, float16 or float32.
    """

    prompt: str
    seed: int
    psnr_db: float | None
    wide_psnr_db: float | None
    torch_psnr_db: float | None
    ssim: float
    max_difference: int
    is_constant: bool
    torch_is_constant: bool
    wide_is_constant: bool
    quantized: bool = False
    precision: str = "float16"

    def compared(self) -> tuple[str, float | None]:
        """Return the precision of the image to compare with, and the PSNR: float32 if float16 has no image."""
        if self.torch_is_constant and not self.wide_is_constant:
            return "float32", self.wide_psnr_db
        return self.precision, self.psnr_db

    def failure(self, thresholds: Thresholds) -> str | None:
        """Return the reason for which the image fails, or None if it passes."""
        name = f"the image of {self.prompt!r}, seed {self.seed}"
        if self.is_constant and not self.wide_is_constant:
            return f"{name}: a single colour (black, or NaN)"
        if self.quantized:
            return None
        reference, decibels = self.compared()
        if decibels is not None and not decibels >= thresholds.min_psnr_db:
            return f"{name}: {decibels:.1f} dB to torch in {reference}, expected at least {thresholds.min_psnr_db:g} dB"
        return None


@dataclass(frozen=True)
class AccuracyFinding:
    """Images of held-out captions in which a measure is right, of the folder and of torch from the same noise.

    Attributes:
        measure: colour, shape, size, relation, or right if all are; an attribute of `SceneScore`.
        ours: images of the folder.
        torch: images of torch.
        precision: the precision of torch and of the folder, float16 or float32.
    """

    measure: str
    ours: Proportion
    torch: Proportion
    precision: str

    @property
    def loss(self) -> float:
        """The share of torch less the folder's share, in percentage points."""
        return 100 * (self.torch.right - self.ours.right) / self.ours.count

    def failure(self, thresholds: Thresholds) -> str | None:
        """Return the reason for which the folder fails, or None if it passes."""
        if self.loss <= thresholds.max_accuracy_loss:
            return None
        return (
            f"accuracy, {self.measure}: {self.ours} of {self.ours.count} captions, torch in {self.precision} "
            f"{self.torch}: a loss of {self.loss:.1f} points, expected at most {thresholds.max_accuracy_loss:g}"
        )


@dataclass(frozen=True)
class Judgement:
    """The reasons for which a folder fails; empty if it passes."""

    failures: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether there are no failures."""
        return not self.failures


def judge(
    components: list[ComponentFinding],
    images: list[ImageFinding],
    thresholds: Thresholds,
    accuracy: Sequence[AccuracyFinding] = (),
) -> Judgement:
    """Compare the findings with the thresholds. Without a component or without an image, the folder fails."""
    findings: list[ComponentFinding | ImageFinding | AccuracyFinding] = [*components, *images, *accuracy]
    failures = [failure for each in findings if (failure := each.failure(thresholds)) is not None]
    if not components or not images:
        failures.append("nothing was compared")
    return Judgement(tuple(dict.fromkeys(failures)))
