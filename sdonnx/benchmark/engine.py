"""What an engine of the benchmark is, and what each is told to draw.

The libraries that an engine draws with are imported by its `load` and not before, so that their import
counts as loading and no engine's process holds another's libraries.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sdonnx.errors import OptionError, ProviderError
from sdonnx.families import Role, family_of
from sdonnx.folder import ONNX_MODEL, PipelineFolder

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Engine", "EngineOptions", "Workload"]

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
        compile_mode: torch.compile's; None to compile nothing.
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
        """Look at the options and the folder."""
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
        self.denoiser = self.family.with_role(Role.DENOISER)
        self.check_folder(exported=(self.folder.path / self.denoiser.name / ONNX_MODEL).is_file())
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


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
