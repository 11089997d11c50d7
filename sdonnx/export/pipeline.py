"""Export a diffusers pipeline to a folder of ONNX graphs, one component at a time."""

from __future__ import annotations

import gc
import importlib
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from sdonnx.errors import FolderError, OptionError
from sdonnx.export.trace import trace
from sdonnx.export.weights import WeightFiles
from sdonnx.export.wrappers import wrap
from sdonnx.families import ComponentSpec, Family, family_of
from sdonnx.folder import MODEL_INDEX, ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder, atomic_folder

__all__ = ["DTYPES", "Progress", "export_pipeline"]

DTYPES = {"float32": torch.float32, "float16": torch.float16}

Progress = Callable[[str, int, int], None]
"""Told (what happens now, tensors written, tensors in all) while a component is exported."""

_LIBRARIES = ("diffusers", "transformers")


def export_pipeline(
    source: str | Path,
    out: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    allow_pickle: Collection[str] = (),
    progress: Progress | None = None,
) -> None:
    """Export the diffusers pipeline `source` to the ONNX folder `out`.

    Graphs have opset 23, standard operators alone, and dynamic batch, height, width and sequence
    length. Weights are never in memory together: peak memory does not grow with the model.

    Args:
        source: a local pipeline folder, or the id of one on the Hugging Face hub.
        out: the folder to write.
        dtype: "float32" or "float16", of weights, inputs and outputs.
        overwrite: replace `out` if a pipeline is there.
        allow_pickle: components whose weights may be read from a pickle (`.bin`).
        progress: told what happens.

    Raises:
        SdonnxError: the pipeline cannot be read or the output cannot be written.
    """
    if dtype not in DTYPES:
        raise OptionError(f"the dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}", "pass one of these")
    folder = PipelineFolder.open(_local(source))
    family = family_of(folder)
    # Everything that can be wrong with the input is looked at before anything is written.
    plans = [_plan(folder, spec, allow_pickle) for spec in family.components]
    with atomic_folder(out, overwrite, [folder.path]) as partial:
        for spec, build, weights in plans:
            config = folder.config(spec.source)
            if progress:
                progress(f"{spec.name}: tracing", 0, 0)
            model = trace(spec, config, build, wrap, weights, DTYPES[dtype])
            _write(model, partial / spec.name, progress)
            shutil.copyfile(folder.component(spec.source) / "config.json", partial / spec.name / "config.json")
            del model
            gc.collect()
        _copy_extras(folder, family, partial)


def _local(source: str | Path) -> Path:
    """Return the folder of `source`, downloaded from the hub if it is no folder here."""
    path = Path(source)
    text = str(source)
    if path.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        return path
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(text, use_safetensors=True))
    except Exception as error:  # the hub's client has many failures, and none of them is ours
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FolderError(
            f"{text} is no folder here and cannot be downloaded ({reason})",
            "a pipeline folder, or the id of a pipeline on the hub that this machine reaches",
            "check the name, the network and your access to the repository",
        ) from error


def _plan(
    folder: PipelineFolder, spec: ComponentSpec, allow_pickle: Collection[str]
) -> tuple[ComponentSpec, Callable[[], torch.nn.Module], WeightFiles]:
    entry = folder.index.get(spec.source)
    if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in _LIBRARIES):
        raise FolderError(
            f"{folder.path / MODEL_INDEX} says {entry!r} for {spec.source}",
            f"a model of {' or '.join(_LIBRARIES)}",
            "export the original diffusers pipeline",
        )
    library, class_name = entry
    folder.config(spec.source)
    weights = WeightFiles(folder.component(spec.source), allow_pickle=spec.source in allow_pickle)
    return spec, _builder(library, str(class_name), folder.component(spec.source)), weights


def _builder(library: str, class_name: str, component: Path) -> Callable[[], torch.nn.Module]:
    """Return a function that makes the component's torch module, with no weights in it."""
    model_class: Any = getattr(importlib.import_module(library), class_name, None)
    if model_class is None:
        raise FolderError(
            f"{component} is a {class_name}, which {library} does not have",
            f"a class of the installed {library}",
            f"install the version of {library} that has it",
        )
    try:
        if library == "diffusers":
            config = model_class.load_config(str(component))
            return lambda: model_class.from_config(config)
        config = model_class.config_class.from_pretrained(str(component))
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{component / 'config.json'} cannot be used ({error})", f"a {class_name}'s", "copy it again"
        ) from error
    config._attn_implementation = "sdpa"
    return lambda: model_class(config)


def _write(model: ir.Model, component: Path, progress: Progress | None) -> None:
    component.mkdir()

    def told(tensor: ir.TensorProtocol, info: Any) -> None:
        if progress:
            progress(f"{component.name}: writing", info.index + 1, info.total)

    ir.save(model, component / ONNX_MODEL, external_data=ONNX_WEIGHTS, callback=told)


def _copy_extras(folder: PipelineFolder, family: Family, out: Path) -> None:
    for name in family.extras:
        shutil.copytree(folder.component(name), out / name)
        if name.startswith("tokenizer"):
            _add_tokenizer_json(out / name)
    shutil.copyfile(folder.path / MODEL_INDEX, out / MODEL_INDEX)


def _add_tokenizer_json(tokenizer: Path) -> None:
    """Write tokenizer.json, which the run-time reads, where an old folder has only vocab and merges."""
    if (tokenizer / "tokenizer.json").is_file():
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(tokenizer)).backend_tokenizer.save(str(tokenizer / "tokenizer.json"))
    except (OSError, ValueError, AttributeError) as error:
        raise FolderError(f"{tokenizer} cannot be read ({error})", "a tokenizer", "copy the folder again") from error
