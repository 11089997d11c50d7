"""What an engine of the benchmark is, and what it is made from.

The libraries that an engine draws with are imported by its `load` and not before, so that their import
counts as loading and no engine's process holds another's libraries.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sdonnx.benchmark.results import Stages, Workload
from sdonnx.errors import FolderError, OptionError
from sdonnx.families import Role, family_of
from sdonnx.folder import ONNX_MODEL, REPORT, PipelineFolder, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "PROVIDERS",
    "Engine",
    "EngineOptions",
    "FolderKind",
    "installed_version",
    "is_there",
    "kind_of_folder",
    "precision_of_report",
]

PROVIDERS = ("cuda", "cpu")


class FolderKind(StrEnum):
    """What a pipeline folder holds; the text is what errors call it."""

    DIFFUSERS = "a diffusers pipeline"
    EXPORTED = "an exported pipeline, not optimized"
    OPTIMIZED = "an optimized pipeline"


def kind_of_folder(folder: PipelineFolder) -> FolderKind:
    """Tell what a folder holds."""
    if (folder.path / REPORT).is_file():
        return FolderKind.OPTIMIZED
    denoiser = family_of(folder).with_role(Role.DENOISER).name
    return FolderKind.EXPORTED if (folder.path / denoiser / ONNX_MODEL).is_file() else FolderKind.DIFFUSERS


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made from.

    Attributes:
        folder: the pipeline, of the kind that the engine reads.
        provider: "cuda" or "cpu"; None for the engine's own choice.
        compile_mode: torch.compile's; None to compile nothing.
        regional: compile the denoiser's repeated blocks instead of the whole denoiser.
        xformers: let torch's attention be xformers'.
        io_binding: bind buffers of the device (onnxruntime-plain; the others always or never do).
        safety_checker: run the folder's safety checker.
        ip_adapters: files of IP-Adapters, with which folders of graphs were exported.
    """

    folder: Path
    provider: str | None = None
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False
    io_binding: bool = False
    safety_checker: bool = False
    ip_adapters: tuple[str, ...] = ()


