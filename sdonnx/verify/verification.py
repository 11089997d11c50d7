"""The settings of a verification, its findings, and the certificate that they are written to."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdonnx
from sdonnx.environment_record import environment
from sdonnx.folder.certificate import FORMAT, certified_files
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.reference.optimized_pipeline import reported_precision
from sdonnx.verify.judgement import AccuracyFinding, ComponentFinding, ImageFinding, Judgement, Thresholds

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageTriple", "Verification", "VerificationRequest"]


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
            "sdonnx": sdonnx.__version__,
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
