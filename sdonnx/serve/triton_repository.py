"""Write a model repository for Triton's Python backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sdonnx.errors import OptionError, OutputError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.folder.version import read_report
from sdonnx.serve.conditioning_images import offered_inputs
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
        name: its name, which is also a field of `ImageRequest`.
        kind: its type in Triton.
        is_optional: whether requests may leave it out.
        is_list: whether each image has a list of values.
        needs: what a model has to offer: "loras" or a field for images; empty for inputs of all models.
    """

    name: str
    kind: str
    is_optional: bool = True
    is_list: bool = False
    needs: str = ""


INPUTS = (
    _Input("prompt", "TYPE_STRING", is_optional=False),
    _Input("negative_prompt", "TYPE_STRING"),
    _Input("height", "TYPE_INT32"),
    _Input("width", "TYPE_INT32"),
    _Input("num_inference_steps", "TYPE_INT32"),
    _Input("guidance_scale", "TYPE_FP32"),
    _Input("scheduler", "TYPE_STRING"),
    _Input("seed", "TYPE_INT64"),
    _Input("loras", "TYPE_STRING", needs="loras"),
    _Input("control_image", "TYPE_STRING", is_list=True, needs="control_image"),
    _Input("controlnet_conditioning_scale", "TYPE_FP32", is_list=True, needs="control_image"),
    _Input("control_guidance_start", "TYPE_FP32", is_list=True, needs="control_image"),
    _Input("control_guidance_end", "TYPE_FP32", is_list=True, needs="control_image"),
    _Input("guess_mode", "TYPE_BOOL", needs="control_image"),
    _Input("control_mode", "TYPE_INT32", is_list=True, needs="control_mode"),
    _Input("adapter_image", "TYPE_STRING", is_list=True, needs="adapter_image"),
    _Input("adapter_conditioning_scale", "TYPE_FP32", is_list=True, needs="adapter_image"),
    _Input("adapter_conditioning_factor", "TYPE_FP32", needs="adapter_image"),
    _Input("ip_adapter_image", "TYPE_STRING", is_list=True, needs="ip_adapter_image"),
    _Input("ip_adapter_scale", "TYPE_FP32", is_list=True, needs="ip_adapter_image"),
)
"""Inputs of the models: one value for each image, or a list of them."""


def write_triton_repository(
    repository: Path, folders: Mapping[str, str], limits: ServeLimits, loras: Mapping[str, Path] | None = None
) -> list[Path]:
    """Write a model for each optimized folder, and return the models' folders.

    Args:
        repository: the repository; it may have other models.
        folders: optimized folders by the names of models. They are not copied.
        limits: limits of the queue in each instance.
        loras: LoRA files that requests may name, by name. They are not copied.

    Raises:
        FolderError: a folder is not optimized.
        OptionError: a name cannot be a folder's name.
        OutputError: the repository has a model of that name, or cannot be written.
    """
    texts = {}
    files = {name: str(path.resolve()) for name, path in (loras or {}).items()}
    for name, folder in folders.items():
        if name in (".", "..") or "/" in name or not name.isprintable():
            raise OptionError(f"a model has the name {name!r}", "the name of a folder", "pass NAME=FOLDER")
        opened = PipelineFolder.open(folder)
        texts[name] = _config(name, opened, limits, files)
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
        raise OutputError(f"{repository} cannot be written ({error})", "a folder") from error
    return written


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _input(each: _Input) -> str:
    optional = " optional: true" if each.is_optional else ""
    return f'  {{ name: "{each.name}" data_type: {each.kind} dims: [ {-1 if each.is_list else 1} ]{optional} }}'


def _config(name: str, folder: PipelineFolder, limits: ServeLimits, loras: Mapping[str, str]) -> str:
    """Return the text of `config.pbtxt`: a `ModelConfig` of triton-inference-server/common, model_config.proto."""
    offered = {"", *offered_inputs(folder), *(["loras"] if loras else [])}
    inputs = ",\n".join(_input(each) for each in INPUTS if each.needs in offered)
    kind = "KIND_GPU" if read_report(folder.path).get("provider") == "cuda" else "KIND_CPU"
    parameters = {"folder": str(folder.path.resolve()), "limits": json.dumps(asdict(limits))}
    if loras:
        parameters["loras"] = json.dumps(loras)
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