class Engine(abc.ABC):
    """Draws images with one library. Making one looks at the folder and the options and loads nothing.

    Attributes:
        name: what `-e` calls it.
        reads: the kind of folder that it takes.
        remedy: what makes such a folder.
        distributions: the packages that it draws with, as pip calls them; alternatives in one tuple. The
            first names the engine's version.
        modules: what it imports.
        installation: how they are installed.
        compile_modes: what `EngineOptions.compile_mode` can be.
        takes_adapters: whether it can draw with IP-Adapters.
        prepares: whether a GPU that it has never used wants `prepare`.

    Raises:
        SdonnxError: a package is missing, or the folder or an option does not suit the engine.
    """

    name: ClassVar[str]
    reads: ClassVar[FolderKind]
    remedy: ClassVar[str]
    distributions: ClassVar[tuple[tuple[str, ...], ...]]
    modules: ClassVar[tuple[str, ...]]
    installation: ClassVar[str]
    compile_modes: ClassVar[tuple[str, ...]] = ()
    takes_adapters: ClassVar[bool] = False
    prepares: ClassVar[bool] = False

    def __init__(self, options: EngineOptions) -> None:
        """Look at the options and the folder."""
        self.require_packages(xformers=options.xformers)
        if options.compile_mode not in (None, *self.compile_modes):
            raise OptionError(
                f"the compile mode {options.compile_mode!r} for the engine {self.name}",
                f"one of {', '.join(self.compile_modes)}" if self.compile_modes else "the engine torch",
                "pass one of these" if self.compile_modes else "leave out --enable_torch_compile",
            )
        if options.ip_adapters and not self.takes_adapters:
            raise OptionError(
                f"--ip_adapter for the engine {self.name}", "an engine that knows IP-Adapters", "leave it out"
            )
        self.options = options
        self.folder = PipelineFolder.open(options.folder)
        self.family = family_of(self.folder)
        self.denoiser = self.family.with_role(Role.DENOISER)
        self.check_folder()
        self.device = options.provider or self.default_provider()

    @classmethod
    def require_packages(cls, *, xformers: bool = False) -> None:
        """Raise OptionError where a package is missing."""
        missing = [module for module in cls.modules if not is_there(module)]
        if missing:
            raise OptionError(
                f"the engine {cls.name} without {', '.join(missing)}",
                "these packages in the environment",
                cls.installation,
            )

    def check_folder(self) -> None:
        """Raise FolderError unless the folder is of the kind that the engine reads."""
        kind = kind_of_folder(self.folder)
        if kind is not self.reads:
            raise FolderError(f"{self.folder.path} is {kind}", f"{self.reads} for the engine {self.name}", self.remedy)
        if self.options.safety_checker and not self.folder.index.get("safety_checker", [None])[0]:
            raise FolderError(
                f"{self.folder.path} has no safety checker",
                "one for --enable_safety_checker",
                "leave the option out",
            )
        own = self.family.adapters
        held = () if own is None else tuple(adapter.name for adapter in own.adapters)
        named = tuple(Path(path).stem for path in self.options.ip_adapters)
        if self.reads is not FolderKind.DIFFUSERS and held != named:
            raise FolderError(
                f"{self.folder.path} was exported with {', '.join(held) or 'no IP-Adapter'}",
                f"{', '.join(named) or 'none'}, as --ip_adapter says",
                "name the adapters that it has, or give another folder",
            )

    @property
    def version(self) -> str:
        """The version of the library that it draws with."""
        return next(version for name in self.distributions[0] if (version := installed_version(name)) is not None)

    @property
    def provider(self) -> str:
        """What the result calls the provider: the device, and how the model was compiled for it."""
        mode = self.options.compile_mode
        if mode is None:
            return self.device
        return f"{self.device} {'regional compile' if self.options.regional else 'compile'} {mode}"

    @property
    @abc.abstractmethod
    def precision(self) -> str:
        """The type that the denoiser computes in."""

    @abc.abstractmethod
    def default_provider(self) -> str:
        """Return the provider to use where none was asked for."""

    @abc.abstractmethod
    def load(self, workload: Workload) -> None:
        """Import the library, read the weights, put them on the device and set the workload's sampler.

        Raises:
            SdonnxError: the folder cannot be read, or the provider is not available.
        """

    @abc.abstractmethod
    def draw(self, prompt: str, workload: Workload) -> list[Image]:
        """Return `workload.batch_size` images of a prompt; the device is idle again by then."""

    @abc.abstractmethod
    def stages(self, prompt: str, workload: Workload) -> Stages:
        """Draw once more and return where the time went; the engine is warm by then."""

    @property
    @abc.abstractmethod
    def scheduler(self) -> str:
        """The sampler's class, as diffusers names it."""

    def prepare(self) -> None:  # noqa: B027  most do nothing once for a machine
        """Do what a machine wants once, whatever is drawn on it later."""

    def unload(self) -> None:  # noqa: B027  a process that ends needs none
        """Give back what `load` took, where an engine is not the last of its process."""

    def warmed_up(self) -> None:  # noqa: B027  most have nothing to do
        """Told when the runs that do not count are over."""

    def allocator_bytes(self) -> int | None:
        """Return the peak of the memory that the library's own allocator held; None where it does not tell."""
        return None

    def kernels(self, prompt: str, workload: Workload) -> tuple[dict[str, float], int, str]:
        """Draw once more and return milliseconds of device time by kind, launches, and what counted.

        Raises:
            SdonnxError: nothing here can count.
        """
        from sdonnx.benchmark.kernels import profiled_by_torch

        return profiled_by_torch(lambda: self.draw(prompt, workload), self.device)


def precision_of_report(folder: PipelineFolder) -> str:
    """Return the type that an optimized folder was converted to."""
    return str(read_json(folder.path / REPORT).get("precision"))


def is_there(module: str) -> bool:
    """Tell whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that is not there
        return False


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, as pip calls it; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
