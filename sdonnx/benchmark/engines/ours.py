"""This project's pipeline, from a folder that `sdonnx.optimize_pipeline` wrote."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engine import Engine, FolderKind, precision_of_report
from sdonnx.benchmark.kernels import profiled_by_onnxruntime, profiling_sessions
from sdonnx.benchmark.results import Stages, Workload
from sdonnx.benchmark.stages import STAGES, StageClock
from sdonnx.errors import FolderError, ProviderError
from sdonnx.families import Family, Role
from sdonnx.folder import REPORT, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

    from sdonnx.runtime.session import Run

__all__ = ["OnnxRuntimeEngine"]


class OnnxRuntimeEngine(Engine):
    """This project's pipeline, from a folder that `sdonnx.optimize_pipeline` wrote."""

    name = "onnxruntime"
    reads = FolderKind.OPTIMIZED
    remedy = "export the pipeline where it is none yet, and run python -m sdonnx.optimize_pipeline on that"
    distributions = (("onnxruntime-gpu", "onnxruntime"),)
    modules = ("onnxruntime", "tokenizers")
    installation = "pip install 'sdonnx[cuda]', or 'sdonnx[cpu]' where there is no GPU"
    takes_adapters = True
    prepares = True

    def prepare(self) -> None:
        """Check the GPU's kernels, whose verdict is then kept (`sdonnx.doctor`)."""
        from sdonnx.runtime.device import device_for
        from sdonnx.runtime.kernels import verdict_on

        verdict_on(device_for(self.device))

    def check_folder(self) -> None:
        """Raise FolderError unless the folder is optimized, ProviderError unless it is for the provider asked for."""
        super().check_folder()
        made_for, asked = self.default_provider(), self.options.provider
        if asked not in (None, made_for):
            raise ProviderError(
                f"{self.folder.path} was optimized for {made_for}",
                f"a folder for {asked}",
                f"optimize the exported pipeline with --provider {asked}",
            )

    def default_provider(self) -> str:
        """Return the provider that the folder was optimized for; no other can run it."""
        return str(read_json(self.folder.path / REPORT).get("provider"))

    @property
    def precision(self) -> str:
        """The type that the folder was converted to."""
        return precision_of_report(self.folder)

    def load(self, workload: Workload) -> None:
        """Load the graphs."""
        self._pipeline = self._open(workload)

    def _open(self, workload: Workload, session_options: Any = None) -> Any:
        from sdonnx.runtime.pipeline import OrtDiffusionPipeline

        checker: dict[str, Any] = {} if self.options.safety_checker else {"safety_checker": None}
        pipeline = OrtDiffusionPipeline.from_pretrained(
            self.folder.path, self.device, session_options=session_options, **checker
        )
        pipeline.set_progress_bar_config(disable=True)
        if workload.scheduler is not None:
            pipeline.scheduler = workload.scheduler
        return pipeline

    def unload(self) -> None:
        """Close the pipeline."""
        self._pipeline.close()

    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return images of a prompt."""
        images: list[Image] = self._draw(self._pipeline, prompt, workload)
        return images

    def _draw(self, pipeline: Any, prompt: str, workload: Workload) -> Any:
        start: dict[str, Any] = {}
        if workload.image is not None:
            start = {"image": starting_image(workload), "strength": workload.strength}
        if workload.ip_adapter_scale is not None:
            start["ip_adapter_scale"] = workload.ip_adapter_scale
        return pipeline(
            prompt,
            workload.height,
            workload.width,
            workload.steps,
            workload.guidance_scale,
            workload.negative_prompt,
            workload.batch_size,
            seed=workload.seed,
            **start,
            **prompting(workload, len(self.options.ip_adapters), self.family),
        ).images

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Draw with marks on the device's stream."""
        device = self._pipeline.device
        clock = StageClock(device.mark, device.milliseconds)

        def observer(role: Role, _: Run) -> AbstractContextManager[None]:
            return clock.span(STAGES.get(role))

        self._pipeline.observe(observer)
        try:
            self.draw(prompt, workload)
        finally:
            self._pipeline.observe(None)
        return clock.stages()

    def kernels(self, prompt: str, workload: Workload) -> tuple[dict[str, float], int, str]:
        """Count by torch's profiler on a GPU, by ONNX Runtime's on a CPU."""
        if self.device == "cuda":
            return super().kernels(prompt, workload)
        with profiling_sessions() as (options, folder):
            pipeline = self._open(workload, options)
            return profiled_by_onnxruntime(lambda: self._draw(pipeline, prompt, workload), pipeline.close, folder)

    @property
    def scheduler(self) -> str:
        """The sampler's class."""
        return str(self._pipeline.scheduler)


def starting_image(workload: Workload) -> Image:
    """Return the image that image to image starts from, at the workload's size.

    Raises:
        FolderError: it cannot be read.
    """
    from PIL import Image

    assert workload.image is not None
    return _read(workload.image).resize((workload.width, workload.height), Image.Resampling.LANCZOS)


def prompting(workload: Workload, adapters: int, family: Family) -> dict[str, Any]:
    """Return what else pipelines are told, by their own arguments: the image that every IP-Adapter is shown.

    Families that read captions get them as they are, and the size that the workload has.

    Raises:
        FolderError: an image cannot be read.
    """
    told: dict[str, Any] = {}
    if family.caption_tokens is not None:
        told["clean_caption"] = False
    if family.is_binned:
        told["use_resolution_binning"] = False
    if not adapters:
        return told
    image = _picture() if workload.ip_adapter_image is None else _read(workload.ip_adapter_image)
    return {**told, "ip_adapter_image": [image] * adapters}


def _picture() -> Image:
    """Draw soft spots of colour, the same on every machine."""
    import numpy as np
    from PIL import Image

    spots = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((224, 224), Image.Resampling.BICUBIC)


def _read(path: str) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except OSError as error:
        raise FolderError(f"{path} cannot be read as an image ({error})", "an image", "give one") from error
