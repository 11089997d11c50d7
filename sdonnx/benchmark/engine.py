"""The interface of the benchmark's engines, and their options.

An engine's libraries are imported in `load`, so that the time of the import counts as loading and no engine's process
contains the libraries of another engine.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sdonnx.benchmark.results import Stages
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.folder_kind import FolderKind, folder_kind
from sdonnx.folder.pipeline_folder import REPORT, PipelineFolder, read_json
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "PROVIDERS",
    "Engine",
    "EngineOptions",
    "FolderKind",
    "folder_kind",
    "installed_version",
    "is_importable",
    "quantized_types",
    "reported_precision",
]

PROVIDERS = ("cuda", "cpu")


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        folder: the pipeline folder, of the kind that the engine reads.
        provider: "cuda" or "cpu"; None for the engine's default.
        compile_mode: mode of torch.compile; None to compile nothing.
        regional: compile the denoiser's repeated blocks instead of the whole denoiser.
        xformers: use xformers' attention in torch.
        io_binding: bind device buffers (onnxruntime-plain only; the other engines always or never do).
        safety_checker: run the folder's safety checker.
        adapters: files of image-prompt adapters; folders of graphs must be exported with them.
        compiler_config: options of the compiler: the `options` of `sdonnx.compile_pipe`, or a JSON object with
            further arguments of torch.compile; None for the defaults.
    """

    folder: Path
    provider: str | None = None
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False
    io_binding: bool = False
    safety_checker: bool = False
    adapters: tuple[str, ...] = ()
    compiler_config: str | None = None


