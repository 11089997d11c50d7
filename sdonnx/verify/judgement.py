"""What was found of a component and of an image, and whether that is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["ROUNDING", "ComponentFinding", "ImageFinding", "Judgement", "Thresholds", "judge"]

ROUNDING = 2.0**-11
"""Half a step of float16, relative to the number: an error that is no error in that type."""

_WITHOUT_TORCH = 1e-2  # where torch's own float16 has no number


@dataclass(frozen=True)
class Thresholds:
    """What a folder must reach.

    Attributes:
        least_psnr_db: of an image to that of torch in float16; in float32 where float16 has none.
        most_error: of a component to torch in float32, in errors of torch's float16.
    """

    least_psnr_db: float = 35.0
    most_error: float = 2.0


@dataclass(frozen=True)
class ComponentFinding:
    """One output of a component, for one call.

    Attributes:
        component: its name.
        output: the output's name.
        shape: of the output.
        error: ||ours - float32|| / ||float32||; infinity where ours holds NaN or infinity.
        torch_error: that of torch in float16.
        not_finite: the share of our numbers that are NaN or infinite.
        torch_not_finite: likewise of torch's in float16.
    """

    component: str
    output: str
    shape: tuple[int, ...]
    error: float
    torch_error: float
    not_finite: float
    torch_not_finite: float

    def limit(self, thresholds: Thresholds) -> float:
        """Return the largest error that passes."""
        if not math.isfinite(self.torch_error):
            return _WITHOUT_TORCH
        return max(thresholds.most_error * self.torch_error, ROUNDING)

    def failure(self, thresholds: Thresholds) -> str | None:
        """Return why it does not pass, None if it does."""
        name = f"{self.component}, {self.output} of {'x'.join(map(str, self.shape))}"
        if self.not_finite:
            return f"{name}: {100 * self.not_finite:.3g} % of its numbers are NaN or infinite"
        limit = self.limit(thresholds)
        if not self.error <= limit:
            return f"{name}: error {self.error:.2e}, at most {limit:.2e} (torch's float16: {self.torch_error:.2e})"
        return None


@dataclass(frozen=True)
class ImageFinding:
    """One image.

    Attributes:
        prompt: what was drawn.
        seed: from which noise.
        psnr_db: ours to torch's in float16; None for the same pixels.
        wide_psnr_db: ours to torch's in float32.
        torch_psnr_db: torch's in float16 to its own in float32.
        ssim: structural similarity of ours to torch's in float16.
        most: the largest difference of a value of 0 to 255 to torch's in float16.
        is_constant: ours shows one colour alone, as black ones do.
        torch_is_constant: torch's in float16 does.
        wide_is_constant: torch's in float32 does.
    """

    prompt: str
    seed: int
    psnr_db: float | None
    wide_psnr_db: float | None
    torch_psnr_db: float | None
    ssim: float
    most: int
    is_constant: bool
    torch_is_constant: bool
    wide_is_constant: bool

    def compared(self) -> tuple[str, float | None]:
        """Return what it is judged by, and the PSNR to that: float32 where torch's float16 has no image."""
        if self.torch_is_constant and not self.wide_is_constant:
            return "float32", self.wide_psnr_db
        return "float16", self.psnr_db

    def failure(self, thresholds: Thresholds) -> str | None:
        """Return why it does not pass, None if it does."""
        name = f"the image of {self.prompt!r}, seed {self.seed}"
        if self.is_constant and not self.wide_is_constant:
            return f"{name}: one colour alone (black, or NaN)"
        reference, decibels = self.compared()
        if decibels is not None and not decibels >= thresholds.least_psnr_db:
            return f"{name}: {decibels:.1f} dB to torch's {reference}, at least {thresholds.least_psnr_db:g} dB"
        return None


@dataclass(frozen=True)
class Judgement:
    """Whether a folder passes, and why not."""

    failures: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def judge(components: list[ComponentFinding], images: list[ImageFinding], thresholds: Thresholds) -> Judgement:
    """Judge what was found; without an image, or a component, nothing is proven."""
    failures = [failure for each in components if (failure := each.failure(thresholds)) is not None]
    failures += [failure for each in images if (failure := each.failure(thresholds)) is not None]
    if not components or not images:
        failures.append("nothing was compared")
    return Judgement(tuple(dict.fromkeys(failures)))
