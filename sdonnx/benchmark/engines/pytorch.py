"""diffusers' pipelines on torch: eager, compiled by torch.compile, and compiled by `sdonnx.compile_pipe`."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.operator_times import DECODE, STEP, TEXT, StageClock, host_clock
from sdonnx.benchmark.results import Stages
from sdonnx.errors import OptionError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.installation import cpu_or_cuda, install_command, is_importable
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["COMPILE_MODES", "SdonnxCompileEngine", "TorchEngine"]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of torch.compile, without max-autotune-no-cudagraphs, which is slower than max-autotune."""


class TorchEngine(Engine):
    """diffusers' pipeline, in fp16 on a GPU and in fp32 on a CPU.

    With a compile mode the settings follow diffusers' guide to fast inference: channels_last, fused QKV
    projections, and torch.compile for the whole denoiser and image decoder or, with regional compilation, only for the
    denoiser's repeated blocks. (https://huggingface.co/docs/diffusers/optimization/fp16)
    """

    name = "torch"
    reads = FolderKind.DIFFUSERS
    remedy = "pass the folder that it was exported from, or use -e onnxruntime"
    distributions: ClassVar[tuple[tuple[str, ...], ...]] = (("torch",), ("diffusers",), ("transformers",))
    modules: ClassVar[tuple[str, ...]] = ("torch", "diffusers", "transformers")
    installation = staticmethod(lambda: install_command("export"))

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        super().__init__(options)
        self._source = DiffusersPipeline(
            options.folder,
            self.device,
            self.precision,
            adapters=options.adapters,
            safety_checker=options.safety_checker,
        )

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError if a package is missing."""
        super().require_packages()
        if xformers and not is_importable("xformers"):
            raise OptionError("--use_xformers without xformers", "xformers installed", "pip install xformers")

    @property
    def precision(self) -> str:
        """float16 on a GPU, as is common with diffusers; float32 on a CPU."""
        return "float16" if self.device == "cuda" else "float32"

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return type(self._source.pipeline.scheduler).__name__

    def load(self, workload: Workload) -> None:
        """Load the modules and wrap those to compile. The compilation runs with the first image."""
        start = time.perf_counter()
        self._source.load(workload)
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        self.pipeline_load_s = time.perf_counter() - start
        with self._source.memory_errors():
            if self.options.xformers:
                self._source.pipeline.enable_xformers_memory_efficient_attention()
            if self.options.compile_mode is not None:
                self._compile(self.options.compile_mode, workload)
            if self.device == "cuda":
                torch.cuda.synchronize()

    def _compile(self, mode: str, workload: Workload) -> None:
        import torch

        pipeline = self._source.pipeline
        if mode == "max-autotune":
            inductor: Any = importlib.import_module("torch._inductor.config")  # settings of the guide
            inductor.conv_1x1_as_mm = inductor.coordinate_descent_tuning = True
            inductor.coordinate_descent_check_all_directions, inductor.epilogue_fusion = True, False
        if mode != "default" and workload.guidance_scale <= 1:
            # Without guidance samplers keep the prediction tensor, but the next replay overwrites its memory.
            step = pipeline.scheduler.step
            pipeline.scheduler.step = lambda prediction, *rest, **options: step(prediction.clone(), *rest, **options)
        denoiser = self._source.denoiser
        for module in (denoiser, pipeline.vae):
            module.to(memory_format=torch.channels_last)
            if not self.options.adapters:  # fusing would replace the adapters' attention
                module.fuse_qkv_projections()
        settings = {"mode": mode, "fullgraph": True} | json.loads(self.options.compiler_config or "{}")
        if self.options.regional:
            denoiser.compile_repeated_blocks(**settings)
            return
        setattr(pipeline, self.denoiser.source, torch.compile(denoiser, **settings))
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, **settings)

    def generate(self, prompt: str, workload: Workload) -> list[Image]:
        """Generate images of a prompt, from the same noise as the other engines."""
        import torch

        # Compiled modules guard on inference mode, and diffusers always disables gradients.
        with torch.inference_mode() if self.options.compile_mode is None else contextlib.nullcontext():
            return self._source.generate(prompt, workload)

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with events around the modules' calls."""
        import torch

        def mark() -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def milliseconds(start: Any, end: Any) -> float:
            end.synchronize()
            return float(start.elapsed_time(end))

        clock = StageClock(mark, milliseconds) if self.device == "cuda" else host_clock()
        pipeline = self._source.pipeline
        watched = [(getattr(pipeline, spec.source), "forward", TEXT) for spec in self.family.text_encoders]
        watched += [(self._source.denoiser, "forward", STEP), (pipeline.vae, "decode", DECODE)]
        if self.options.adapters:
            watched.append((pipeline.image_encoder, "forward", TEXT))
        with contextlib.ExitStack() as stack:
            for module, name, stage in watched:
                stack.enter_context(self.replaced(module, name, partial(clock.around, stage)))
            self.generate(prompt, workload)
        return clock.stages()

    def replaced(
        self, module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> AbstractContextManager[Any]:
        """Replace a method of a module of the pipeline within a `with` block."""
        return mock.patch.object(module, name, change(getattr(module, name)))

    def after_warm_up(self) -> None:
        """Reset the peak memory: cuDNN's search for algorithms uses memory that generation does not."""
        import torch

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def allocator_bytes(self) -> int | None:
        """Return the peak memory of torch's allocator."""
        import torch

        return int(torch.cuda.max_memory_allocated()) if self.device == "cuda" else None


class SdonnxCompileEngine(TorchEngine):
    """diffusers' pipeline, loaded as the engine torch loads it, with the components that `compile_pipe` can compile.

    The others stay in torch.
    """

    name = "sdonnx-compile"
    distributions = (("onnxruntime-gpu", "onnxruntime"), *TorchEngine.distributions)
    modules = (*TorchEngine.modules, "onnxruntime", "onnxscript")
    installation = staticmethod(lambda: f"{cpu_or_cuda()}, and {install_command('export')}")

    def load(self, workload: Workload) -> None:
        """Load the modules and compile them."""
        super().load(workload)
        # Imported here, because it imports torch, which counts towards the load time of the pipeline.
        from sdonnx.compiler.compile_pipe import compile_pipe

        with self._source.memory_errors():
            self._source.pipeline = compile_pipe(self._source.pipeline, options=self.options.compiler_config)

    def allocator_bytes(self) -> int | None:
        """Return None: the peak of ONNX Runtime's allocator, which has most of the memory, is unknown."""
        return None

    def replaced(
        self, module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> AbstractContextManager[Any]:
        """Replace a method of a drop-in in its class: another attribute of a module would be a change of the module."""
        from sdonnx.compiler.compile_module import CompiledModule

        return super().replaced(type(module) if isinstance(module, CompiledModule) else module, name, change)
