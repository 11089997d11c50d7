"""The interface of the benchmark's engines, and their options.

An engine's libraries are imported in `load`, so that the time of the import counts as loading and no engine's process
contains the libraries of another engine.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sdonnx.benchmark.results import Stages
from sdonnx.errors import FolderError
from sdonnx.folder.folder_version import FolderKind
from sdonnx.installation import installed_version
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Role
from sdonnx.reference.diffusers_pipeline import open_folder, require_packages
from sdonnx.reference.optimized_pipeline import check_adapters
from sdonnx.reference.workload import Workload

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PROVIDERS", "Engine", "EngineOptions"]

PROVIDERS = ("cuda", "cpu")


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        folder: the pipeline folder, of the kind that the engine reads.
        provider: "cuda" or "cpu".
        compile_mode: mode of torch.compile; None to compile nothing.
        regional: compile the denoiser's repeated blocks instead of the whole denoiser.
        xformers: use xformers' attention in torch.
        safety_checker: run the folder's safety checker.
        adapters: files of image-prompt adapters; folders of graphs must be exported with them.
        compiler_config: options of the compiler: the `options` of `sdonnx.compile_pipe`, or a JSON object with
            further arguments of torch.compile; None for the defaults.
    """

    folder: Path
    provider: str
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False
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
        installation: returns how to install them.
        io_binding: whether it binds device buffers because it was asked to; recorded only.
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
    installation: ClassVar[Callable[[], str]]
    io_binding: ClassVar[bool] = False

    def __init__(self, options: EngineOptions) -> None:
        """Check the options and the folder."""
        self.require_packages(xformers=options.xformers)
        self.options = options
        self.device = options.provider
        self.pipeline_load_s: float | None = None
        self.folder = open_folder(options.folder, self.reads, f"the engine {self.name}", self.remedy)
        self.family = family_of(self.folder)
        self.denoiser = self.family.with_role(Role.DENOISER)
        if options.safety_checker and not self.folder.index.get("safety_checker", [None])[0]:
            raise FolderError(
                f"{self.folder.path} has no safety checker",
                "a safety checker, because of --enable_safety_checker",
            )
        if self.reads is not FolderKind.DIFFUSERS:
            check_adapters(self.folder, self.family, options.adapters)

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError if a package is missing."""
        require_packages(cls.modules, f"the engine {cls.name}", cls.installation())

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

    @property
    @abc.abstractmethod
    def scheduler(self) -> str:
        """The sampler's class name in diffusers."""

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

    def after_warm_up(self) -> None:  # noqa: B027  most engines ignore it
        """Called after the warm-up runs."""

    def allocator_bytes(self) -> int | None:
        """Return the peak memory of the library's allocator, or None if it is unknown."""
        return None
