"""What is timed: engines that draw the same images from the same weights.

An engine is an entry of `ENGINES`. The libraries that it draws with are imported by its `load` and not
before, so that their import counts as loading and no engine's process holds another's libraries.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sdonnx.benchmark.measure import first_gpu
from sdonnx.errors import FolderError, OptionError, ProviderError
from sdonnx.families import Role, family_of
from sdonnx.folder import ONNX_MODEL, REPORT, PipelineFolder, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "COMPILE_MODES",
    "ENGINES",
    "Engine",
    "EngineOptions",
    "OnnxRuntimeEngine",
    "TorchEngine",
    "Workload",
]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
"""torch.compile's; max-autotune-no-cudagraphs is left out: it differs by what slows it down."""

PROVIDERS = ("cuda", "cpu")


@dataclass(frozen=True)
class Workload:
    """What one run draws, alike for every engine.

    Attributes:
        batch_size: images drawn together, of one prompt.
        height: in pixels.
        width: in pixels.
        steps: denoising steps.
        seed: of the noise, the same in every run.
        guidance_scale: weight of the prompt; 7.5 is what ONNX Runtime's benchmark.py draws with.
    """

    batch_size: int = 1
    height: int = 512
    width: int = 512
    steps: int = 50
    seed: int = 0
    guidance_scale: float = 7.5


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made from.

    Attributes:
        folder: the pipeline, of the kind that the engine reads.
        provider: "cuda" or "cpu"; None for the engine's own choice.
        compile_mode: one of `COMPILE_MODES`, or None to compile nothing (torch).
    """

    folder: Path
    provider: str | None = None
    compile_mode: str | None = None


class Engine(abc.ABC):
    """Draws images with one library. Making one looks at the folder and the options and loads nothing.

    Attributes:
        name: what `-e` calls it.
        distributions: the packages that it draws with, as pip calls them; alternatives in one tuple. The
            first names the engine's version.
        modules: what it imports.
        installation: how they are installed.
        compile_modes: what `EngineOptions.compile_mode` can be.

    Raises:
        SdonnxError: a package is missing, or the folder or an option does not suit the engine.
    """

    name: ClassVar[str]
    distributions: ClassVar[tuple[tuple[str, ...], ...]]
    modules: ClassVar[tuple[str, ...]]
    installation: ClassVar[str]
    compile_modes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: EngineOptions) -> None:
        missing = [module for module in self.modules if importlib.util.find_spec(module) is None]
        if missing:
            raise OptionError(
                f"the engine {self.name} without {', '.join(missing)}",
                "these packages in the environment",
                self.installation,
            )
        if options.provider not in (None, *PROVIDERS):
            raise ProviderError(
                f"the provider {options.provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one"
            )
        if options.compile_mode not in (None, *self.compile_modes):
            raise OptionError(
                f"the compile mode {options.compile_mode!r} for the engine {self.name}",
                f"one of {', '.join(self.compile_modes)}" if self.compile_modes else "the engine torch",
                "pass one of these" if self.compile_modes else "leave out --enable_torch_compile",
            )
        self.options = options
        self.folder = PipelineFolder.open(options.folder)
        self.family = family_of(self.folder)
        denoiser = self.family.with_role(Role.DENOISER)
        self.check_folder(exported=(self.folder.path / denoiser.name / ONNX_MODEL).is_file())
        self.device = options.provider or self.default_provider()

    @property
    def version(self) -> str:
        """The version of the library that it draws with."""
        return next(importlib.metadata.version(name) for name in self.distributions[0] if _is_installed(name))

    @property
    def provider(self) -> str:
        """What the result calls the provider: the device, and how the model was compiled for it."""
        mode = self.options.compile_mode
        return self.device if mode is None else f"{self.device} compile {mode}"

    @property
    @abc.abstractmethod
    def precision(self) -> str:
        """The type that the denoiser computes in."""

    @abc.abstractmethod
    def check_folder(self, *, exported: bool) -> None:
        """Raise FolderError unless the folder is of the kind that the engine reads."""

    @abc.abstractmethod
    def default_provider(self) -> str:
        """Return the provider to use where none was asked for."""

    @abc.abstractmethod
    def load(self) -> None:
        """Import the library, read the weights and put them on the device.

        Raises:
            SdonnxError: the folder cannot be read, or the provider is not available.
        """

    @abc.abstractmethod
    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return `workload.batch_size` images of a prompt; the device is idle again by then."""

    @abc.abstractmethod
    def denoiser_calls(self, steps: int) -> int:
        """Return how often `draw` calls the denoiser for that many steps; the sampler decides."""

    @property
    @abc.abstractmethod
    def scheduler(self) -> str:
        """The sampler's class, as diffusers names it."""


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
        raise FolderError(
            f"{self.folder.path} is {kind}", "an optimized pipeline for the engine onnxruntime", remedy
        )

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
    (https://huggingface.co/docs/diffusers/optimization/fp16 and .../tutorials/fast_diffusion)
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
        from diffusers import DiffusionPipeline
        from diffusers.utils import logging
        from transformers.utils import logging as transformers_logging

        logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
        # Checkpoints bring a checker that this project's pipelines do without.
        unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        try:
            pipeline: Any = DiffusionPipeline.from_pretrained(
                self.folder.path,
                torch_dtype=getattr(self._torch, self.precision),
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
        denoiser = self.family.with_role(Role.DENOISER).source
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


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (OnnxRuntimeEngine, TorchEngine)}
