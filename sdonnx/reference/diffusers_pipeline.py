"""diffusers' pipeline of a folder, in any data type. In float32 its images are the reference for all others."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import DeviceMemoryError, FolderError, OptionError, ProviderError
from sdonnx.folder.folder_version import FolderKind, folder_kind
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.installation import install_command, is_importable
from sdonnx.models.registry import family_of
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.reference.workload import Workload, call_arguments, noise_in_float32, start_arguments

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DiffusersPipeline", "open_folder", "require_packages", "set_scheduler"]


class DiffusersPipeline:
    """diffusers' pipeline of a folder. The constructor checks the folder; it loads nothing.

    Args:
        folder: the diffusers folder.
        device: "cuda" or "cpu".
        precision: torch's data type. In float32 matmuls do not use TF32.
        adapters: files of image-prompt adapters.
        safety_checker: run the folder's safety checker.

    Attributes:
        folder: the folder.
        family: its family.
        device: "cuda" or "cpu".
        precision: the name of the data type.
        pipeline: diffusers' object, after `load`.

    Raises:
        FolderError: the folder is of another kind.
        OptionError: torch or diffusers is missing.
    """

    pipeline: Any

    def __init__(
        self,
        folder: Path,
        device: str,
        precision: str = "float32",
        *,
        adapters: Sequence[str] = (),
        safety_checker: bool = False,
    ) -> None:
        require_packages(("torch", "diffusers", "transformers"), "diffusers' pipeline", install_command("export"))
        self.folder = open_folder(
            folder, FolderKind.DIFFUSERS, "diffusers", "pass the folder that it was exported from"
        )
        self.family = family_of(self.folder)
        self.device, self.precision = device, precision
        self._adapters, self._safety_checker = tuple(adapters), safety_checker

    def load(self, workload: Workload) -> None:
        """Load the modules onto the device, and set the workload's sampler.

        Raises:
            SdonnxError: the folder cannot be read, torch has no CUDA, or the memory is too small.
        """
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"torch {torch.__version__} finds no CUDA here",
                "a GPU, its driver and a torch built for CUDA",
                "check nvidia-smi and the installation of torch, or pass -r cpu",
            )
        if self.precision == "float32":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        # As in ONNX Runtime's benchmark.py: in half precision cuDNN times its algorithms in the first run.
        torch.backends.cudnn.benchmark = self.device == "cuda" and self.precision != "float32"
        with self.memory_errors():
            self.pipeline = self._open(workload)

    def _open(self, workload: Workload) -> Any:
        import diffusers
        import torch
        import transformers

        logs: tuple[Any, ...] = (diffusers.utils.logging, transformers.utils.logging)
        for library in logs:
            library.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it logs that an image processor without torchvision is used
        from_image = workload.image is not None
        pipeline_class: Any = diffusers.AutoPipelineForImage2Image if from_image else diffusers.DiffusionPipeline
        # Published pipelines include a safety checker. It runs only if it does in all pipelines.
        unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        leave_out = "safety_checker" in self.folder.index and not self._safety_checker
        try:
            pipeline: Any = pipeline_class.from_pretrained(
                self.folder.path,
                dtype=getattr(torch, self.precision),
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
        set_scheduler(pipeline, workload)
        pipeline.set_progress_bar_config(disable=True)
        if self._adapters:
            files = [Path(path).resolve() for path in self._adapters]
            places = [str(file.parent.parent) for file in files], [file.parent.name for file in files]
            try:
                pipeline.load_ip_adapter(*places, weight_name=[file.name for file in files])
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise FolderError(
                    f"diffusers cannot load {', '.join(self._adapters)} ({str(error).splitlines()[0]})",
                    "image-prompt adapters for the pipeline's denoiser, with image_encoder in the same folder",
                    "copy them again",
                ) from error
        level = logs[0].get_verbosity()
        logs[0].set_verbosity_error()  # it warns of float16 on a CPU
        try:
            return pipeline.to(self.device)
        finally:
            logs[0].set_verbosity(level)

    def unload(self) -> None:
        """Delete the modules and release their memory."""
        import torch

        del self.pipeline
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def module(self, spec: ComponentSpec) -> Any:
        """Return the loaded module that a component was exported from."""
        return getattr(self.pipeline, spec.source)

    @property
    def denoiser(self) -> Any:
        """The loaded denoiser."""
        return self.module(self.family.with_role(Role.DENOISER))

    def generate(self, prompt: str | list[str], workload: Workload) -> list[Image]:
        """Generate images of a prompt or of several ones, from the noise that all pipelines use."""
        import torch

        adapters = len(self._adapters)
        if adapters:
            self.pipeline.set_ip_adapter_scale([workload.ip_adapter_scale] * adapters)
        prompts = 1 if isinstance(prompt, str) else len(prompt)
        dtype = getattr(torch, self.precision)
        with self.memory_errors(), noise_in_float32(self.pipeline):
            images: list[Image] = self.pipeline(
                prompt,
                **start_arguments(self.pipeline, workload, dtype, prompts),
                **call_arguments(workload, adapters, self.family),
            ).images
        return images

    @contextmanager
    def memory_errors(self) -> Iterator[None]:
        """Raise DeviceMemoryError for torch's error."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". If reserved")[0]
            raise DeviceMemoryError(
                reason.rstrip("."), "enough memory on the device", "generate fewer images"
            ) from error


def set_scheduler(pipeline: Any, workload: Workload) -> None:
    """Set the workload's sampler in a pipeline with diffusers' interface."""
    import diffusers

    from sdonnx.samplers import config_for

    if workload.scheduler is not None:
        config = config_for(workload.scheduler, dict(pipeline.scheduler.config))
        pipeline.scheduler = getattr(diffusers, str(config["_class_name"])).from_config(config)


def open_folder(path: Path, kind: FolderKind, reader: str, remedy: str) -> PipelineFolder:
    """Open a pipeline folder.

    Args:
        path: the folder.
        kind: the kind that it must be of.
        reader: the name of what reads it, for the error.
        remedy: how to get such a folder.

    Raises:
        FolderError: it is no pipeline, or of another kind.
    """
    folder = PipelineFolder.open(path)
    found = folder_kind(folder.path)
    if found is not kind:
        raise FolderError(f"{folder.path} is {found}", f"{kind} for {reader}", remedy)
    return folder


def require_packages(modules: Sequence[str], reader: str, command: str) -> None:
    """Raise OptionError if a module cannot be imported; `command` installs them."""
    missing = [module for module in modules if not is_importable(module)]
    if missing:
        raise OptionError(f"{reader} without {', '.join(missing)}", "these packages in the environment", command)
