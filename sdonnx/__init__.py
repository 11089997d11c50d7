"""Diffusion pipelines on ONNX Runtime: export, optimize, generate.

Public names are imported on first use, so `import sdonnx` loads no library, and image generation never loads the
libraries of the export.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sdonnx._version import __version__
from sdonnx.errors import (
    DeviceMemoryError,
    FolderError,
    OptionError,
    OutputError,
    PackageError,
    PrecisionError,
    PromptError,
    ProviderError,
    QueueFullError,
    SchedulerError,
    SdonnxError,
    UnavailableError,
    WeightsError,
)

if TYPE_CHECKING:
    from sdonnx.compiler.compile_module import compile, refresh
    from sdonnx.compiler.compile_pipe import compile_pipe
    from sdonnx.compiler.save_pipe import load_pipe, save_pipe
    from sdonnx.doctor.first_check import KernelWarning
    from sdonnx.export.export_pipeline import export_pipeline
    from sdonnx.folder.folder_version import RebuildWarning
    from sdonnx.optimize.optimizer import optimize_folder
    from sdonnx.runtime.inputs.prompt_tokenizer import PromptTruncatedWarning
    from sdonnx.runtime.output import ImageOutput, NotFiniteWarning, NsfwContentWarning
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline
    from sdonnx.sample.write_sample import write_sample
    from sdonnx.serve.async_pipeline import AsyncPipeline
    from sdonnx.serve.image_request import ImageRequest
    from sdonnx.serve.serve_settings import ServeLimits

__all__ = [
    "AsyncPipeline",
    "DeviceMemoryError",
    "FolderError",
    "ImageOutput",
    "ImageRequest",
    "KernelWarning",
    "NotFiniteWarning",
    "NsfwContentWarning",
    "OptionError",
    "OrtDiffusionPipeline",
    "OutputError",
    "PackageError",
    "PrecisionError",
    "PromptError",
    "PromptTruncatedWarning",
    "ProviderError",
    "QueueFullError",
    "RebuildWarning",
    "SchedulerError",
    "SdonnxError",
    "ServeLimits",
    "UnavailableError",
    "WeightsError",
    "__version__",
    "compile",
    "compile_pipe",
    "export_pipeline",
    "load_pipe",
    "optimize_folder",
    "refresh",
    "save_pipe",
    "write_sample",
]

_HOMES = {
    "AsyncPipeline": "sdonnx.serve.async_pipeline",
    "ImageOutput": "sdonnx.runtime.output",
    "ImageRequest": "sdonnx.serve.image_request",
    "KernelWarning": "sdonnx.doctor.first_check",
    "NotFiniteWarning": "sdonnx.runtime.output",
    "NsfwContentWarning": "sdonnx.runtime.output",
    "OrtDiffusionPipeline": "sdonnx.runtime.pipeline",
    "PromptTruncatedWarning": "sdonnx.runtime.inputs.prompt_tokenizer",
    "RebuildWarning": "sdonnx.folder.folder_version",
    "ServeLimits": "sdonnx.serve.serve_settings",
    "compile": "sdonnx.compiler.compile_module",
    "compile_pipe": "sdonnx.compiler.compile_pipe",
    "export_pipeline": "sdonnx.export.export_pipeline",
    "load_pipe": "sdonnx.compiler.save_pipe",
    "optimize_folder": "sdonnx.optimize.optimizer",
    "refresh": "sdonnx.compiler.compile_module",
    "save_pipe": "sdonnx.compiler.save_pipe",
    "write_sample": "sdonnx.sample.write_sample",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sdonnx.installation import requiring

    home = _HOMES[name]
    with requiring(f"sdonnx.{name}", home.split(".")[1]):
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of the module, including public names that are not imported yet."""
    return sorted({*globals(), *__all__})
