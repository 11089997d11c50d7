"""The settings of one run, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """The settings of one run, the same for every engine.

    Attributes:
        batch_size: number of images in a batch, of one prompt.
        height: in pixels.
        width: in pixels.
        steps: number of denoising steps.
        seed: seed of the noise, the same in every run.
        guidance_scale: the guidance scale; 7.5 as in ONNX Runtime's benchmark.py.
        scheduler: class or short name of the sampler; None for the folder's sampler.
        negative_prompt: the negative prompt.
        image: file of the start image (image to image); None to start from noise.
        strength: strength of image to image.
        ip_adapter_scale: scale of every image-prompt adapter; None without adapters.
        ip_adapter_image: file of the prompt image of every adapter; None for a synthetic image.
    """

    batch_size: int = 1
    height: int = 512
    width: int = 512
    steps: int = 50
    seed: int = 0
    guidance_scale: float = 7.5
    scheduler: str | None = None
    negative_prompt: str | None = None
    image: str | None = None
    strength: float = 0.8
    ip_adapter_scale: float | None = None
    ip_adapter_image: str | None = None

    @property
    def title(self) -> str:
        """The size as a heading."""
        adapted = "" if self.ip_adapter_scale is None else f", adapter scale {self.ip_adapter_scale:g}"
        return f"{self.height}x{self.width}, batch {self.batch_size}, {self.steps} steps{adapted}"
