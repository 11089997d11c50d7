"""The engine of this project's pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.operator_times import STAGES, StageClock
from sdonnx.benchmark.results import Stages
from sdonnx.folder.folder_version import FolderKind
from sdonnx.installation import cpu_or_cuda
from sdonnx.models.spec import Role
from sdonnx.reference.optimized_pipeline import OPTIMIZE, OptimizedPipeline
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

    from sdonnx.runtime.device.session import Run

__all__ = ["OnnxRuntimeEngine"]


class OnnxRuntimeEngine(Engine):
    """Runs a folder written by `sdonnx.optimize_pipeline` with this project's pipeline."""

    name = "onnxruntime"
    reads = FolderKind.OPTIMIZED
    remedy = OPTIMIZE
    distributions = (("onnxruntime-gpu", "onnxruntime"),)
    modules = ("onnxruntime", "tokenizers")
    installation = staticmethod(cpu_or_cuda)

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        super().__init__(options)
        self._source = OptimizedPipeline(
            options.folder, options.provider, adapters=options.adapters, safety_checker=options.safety_checker
        )

    @property
    def precision(self) -> str:
        """The data type of the folder."""
        return self._source.precision

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return str(self._source.pipeline.scheduler)

    def load(self, workload: Workload) -> None:
        """Load the graphs."""
        self._source.load(workload)

    def generate(self, prompt: str, workload: Workload) -> list[Image]:
        """Generate images of a prompt."""
        return self._source.generate(prompt, workload)

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with marks on the device's stream."""
        pipeline: Any = self._source.pipeline
        clock = StageClock(pipeline.device.mark, pipeline.device.milliseconds)

        def observer(role: Role, _: Run) -> AbstractContextManager[None]:
            return clock.span(STAGES.get(role))

        pipeline.observe(observer)
        try:
            self.generate(prompt, workload)
        finally:
            pipeline.observe(None)
        return clock.stages()
