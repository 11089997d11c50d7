"""Write a model repository for Triton's Python backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sdonnx.errors import OptionError, OutputError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.folder.version import read_report
from sdonnx.serve.serve_limits import ServeLimits

__all__ = ["INPUTS", "write_triton_repository"]

_MICROSECONDS = 1000  # of a millisecond

_CODE = '''"""The model that `sdonnx serve --write_triton` wrote; Triton's Python environment needs sdonnx."""

from sdonnx.serve.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class _Input:
    """An input of the model.

    Attributes:
        name: its name.
        field: field of `ImageRequest`.
        kind: its type in Triton.
        is_optional: whether requests may leave it out.
    """

    name: str
    field: str
    kind: str
    is_optional: bool = True


INPUTS = (
    _Input("prompt", "prompt", "TYPE_STRING", is_optional=False),
    _Input("negative_prompt", "negative_prompt", "TYPE_STRING"),
    _Input("height", "height", "TYPE_INT32"),
    _Input("width", "width", "TYPE_INT32"),
    _Input("num_inference_steps", "num_inference_steps", "TYPE_INT32"),
    _Input("guidance_scale", "guidance_scale", "TYPE_FP32"),
    _Input("scheduler", "scheduler", "TYPE_STRING"),
    _Input("seed", "seed", "TYPE_INT64"),
)
"""Inputs of the model: one value for each image."""


def write_triton_repository(repository: Path, folders: Mapping[str, str], limits: ServeLimits) -> list[Path]:
    """Write a model for each optimized folder, and return the models' folders.

    Args:
        repository: the repository; it may have other models.
        folders: optimized folders by the names of models. They are not copied.
        limits: limits of the queue in each instance.

    Raises:
        FolderError: a folder is not optimized.
        OptionError: a name cannot be that of a folder.
        OutputError: the repository has a model of that name, or cannot be written.
    """
    texts = {}
    for name, folder in folders.items():
        if name in (".", "..") or "/" in name or not name.isprintable():
            raise OptionError(f"a model has the name {name!r}", "the name of a folder", "pass NAME=FOLDER")
        opened = PipelineFolder.open(folder)
        provider = str(read_report(opened.path).get("provider"))
        texts[name] = _config(name, opened.path.resolve(), provider, limits)
        if (repository / name).exists():
            raise OutputError(f"{repository / name} exists", "a new model", "remove it, or pass NAME=FOLDER")
    written = []
    try:
        for name, text in texts.items():
            version = repository / name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(_CODE, encoding="utf-8")
            (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
            written.append(repository / name)
    except OSError as error:
        raise OutputError(f"{repository} cannot be written ({error})", "a folder", "pass another") from error
    return written


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _config(name: str, folder: Path, provider: str, limits: ServeLimits) -> str:
    """Return the text of `config.pbtxt`: a `ModelConfig` of triton-inference-server/common, model_config.proto."""
    inputs = ",\n".join(
        f'  {{ name: "{each.name}" data_type: {each.kind} dims: [ 1 ]{" optional: true" if each.is_optional else ""} }}'
        for each in INPUTS
    )
    kind = "KIND_GPU" if provider == "cuda" else "KIND_CPU"
    parameters = {"folder": str(folder), "limits": json.dumps(asdict(limits))}
    values = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: {_quoted(value)} }} }}' for key, value in parameters.items()
    )
    return f"""# Written by `sdonnx serve --write_triton`. Each instance has a pipeline, and batches equal requests.
name: {_quoted(name)}
backend: "python"
max_batch_size: {limits.max_batch_size}
input [
{inputs}
]
output [
  {{ name: "image" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }},
  {{ name: "used_seed" data_type: TYPE_INT64 dims: [ 1 ] }}
]
instance_group [ {{ count: 1 kind: {kind} }} ]
dynamic_batching {{ max_queue_delay_microseconds: {round(limits.batch_wait_ms * _MICROSECONDS)} }}
{values}
"""
