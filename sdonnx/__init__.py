"""Diffusion pipelines on ONNX Runtime: export, optimize, draw.

The public names are imported when they are first used, so `import sdonnx` is instant and what draws
images never loads what exports them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sdonnx.errors import (
    FolderError,
    OptionError,
    OutputError,
    PromptError,
    ProviderError,
    SchedulerError,
    SdonnxError,
    WeightsError,
)

if TYPE_CHECKING:
    from sdonnx.export.pipeline import export_pipeline
    from sdonnx.optimize import optimize_folder
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline
    from sdonnx.sample import write_sample

__all__ = [
    "FolderError",
    "OptionError",
    "OrtDiffusionPipeline",
    "OutputError",
    "PromptError",
    "ProviderError",
    "SchedulerError",
    "SdonnxError",
    "WeightsError",
    "__version__",
    "export_pipeline",
    "optimize_folder",
    "write_sample",
]

__version__ = "0.1.0"

_HOMES = {
    "OrtDiffusionPipeline": "sdonnx.runtime.pipeline",
    "export_pipeline": "sdonnx.export.pipeline",
    "optimize_folder": "sdonnx.optimize",
    "write_sample": "sdonnx.sample",
}


def __getattr__(name: str) -> object:
    """Import the public name `name` from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
