"""The engines: each draws the same images from the same weights, seeds and sampler.

An engine is an entry of `ENGINES`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from sdonnx.benchmark.engine import Engine, Workload
from sdonnx.benchmark.memory import first_gpu
from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder import REPORT, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["COMPILE_MODES", "ENGINES", "OnnxRuntimeEngine", "TorchEngine"]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
"""torch.compile's; max-autotune-no-cudagraphs is left out: it differs by what slows it down."""


class OnnxRuntimeEngine(Engine):
    """This project's pipeline, from a folder that `sdonnx.optimize_pipeline` wrote."""

    name = "onnxruntime"
    distributions = (("onnxruntime", "onnxruntime-gpu"),)
    modules = ("onnxruntime", "tokenizers")
    installation = "pip install 'sdonnx[cuda]', or 'sdonnx[cpu]' where there is no GPU"

    def check_folder(self, *, exported: bool) -> None:
        """Raise FolderError unless the folder is an optimized one."""
        if (self.folder.path / REPORT).is_file():
            return
        kind, remedy = (
            ("an exported pipeline, not optimized", "run python -m sdonnx.optimize_pipeline on it")
            if exported
            else ("a diffusers pipeline", "export and optimize it first, or measure it with -e torch")
        )
        raise FolderError(f"{self.folder.path} is {kind}", "an optimized pipeline for the engine onnxruntime", remedy)

    def default_provider(self) -> str:
        """Return the provider that the folder was optimized for; no other can run it."""
        return str(read_json(self.folder.path / REPORT).get("provider"))

    @property
    def precision(self) -> str:
        """The type that the folder was converted to."""
        return str(read_json(self.folder.path / REPORT).get("precision"))

    def load(self) -> None:
        """Load the graphs."""
        from sdonnx.runtime.pipeline import OrtDiffusionPipeline

        self._pipeline = OrtDiffusionPipeline.from_pretrained(self.folder.path, self.device)

    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return images of a prompt."""
        images: list[Image] = self._pipeline(
            prompt,
            workload.height,
            workload.width,
            workload.steps,
            workload.guidance_scale,
            num_images_per_prompt=workload.batch_size,
            seed=workload.seed,
        ).images
        return images

    def denoiser_calls(self, steps: int) -> int:
        """Return how often the denoiser is called."""
        from sdonnx.samplers import plan

        return len(plan(self._pipeline.scheduler_config, steps).timesteps)

    @property
    def scheduler(self) -> str:
        """The sampler's class."""
        return self._pipeline.scheduler


class TorchEngine(Engine):
    """diffusers' own pipeline, in fp16 on a GPU and in fp32 on a CPU.

    With a compile mode it is set up as diffusers' guide to fast inference says: channels_last, fused QKV
    projections, and the denoiser and the image decoder compiled whole.
    (https://huggingface.co/docs/diffusers/optimization/fp16)
    """

    name = "torch"
    distributions = (("torch",), ("diffusers",), ("transformers",))
    modules = ("torch", "diffusers", "transformers")
    installation = "pip install 'sdonnx[export]'"
    compile_modes = COMPILE_MODES

    def check_folder(self, *, exported: bool) -> None:
        """Raise FolderError unless the folder is a diffusers pipeline."""
        if exported or (self.folder.path / REPORT).is_file():
            raise FolderError(
                f"{self.folder.path} is an ONNX pipeline",
                "a diffusers pipeline for the engine torch",
                "give the folder that it was exported from, or measure it with -e onnxruntime",
            )

    def default_provider(self) -> str:
        """Return "cuda" where there is a GPU, else "cpu"."""
        return "cpu" if first_gpu() is None else "cuda"

    @property
    def precision(self) -> str:
        """What diffusers' users run with: fp16 on a GPU; CPUs compute in fp32."""
        return "float16" if self.device == "cuda" else "float32"

    def load(self) -> None:
        """Load the modules, and wrap those to be compiled; they are compiled at the first image."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"torch {torch.__version__} finds no CUDA here",
                "a GPU, its driver and a torch built for CUDA",
                "check nvidia-smi and the installation of torch, or pass -r cpu",
            )
        # As ONNX Runtime's benchmark.py has it: cuDNN times its algorithms in the first run.
        torch.backends.cudnn.benchmark = self.device == "cuda"
        self._torch = torch
        self._pipeline = self._open()
        if self.options.compile_mode is not None:
            self._compile(self.options.compile_mode)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _open(self) -> Any:
        import diffusers
        import transformers

        logs: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)
        for library in logs:
            library.disable_progress_bar()
        pipeline_class: Any = diffusers.DiffusionPipeline
        # Checkpoints bring a checker that this project's pipelines do without.
        unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        try:
            pipeline: Any = pipeline_class.from_pretrained(
                self.folder.path,
                dtype=getattr(self._torch, self.precision),
                use_safetensors=True,
                **(unchecked if "safety_checker" in self.folder.index else {}),
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FolderError(
                f"diffusers cannot load {self.folder.path} ({reason})",
                "a complete diffusers pipeline with safetensors weights",
                "copy the folder again",
            ) from error
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(self.device)

    def _compile(self, mode: str) -> None:
        torch, pipeline = self._torch, self._pipeline
        denoiser = self.denoiser.source
        for module in (getattr(pipeline, denoiser), pipeline.vae):
            module.to(memory_format=torch.channels_last)
        pipeline.fuse_qkv_projections()
        compiled = torch.compile(getattr(pipeline, denoiser), mode=mode, fullgraph=True)
        setattr(pipeline, denoiser, compiled)
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode=mode, fullgraph=True)

    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return images of a prompt, from the noise that the other engines start with."""
        torch, pipeline, factor = self._torch, self._pipeline, self._pipeline.vae_scale_factor
        channels = pipeline.vae.config.latent_channels
        size = (workload.batch_size, channels, workload.height // factor, workload.width // factor)
        generator = torch.Generator("cpu").manual_seed(workload.seed)
        # Drawn in float32: in half precision torch's stream is another one.
        noise = torch.randn(size, generator=generator).to(self.device, getattr(torch, self.precision))
        # Compiled modules guard on inference mode; diffusers calls everything without gradients anyway.
        eager = self.options.compile_mode is None
        with torch.inference_mode() if eager else contextlib.nullcontext():
            images: list[Image] = pipeline(
                prompt,
                height=workload.height,
                width=workload.width,
                num_inference_steps=workload.steps,
                guidance_scale=workload.guidance_scale,
                num_images_per_prompt=workload.batch_size,
                generator=generator,
                latents=noise,
            ).images
        return images

    def denoiser_calls(self, steps: int) -> int:
        """Return how often the denoiser is called."""
        self._pipeline.scheduler.set_timesteps(steps)
        return len(self._pipeline.scheduler.timesteps)

    @property
    def scheduler(self) -> str:
        """The sampler's class."""
        return type(self._pipeline.scheduler).__name__


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (OnnxRuntimeEngine, TorchEngine)}
