"""The engine of this project's pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engine import Engine, FolderKind, reported_precision
from sdonnx.benchmark.engines.generation_inputs import prompt_arguments, read_start_image
from sdonnx.benchmark.operator_times import profile_with_onnxruntime, profiling_sessions
from sdonnx.benchmark.results import Stages
from sdonnx.benchmark.stages import STAGES, StageClock
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import ProviderError
from sdonnx.folder.pipeline_folder import REPORT, read_json
from sdonnx.installation import cpu_or_cuda
from sdonnx.models.spec import Role

if TYPE_CHECKING:
    from PIL.Image import Image

    from sdonnx.runtime.device.session import Run

__all__ = ["OnnxRuntimeEngine"]


class OnnxRuntimeEngine(Engine):
    """Runs a folder written by `sdonnx.optimize_pipeline` with this project's pipeline."""

    name = "onnxruntime"
    reads = FolderKind.OPTIMIZED
    remedy = "export the pipeline if it is not yet exported, and run sdonnx optimize on the result"
    distributions = (("onnxruntime-gpu", "onnxruntime"),)
    modules = ("onnxruntime", "tokenizers")
    supports_adapters = True

    @classmethod
    def installation(cls) -> str:
        """Return how to install the packages of the engine."""
        return cpu_or_cuda()

    def check_folder(self) -> None:
        """Raise FolderError unless the folder is optimized, and ProviderError unless it targets the provider."""
        super().check_folder()
        target, requested = self.default_provider(), self.options.provider
        if requested not in (None, target):
            raise ProviderError(
                f"{self.folder.path} was optimized for {target}",
                f"a folder for {requested}",
                f"optimize the exported pipeline with --provider {requested}",
            )

    def default_provider(self) -> str:
        """Return the provider that the folder was optimized for, the only one that can run it."""
        return str(read_json(self.folder.path / REPORT).get("provider"))

    @property
    def precision(self) -> str:
        """The data type of the folder."""
        return reported_precision(self.folder)

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

    def generate(self, prompt: str | list[str], workload: Workload) -> list[Image]:
        """Generate images of a prompt or of several ones."""
        images: list[Image] = self._generate(self._pipeline, prompt, workload)
        return images

    def _generate(self, pipeline: Any, prompt: str | list[str], workload: Workload) -> Any:
        start: dict[str, Any] = {}
        if workload.image is not None:
            start = {"image": read_start_image(workload), "strength": workload.strength}
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
            **prompt_arguments(workload, len(self.options.adapters), self.family),
        ).images

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with marks on the device's stream."""
        device = self._pipeline.device
        clock = StageClock(device.mark, device.milliseconds)

        def observer(role: Role, _: Run) -> AbstractContextManager[None]:
            return clock.span(STAGES.get(role))

        self._pipeline.observe(observer)
        try:
            self.generate(prompt, workload)
        finally:
            self._pipeline.observe(None)
        return clock.stages()

    def kernels(self, prompt: str, workload: Workload) -> tuple[dict[str, float], int, str]:
        """Profile with torch on a GPU and with ONNX Runtime on a CPU."""
        if self.device == "cuda":
            return super().kernels(prompt, workload)
        with profiling_sessions() as (options, folder):
            pipeline = self._open(workload, options)
            return profile_with_onnxruntime(lambda: self._generate(pipeline, prompt, workload), pipeline.close, folder)

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return str(self._pipeline.scheduler)