class Engine(abc.ABC):
    """Generates images with one library. The constructor checks the folder and the options; it loads nothing.

    Attributes:
        name: the engine's name for `-e`.
        reads: the kind of folder that the engine reads.
        remedy: how to make such a folder.
        distributions: the packages that it uses, by their names for pip; alternatives are in one tuple. The first
            installed package of the first tuple determines the engine's version.
        modules: the modules that it imports.
        compile_modes: the valid values of `EngineOptions.compile_mode`.
        supports_adapters: whether it supports image-prompt adapters.
        pipeline_load_s: time in which `load` imported diffusers and loaded its pipeline onto the device, without
            compilation; None before `load`, and for engines of graphs.

    Raises:
        SdonnxError: a package is missing, or the engine does not support the folder or an option.
    """

    name: ClassVar[str]
    reads: ClassVar[FolderKind]
    remedy: ClassVar[str]
    distributions: ClassVar[tuple[tuple[str, ...], ...]]
    modules: ClassVar[tuple[str, ...]]
    compile_modes: ClassVar[tuple[str, ...]] = ()
    supports_adapters: ClassVar[bool] = False

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        self.require_packages(xformers=options.xformers)
        if options.compile_mode not in (None, *self.compile_modes):
            raise OptionError(
                f"the compile mode {options.compile_mode!r} for the engine {self.name}",
                f"one of {', '.join(self.compile_modes)}" if self.compile_modes else "the engine torch",
                "pass one of these" if self.compile_modes else "omit --enable_torch_compile",
            )
        if options.adapters and not self.supports_adapters:
            raise OptionError(f"--ip_adapter for the engine {self.name}", "an engine that supports adapters")
        self.options = options
        self.pipeline_load_s: float | None = None
        self.folder = PipelineFolder.open(options.folder)
        self.family = family_of(self.folder)
        self.denoiser = self.family.with_role(Role.DENOISER)
        self.check_folder()
        self.device = options.provider or self.default_provider()

    @classmethod
    @abc.abstractmethod
    def installation(cls) -> str:
        """Return how to install the packages of the engine."""

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError if a package is missing."""
        missing = [module for module in cls.modules if not is_importable(module)]
        if missing:
            raise OptionError(
                f"the engine {cls.name} without {', '.join(missing)}",
                "these packages in the environment",
                cls.installation(),
            )

    def check_folder(self) -> None:
        """Raise FolderError unless the folder is of the kind that the engine reads."""
        kind = folder_kind(self.folder.path)
        if kind is not self.reads:
            raise FolderError(f"{self.folder.path} is {kind}", f"{self.reads} for the engine {self.name}", self.remedy)
        if self.options.safety_checker and not self.folder.index.get("safety_checker", [None])[0]:
            raise FolderError(
                f"{self.folder.path} has no safety checker",
                "a safety checker, because of --enable_safety_checker",
            )
        own = self.family.adapters
        held = () if own is None else tuple(adapter.name for adapter in own.adapters)
        named = tuple(Path(path).stem for path in self.options.adapters)
        if self.reads is not FolderKind.DIFFUSERS and held != named:
            raise FolderError(
                f"{self.folder.path} was exported with {', '.join(held) or 'no adapter'}",
                f"{', '.join(named) or 'none'}, the value of --ip_adapter",
                "name the adapters of the folder, or pass another folder",
            )

    @property
    def version(self) -> str:
        """The version of the library."""
        return next(version for name in self.distributions[0] if (version := installed_version(name)) is not None)

    @property
    def provider(self) -> str:
        """The provider's name in results: the device, and how the model was compiled."""
        mode = self.options.compile_mode
        if mode is None:
            return self.device
        return f"{self.device} {'regional compile' if self.options.regional else 'compile'} {mode}"

    @property
    @abc.abstractmethod
    def precision(self) -> str:
        """The data type of the denoiser's computation."""

    @abc.abstractmethod
    def default_provider(self) -> str:
        """Return the default provider."""

    @abc.abstractmethod
    def load(self, workload: Workload) -> None:
        """Import the library, load the weights onto the device and set the workload's sampler.

        Raises:
            SdonnxError: the folder cannot be read, or the provider is not available.
        """

    @abc.abstractmethod
    def generate(self, prompt: str, workload: Workload) -> list[Image]:
        """Generate `workload.batch_size` images of a prompt and wait until the device is idle."""

    @abc.abstractmethod
    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Generate images with a warm engine and return the durations of the stages."""

    @property
    @abc.abstractmethod
    def scheduler(self) -> str:
        """The sampler's class name in diffusers."""

    def unload(self) -> None:  # noqa: B027  not needed if the process ends
        """Release the memory that `load` allocated, for processes that load several engines."""

    def after_warm_up(self) -> None:  # noqa: B027  most engines ignore it
        """Called after the warm-up runs."""

    def allocator_bytes(self) -> int | None:
        """Return the peak memory of the library's allocator, or None if it is unknown."""
        return None

    def kernels(self, prompt: str, workload: Workload) -> tuple[dict[str, float], int, str]:
        """Generate images under a profiler and return device time in ms by kind, number of launches, and the profiler.

        Raises:
            SdonnxError: no profiler is available.
        """
        from sdonnx.benchmark.operator_times import profile_with_torch

        return profile_with_torch(lambda: self.generate(prompt, workload), self.device)


def reported_precision(folder: PipelineFolder) -> str:
    """Return the data type of an optimized folder, and of its quantized components: `float16, unet in int8_dynamic`."""
    parts = [str(read_json(folder.path / REPORT).get("precision"))]
    parts += [f"{name} in {' and '.join(types)}" for name, types in quantized_types(folder).items()]
    return ", ".join(parts)


def quantized_types(folder: PipelineFolder) -> dict[str, list[str]]:
    """Return the quantization types of the quantized components of an optimized folder, by component."""
    components = read_json(folder.path / REPORT).get("components")
    entries = components.items() if isinstance(components, Mapping) else ()
    found = {name: entry.get("quantized") for name, entry in entries if isinstance(entry, Mapping)}
    return {name: list(types) for name, types in found.items() if isinstance(types, Mapping) and types}


def is_importable(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def installed_version(distribution: str) -> str | None:
    """Return the version of a package by its name for pip, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
