"""The settings of a verification, its findings with their thresholds, and the certificate with them."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx._version import __version__
from sdonnx.environment_record import environment
from sdonnx.folder.certificate import FORMAT, certified_files
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.metrics import Proportion
from sdonnx.reference.optimized_pipeline import reported_precision

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "ROUNDING",
    "AccuracyFinding",
    "ComponentFinding",
    "ImageFinding",
    "ImageTriple",
    "Judgement",
    "Thresholds",
    "Verification",
    "VerificationRequest",
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
            times the error of a matmul of factors in e4m3, 3.7e-2
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


@dataclass(frozen=True)
class VerificationRequest:
    """The settings of a verification.

    Attributes:
        prompts: the prompts; None for the default prompts of the folder's family.
        images: number of images for each prompt, with consecutive seeds.
        seed: the first seed.
        steps: number of denoising steps.
        height: in pixels; None for the pipeline's default.
        width: in pixels; None for the pipeline's default.
        guidance_scale: the guidance scale; None for the trained sample's scale, or the family's default.
        scheduler: the sampler of all pipelines; None for the folder's sampler.
        ip_adapters: files of the image-prompt adapters that the folder was exported with.
        ip_adapter_scale: scale of the adapters.
        provider: "cuda" or "cpu"; None for the folder's target.
        accuracy_prompts: number of held-out captions to judge, by one image each; None for the default number if the
            pipeline is a trained sample, or else none.
        thresholds: the thresholds to meet.
    """

    prompts: tuple[str, ...] | None = None
    images: int = 1
    seed: int = 0
    steps: int = 20
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    ip_adapters: tuple[str, ...] = ()
    ip_adapter_scale: float = 0.6
    provider: str | None = None
    accuracy_prompts: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True)
class ImageTriple:
    """The images of one prompt and seed: torch in float32, and in float16 for folders in it, and ours."""

    prompt: str
    seed: int
    wide: Image
    half: Image | None
    ours: Image


@dataclass
class Verification:
    """The findings of a verification.

    Attributes:
        folder: the optimized folder.
        original: the diffusers pipeline that the folder was made from.
        request: the settings.
        components: findings by call and output.
        images: findings by prompt and seed.
        pictures: the images.
        accuracy: findings by measure, for trained samples.
        judgement: whether the folder passes.
        seconds: duration of each part.
        files: hashes of the folder's files, taken before the comparison.
        quantized: quantization types by component; empty if none is quantized.
    """

    folder: Path
    original: Path
    request: VerificationRequest
    components: list[ComponentFinding] = field(default_factory=list)
    images: list[ImageFinding] = field(default_factory=list)
    pictures: list[ImageTriple] = field(default_factory=list)
    accuracy: list[AccuracyFinding] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    quantized: dict[str, list[str]] = field(default_factory=dict)

    def certificate(self) -> dict[str, Any]:
        """Return the content of `certificate.json`. Hashes the files of the original."""
        request = asdict(self.request)
        thresholds = request.pop("thresholds")
        return {
            "format": FORMAT,
            "sdonnx": __version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "passed": self.judgement.passed,
            "failures": list(self.judgement.failures),
            "thresholds": {
                "least_psnr_db": thresholds["min_psnr_db"],
                "most_error": thresholds["max_error"],
                "max_accuracy_loss": thresholds["max_accuracy_loss"],
            }
            | ({"most_quantized_error": thresholds["max_quantized_error"]} if self.quantized else {}),
            "request": request,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "precision": reported_precision(PipelineFolder.open(self.folder)),
            "quantized": self.quantized,
            "environment": environment(),
            "components": [asdict(each) | {"limit": each.limit(self.request.thresholds)} for each in self.components],
            "images": [
                {"most" if name == "max_difference" else name: value for name, value in asdict(each).items()}
                for each in self.images
            ],
            "accuracy": [asdict(each) | {"loss": each.loss} for each in self.accuracy],
            "original": {"name": self.original.resolve().name, "files": certified_files(self.original)},
            "files": self.files,
        }
