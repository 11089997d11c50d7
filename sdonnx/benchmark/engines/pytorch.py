"""diffusers' pipelines on torch, eager and compiled."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdonnx.benchmark.engine import Engine, FolderKind, is_importable
from sdonnx.benchmark.engines.generation_inputs import noise_in_float32, prompt_arguments, start_arguments
from sdonnx.benchmark.engines.patching import patched
from sdonnx.benchmark.memory import first_gpu
from sdonnx.benchmark.results import Stages
from sdonnx.benchmark.stages import DECODE, STEP, TEXT, StageClock
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, ProviderError
from sdonnx.installation import install_command
from sdonnx.models.spec import ComponentSpec

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["COMPILE_MODES", "TorchEngine"]

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
    compile_modes: ClassVar[tuple[str, ...]] = COMPILE_MODES
    supports_adapters = True

    @classmethod
    def installation(cls) -> str:
        """Return how to install the packages of the engine."""
        return install_command("export")

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError if a package is missing."""
        super().require_packages()
        if xformers and not is_importable("xformers"):
            raise OptionError("--use_xformers without xformers", "xformers installed", "pip install xformers")

    def default_provider(self) -> str:
        """Return "cuda" if there is a GPU, else "cpu"."""
        return "cpu" if first_gpu() is None else "cuda"

    @property
    def precision(self) -> str:
        """float16 on a GPU, as is common with diffusers; float32 on a CPU."""
        return "float16" if self.device == "cuda" else "float32"

    def load(self, workload: Workload) -> None:
        """Load the modules and wrap those to compile. The compilation runs with the first image."""
        start = time.perf_counter()
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"torch {torch.__version__} finds no CUDA here",
                "a GPU, its driver and a torch built for CUDA",
                "check nvidia-smi and the installation of torch, or pass -r cpu",
            )
        # As in ONNX Runtime's benchmark.py: cuDNN times its algorithms in the first run.
        torch.backends.cudnn.benchmark = self.device == "cuda"
        self._torch = torch
        with self._memory_errors():
            self._pipeline = self._open(workload)
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.pipeline_load_s = time.perf_counter() - start
            if self.options.xformers:
                self._pipeline.enable_xformers_memory_efficient_attention()
            if self.options.compile_mode is not None:
                self._compile(self.options.compile_mode, workload)
            if self.device == "cuda":
                torch.cuda.synchronize()

    def _open(self, workload: Workload) -> Any:
        import diffusers
        import transformers

        logs: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)
        for library in logs:
            library.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it logs that an image processor without torchvision is used
        from_image = workload.image is not None
        pipeline_class: Any = diffusers.AutoPipelineForImage2Image if from_image else diffusers.DiffusionPipeline
        # Published pipelines include a safety checker. It runs only if it does in all engines.
        unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        leave_out = "safety_checker" in self.folder.index and not self.options.safety_checker
        try:
            pipeline: Any = pipeline_class.from_pretrained(
                self.folder.path,
                dtype=getattr(self._torch, self.precision),
                use_safetensors=True,
                **(unchecked if leave_out else {}),
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FolderError(
                f"diffusers cannot load {self.folder.path} ({reason})",
                "a complete diffusers pipeline with safetensors weights",
                "copy the folder again",
            ) from error
        if workload.scheduler is not None:
            from sdonnx.samplers import config_for

            config = config_for(workload.scheduler, dict(pipeline.scheduler.config))
            pipeline.scheduler = getattr(diffusers, str(config["_class_name"])).from_config(config)
        pipeline.set_progress_bar_config(disable=True)
        if self.options.adapters:
            files = [Path(path).resolve() for path in self.options.adapters]
            places = [str(file.parent.parent) for file in files], [file.parent.name for file in files]
            try:
                pipeline.load_ip_adapter(*places, weight_name=[file.name for file in files])
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise FolderError(
                    f"diffusers cannot load {', '.join(self.options.adapters)} ({str(error).splitlines()[0]})",
                    "image-prompt adapters for the pipeline's denoiser, with image_encoder in the same folder",
                    "copy them again",
                ) from error
        return pipeline.to(self.device)

    def unload(self) -> None:
        """Delete the modules and release their memory."""
        del self._pipeline
        gc.collect()
        if self.device == "cuda":
            self._torch.cuda.empty_cache()

    def module(self, spec: ComponentSpec) -> Any:
        """Return the loaded module that a component was exported from."""
        return getattr(self._pipeline, spec.source)

    def _compile(self, mode: str, workload: Workload) -> None:
        torch, pipeline = self._torch, self._pipeline
        if mode == "max-autotune":
            inductor: Any = importlib.import_module("torch._inductor.config")  # settings of the guide
            inductor.conv_1x1_as_mm = inductor.coordinate_descent_tuning = True
            inductor.coordinate_descent_check_all_directions, inductor.epilogue_fusion = True, False
        if mode != "default" and workload.guidance_scale <= 1:
            # Without guidance samplers keep the prediction tensor, but the next replay overwrites its memory.
            step = pipeline.scheduler.step
            pipeline.scheduler.step = lambda prediction, *rest, **options: step(prediction.clone(), *rest, **options)
        denoiser = getattr(pipeline, self.denoiser.source)
        for module in (denoiser, pipeline.vae):
            module.to(memory_format=torch.channels_last)
        if not self.options.adapters:  # fusing would replace the adapters' attention
            for module in (denoiser, pipeline.vae):
                module.fuse_qkv_projections()
        settings = {"mode": mode, "fullgraph": True} | json.loads(self.options.compiler_config or "{}")
        if self.options.regional:
            denoiser.compile_repeated_blocks(**settings)
            return
        setattr(pipeline, self.denoiser.source, torch.compile(denoiser, **settings))
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, **settings)

    def generate(self, prompt: str | list[str], workload: Workload) -> list[Image]:
        """Generate images of a prompt or of several ones, from the same noise as the other engines."""
        torch, pipeline = self._torch, self._pipeline
        generator = torch.Generator("cpu").manual_seed(workload.seed)
        adapters = len(self.options.adapters)
        prompts = 1 if isinstance(prompt, str) else len(prompt)
        if adapters:
            pipeline.set_ip_adapter_scale([workload.ip_adapter_scale] * adapters)
        # Caption-based pipelines do not accept None.
        negative = workload.negative_prompt or "" if self.family.reads_captions else workload.negative_prompt
        # Compiled modules guard on inference mode, and diffusers always disables gradients.
        eager = self.options.compile_mode is None
        without = torch.inference_mode() if eager else contextlib.nullcontext()
        with without, self._memory_errors(), noise_in_float32(pipeline):
            images: list[Image] = pipeline(
                prompt,
                negative_prompt=negative,
                num_inference_steps=workload.steps,
                guidance_scale=workload.guidance_scale,
                num_images_per_prompt=workload.batch_size,
                generator=generator,
                **start_arguments(pipeline, workload, generator, getattr(torch, self.precision), prompts),
                **prompt_arguments(workload, adapters, self.family),
            ).images
        return images

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with events around the modules' calls."""
        torch = self._torch
        if self.device == "cuda":

            def mark() -> Any:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                return event

            def milliseconds(start: Any, end: Any) -> float:
                end.synchronize()
                return float(start.elapsed_time(end))

        else:
            import time

            def mark() -> Any:
                return time.perf_counter()

            def milliseconds(start: Any, end: Any) -> float:
                return float((end - start) * 1e3)

        clock = StageClock(mark, milliseconds)
        pipeline = self._pipeline
        watched = [(getattr(pipeline, spec.source), "forward", TEXT) for spec in self.family.text_encoders]
        watched += [(getattr(pipeline, self.denoiser.source), "forward", STEP), (pipeline.vae, "decode", DECODE)]
        if self.options.adapters:
            watched.append((pipeline.image_encoder, "forward", TEXT))
        with contextlib.ExitStack() as stack:
            for module, name, stage in watched:
                stack.enter_context(self.replaced(module, name, partial(clock.around, stage)))
            self.generate(prompt, workload)
        return clock.stages()

    def replaced(
        self, module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> AbstractContextManager[None]:
        """Replace a method of a module of the pipeline within a `with` block."""
        return patched(module, name, change)

    def after_warm_up(self) -> None:
        """Reset the peak memory: cuDNN's search for algorithms uses memory that generation does not."""
        if self.device == "cuda":
            self._torch.cuda.reset_peak_memory_stats()

    def allocator_bytes(self) -> int | None:
        """Return the peak memory of torch's allocator."""
        return int(self._torch.cuda.max_memory_allocated()) if self.device == "cuda" else None

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return type(self._pipeline.scheduler).__name__

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        try:
            yield
        except self._torch.OutOfMemoryError as error:
            reason = str(error).partition(". If reserved")[0]
            raise DeviceMemoryError(
                reason.rstrip("."), "enough memory on the device", "generate fewer images"
            ) from error
