"""How one component is exported: its torch module, and the files that its weights are read from."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdonnx.errors import FolderError
from sdonnx.export.config_entries import QUANTIZATION, require_known_entries
from sdonnx.export.module_construction import max_modules
from sdonnx.export.single_file.checkpoint_file import RenamedWeights
from sdonnx.export.single_file.open_single_file import SingleFile
from sdonnx.export.stored_tensors import WeightFiles, Weights
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, read_config
from sdonnx.models.spec import ComponentSpec

__all__ = ["ComponentPlan", "plan_component", "plan_model"]

# Library in model_index.json -> module that contains the class. A pipeline's own classes are next to the pipeline.
_LIBRARIES = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "stable_diffusion": "diffusers.pipelines.stable_diffusion",
}


@dataclass(frozen=True)
class ComponentPlan:
    """How one component is exported.

    Attributes:
        spec: The component.
        build: Returns its torch module, without weights.
        weights: Source of the weights.
        config: Configuration.
        text: Text of the configuration, as it is written.
    """

    spec: ComponentSpec
    build: Callable[[], torch.nn.Module]
    weights: Weights
    config: dict[str, Any]
    text: str


def plan_component(
    folder: PipelineFolder,
    spec: ComponentSpec,
    allow_pickle: Collection[str],
    variant: str | None = None,
    single: SingleFile | None = None,
) -> ComponentPlan:
    """Return how a component of a pipeline folder is exported, after its configuration and weights were checked.

    Args:
        folder: The diffusers pipeline.
        spec: The component.
        allow_pickle: Components that may read their weights from a pickle (`.bin`).
        variant: Variant of the weights; see `find_weights`.
        single: The single file that contains the weights, if `folder` does not.

    Raises:
        FolderError: The index or the configuration cannot be used.
        WeightsError: Weights are missing, broken, or a pickle.
    """
    entry = folder.index.get(spec.source)
    if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in (*_LIBRARIES,)):
        raise FolderError(
            f"{folder.path / MODEL_INDEX} says {entry!r} for {spec.source}",
            "a model of diffusers or transformers",
            "export the original diffusers pipeline",
        )
    library, class_name = entry
    if single is not None:
        source = single.configs[spec.source]
        config = read_config(source / "config.json")
        return _plan(spec, source, config, library, str(class_name), single.weights[spec.source])
    source = folder.component(spec.source)
    return plan_model(spec, source, library, str(class_name), spec.source in allow_pickle, variant)


def plan_model(
    spec: ComponentSpec,
    component: Path,
    library: str,
    class_name: str,
    allow_pickle: bool,
    variant: str | None = None,
) -> ComponentPlan:
    """Return how the model in the folder `component` is exported, after its configuration and weights were checked.

    Args:
        spec: The component.
        component: Folder with config.json and weights.
        library: Library of the model's class, as model_index.json names it.
        class_name: The model's class.
        allow_pickle: Whether weights may be read from a pickle (`.bin`).
        variant: Variant of the weights; see `find_weights`.

    Raises:
        FolderError: The configuration cannot be used.
        WeightsError: Weights are missing, broken, or a pickle.
    """
    config = read_config(component / "config.json")  # a broken one is reported before broken weights
    weights = WeightFiles(component, allow_pickle=allow_pickle, variant=variant)
    return _plan(spec, component, config, library, class_name, weights)


def _plan(
    spec: ComponentSpec,
    component: Path,
    config: dict[str, Any],
    library: str,
    class_name: str,
    weights: WeightFiles | RenamedWeights,
) -> ComponentPlan:
    build = _builder(library, class_name, component)
    require_known_entries(component / "config.json", config, library, class_name)
    _require_weights(build, component, weights)
    text = (component / "config.json").read_text(encoding="utf-8")
    if config.pop(QUANTIZATION, None):  # the exported weights are not quantized
        text = json.dumps(config, indent=2) + "\n"
    return ComponentPlan(spec, build, weights, config, text)


def _builder(library: str, class_name: str, component: Path) -> Callable[[], torch.nn.Module]:
    """Return a function that returns the component's torch module, without weights."""
    model_class: Any = getattr(importlib.import_module(_LIBRARIES[library]), class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, torch.nn.Module)):
        raise FolderError(
            f"{component} is a {class_name}, which is not a model of {library}",
            f"a model of the installed {library}",
            f"correct {MODEL_INDEX}, or install the version of {library} that has it",
        )
    loader: Any = model_class
    try:
        if library == "diffusers":
            config = loader.load_config(str(component))
            return lambda: loader.from_config(config)
        config = loader.config_class.from_pretrained(str(component))
    except Exception as error:  # each library raises its own exceptions, without a common base class
        raise _bad_config(component, error) from error
    parts = [getattr(config, name) for name in config.sub_configs]
    # A model made of submodels, such as the safety checker, has its attentions in these and rejects the setting.
    for part in parts or [config]:
        part._attn_implementation = "sdpa"

    def build() -> torch.nn.Module:
        for each in (config, *parts):
            # A submodel is created in the dtype of its configuration, not in torch's default.
            each.dtype = torch.get_default_dtype()
        model: torch.nn.Module = loader(config)
        return model

    return build


def _require_weights(
    build: Callable[[], torch.nn.Module], component: Path, weights: WeightFiles | RenamedWeights
) -> None:
    """Raise unless the configuration builds a module and the files contain all of its parameters.

    The module has no storage, so this takes a second or two. Tracing takes minutes.
    """
    try:
        with torch.device("meta"), max_modules(len(weights)):
            module = build()
    except Exception as error:  # a module's constructor raises any exception for a wrong value
        raise _bad_config(component, error) from error
    weights.require_all_read({weights.find(name, tuple(each.shape)) for name, each in module.state_dict().items()})


def _bad_config(component: Path, error: Exception) -> FolderError:
    return FolderError(
        f"{component / 'config.json'} cannot be used ({type(error).__name__}: {error})",
        "the configuration of the model that model_index.json names",
        "copy it again from the original pipeline",
    )
