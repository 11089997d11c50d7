"""optimum-onnx: diffusers' pipelines with ONNX Runtime sessions.

    sdonnx benchmark -p sd15 -e onnxruntime lab/optimum_engine.py:optimum --python optimum=other-venv/bin/python

optimum-onnx requires transformers < 4.58, so it cannot share an environment with the current exporter. The workarounds
in this module apply to optimum-onnx 0.1.0 (optimum/onnxruntime/base.py and modeling_diffusion.py).
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

from sdonnx.benchmark.engine import Engine, EngineOptions
from sdonnx.benchmark.operator_times import STAGES, host_clock
from sdonnx.benchmark.results import Stages
from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, ProviderError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.reference.diffusers_pipeline import set_scheduler
from sdonnx.reference.workload import Workload, call_arguments, start_arguments

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ENGINES", "OptimumEngine"]


class OptimumEngine(Engine):
    """Runs an exported folder with optimum-onnx and its defaults: bound buffers on a GPU, numpy on a CPU."""

    name = "optimum"
    reads = FolderKind.EXPORTED
    remedy = "pass the folder written by sdonnx export"
    distributions = (
        ("optimum-onnx",),
        ("onnxruntime-gpu", "onnxruntime"),
        ("diffusers",),
        ("transformers",),
        ("torch",),
    )
    modules = ("optimum.onnxruntime", "onnxruntime", "diffusers", "transformers", "torch")
    installation = staticmethod(
        lambda: "pip install 'optimum-onnx[onnxruntime-gpu]' diffusers torch, in a separate environment"
    )

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        # optimum supports torch's safety checker, but no ONNX one, and no image-prompt adapters.
        for option, given in (("--enable_safety_checker", options.safety_checker), ("--ip_adapter", options.adapters)):
            if given:
                raise OptionError(f"{option} for the engine {self.name}", "another engine", "omit one")
        super().__init__(options)

    @property
    def precision(self) -> str:
        """The data type of the exported denoiser."""
        return str(self._denoiser.dtype).removeprefix("torch.")

    @property
    def _denoiser(self) -> Any:
        return getattr(self._pipeline, self.denoiser.name)

    def load(self, workload: Workload) -> None:
        """Load the graphs into sessions with optimum's default options."""
        import torch

        from sdonnx.runtime.device.device import device_for

        self._torch = torch
        self._device = device_for(self.device)  # checks the provider, and loads the CUDA libraries
        if self.device == "cuda" and not torch.cuda.is_available():
            # optimum binds torch tensors.
            raise ProviderError(
                f"torch {torch.__version__} finds no CUDA here",
                "a GPU, its driver and a torch built for CUDA",
                "check nvidia-smi and the installation of torch, or pass -r cpu",
            )
        self._pipeline = self._open(workload)

    def _open(self, workload: Workload) -> Any:
        import diffusers

        from sdonnx.runtime.device.device import PROVIDERS, memory_errors

        diffusers.utils.logging.set_verbosity_error()
        # By name: optimum is not installed where mypy runs.
        optimum: Any = importlib.import_module("optimum.onnxruntime")
        importlib.import_module("optimum.utils.logging").set_verbosity_error()
        task = "Text2Image" if workload.image is None else "Image2Image"
        try:
            with memory_errors(self._device, "loading"):
                pipeline = getattr(optimum, f"ORTPipelineFor{task}").from_pretrained(
                    self.folder.path,
                    export=False,  # otherwise a folder without a denoiser graph is searched on the hub
                    provider=PROVIDERS[self.device],
                    **self._image_processor(),
                )
        except DeviceMemoryError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base class
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FolderError(
                f"optimum cannot load {self.folder.path} ({reason})", "a complete exported pipeline"
            ) from error
        if pipeline.provider != PROVIDERS[self.device]:  # ONNX Runtime falls back to the CPU
            raise ProviderError(
                f"{PROVIDERS[self.device]} could not be loaded",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi and the installation of onnxruntime-gpu",
            )
        set_scheduler(pipeline, workload)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _image_processor(self) -> dict[str, Any]:
        """Return a substitute for the safety checker's image processor.

        The processor's class may be newer than the installed transformers.
        """
        if not self.folder.has_component("feature_extractor"):
            return {}
        import transformers

        processor: Any = transformers.CLIPImageProcessor
        return {"feature_extractor": processor()}

    def generate(self, prompt: str, workload: Workload) -> list[Image]:
        """Generate images of a prompt, from the same noise as the other engines."""
        from sdonnx.runtime.device.device import memory_errors

        # With bound buffers the prediction overwrites the denoiser's input. Without guidance the input is the latents,
        # which the sampler still needs.
        guided = workload.guidance_scale > 1
        self._denoiser.use_io_binding = self.device == "cuda" and guided
        with (
            self._torch.inference_mode(),
            memory_errors(self._device, "generating"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Accessing config attribute", FutureWarning)  # caused by optimum
            images: list[Image] = self._pipeline(
                prompt,
                # In the denoiser's type: optimum writes the bound output to the address of the input.
                **start_arguments(self._pipeline, workload, self._denoiser.dtype),
                **call_arguments(workload, 0, self.family),
            ).images
        return images

    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Measure with the host's clock: every call of a session waits for the device."""
        clock = host_clock()
        # optimum's pipelines leave out ControlNets.
        named = [spec for spec in self.family.components if spec.role in STAGES]
        watched = [spec for spec in named if hasattr(self._pipeline, spec.name)]
        with contextlib.ExitStack() as stack:
            for spec in watched:
                part = getattr(self._pipeline, spec.name)
                forward = clock.around(STAGES[spec.role], part.forward)
                stack.enter_context(mock.patch.object(part, "forward", forward))
            self.generate(prompt, workload)
        return clock.stages()

    @property
    def scheduler(self) -> str:
        """The sampler's class name."""
        return type(self._pipeline.scheduler).__name__


ENGINES = {OptimumEngine.name: OptimumEngine}
