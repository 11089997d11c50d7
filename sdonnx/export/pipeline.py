"""Export a diffusers pipeline to a folder of ONNX graphs, one component at a time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from accelerate import init_empty_weights
from torch.nn.modules.module import register_module_module_registration_hook

from sdonnx.adapters import ADAPTERS
from sdonnx.errors import FolderError, OptionError
from sdonnx.export.image_attention import attend_to_images
from sdonnx.export.interruption import interruptible
from sdonnx.export.ip_adapter import (
    AdaptedWeights,
    AdapterFile,
    ProjectionWeights,
    adapter_set,
    build_projections,
    find_image_encoder,
    image_processor,
)
from sdonnx.export.trace import trace
from sdonnx.export.weights import WeightFiles, Weights
from sdonnx.export.wrappers import wrap
from sdonnx.families import IMAGE_PROCESSOR, ComponentSpec, Family, Role, family_of
from sdonnx.folder import MODEL_INDEX, ONNX_MODEL, ONNX_WEIGHTS, PipelineFolder, atomic_folder, read_json

__all__ = ["DTYPES", "Progress", "export_pipeline"]

DTYPES = {"float32": torch.float32, "float16": torch.float16}

Progress = Callable[[str, int, int], None]
"""Told (what happens now, tensors written, tensors in all) while a component is exported."""

_TOKENIZER, _SENTENCEPIECE = "tokenizer.json", "spiece.model"

# What model_index.json says -> the module that has the class: a pipeline's own classes lie beside it.
_LIBRARIES = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "stable_diffusion": "diffusers.pipelines.stable_diffusion",
}


def export_pipeline(
    source: str | Path,
    out: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    allow_pickle: Collection[str] = (),
    ip_adapters: Sequence[str | Path] = (),
    image_encoder: str | Path | None = None,
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
        ip_adapters: files of IP-Adapters, or folders that hold one each, in the order of their images.
        image_encoder: the folder of their image encoder; None for the pipeline's, or `image_encoder` beside an adapter.
        progress: told what happens.

    Raises:
        SdonnxError: the pipeline cannot be read or the output cannot be written.
    """
    if dtype not in DTYPES:
        raise OptionError(f"the dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}", "pass one of these")
    folder = PipelineFolder.open(_local(source))
    family = family_of(folder)
    if dtype == "float16" and any(spec.stream_scale is not None for spec in family.components):
        raise OptionError(
            f"--dtype float16 of {family.name}, whose text encoder goes beyond its range",
            "float32",
            "export in float32, and pass --float16 to the optimizer, which knows how",
        )
    sources = sorted({spec.source for spec in family.components} | ({"image_encoder"} if ip_adapters else set()))
    if unknown := sorted(set(allow_pickle) - set(sources)):
        raise OptionError(f"--allow_pickle {unknown[0]}", f"components of {', '.join(sources)}", "pass some of these")
    # Everything that can be wrong with the input is looked at before anything is written.
    for name, file in family.extras:
        folder.config(name, file)
        _require_sentencepiece(folder.path / name)
    plans = [_plan(folder, spec, allow_pickle) for spec in family.components]
    if image_encoder is not None and not ip_adapters:
        raise OptionError("--image-encoder without --ip-adapter", "both", "name the adapter too")
    inputs, processor = [folder.path], None
    if ip_adapters:
        files = [AdapterFile.open(Path(path)) for path in ip_adapters]
        encoder = find_image_encoder(None if image_encoder is None else Path(image_encoder), files, folder)
        family, plans = _adapted(family, plans, files, encoder, "image_encoder" in allow_pickle)
        inputs += [encoder, *(file.path for file in files)]
        processor = image_processor(folder, encoder)
    with atomic_folder(out, overwrite, inputs) as made:
        _copy_extras(folder, family, made)
        if processor is not None:
            processor.save_pretrained(made / IMAGE_PROCESSOR)
        for plan in plans:
            with interruptible():
                if progress:
                    progress(f"{plan.spec.name}: tracing", 0, 0)
                config = family.joined(folder, plan.config)
                model = trace(plan.spec, config, plan.build, wrap, plan.weights, DTYPES[dtype])
                _write(model, made / plan.spec.name, progress)
                (made / plan.spec.name / "config.json").write_text(plan.written, encoding="utf-8")
                del model
                gc.collect()


@dataclass(frozen=True)
class _Plan:
    """How one component is exported.

    Attributes:
        spec: the component.
        build: makes its torch module, with no weights in it.
        weights: where they are read from.
        config: its configuration.
        written: the text of that.
    """

    spec: ComponentSpec
    build: Callable[[], torch.nn.Module]
    weights: Weights
    config: dict[str, Any]
    written: str


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


def _plan(folder: PipelineFolder, spec: ComponentSpec, allow_pickle: Collection[str]) -> _Plan:
    entry = folder.index.get(spec.source)
    if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in (*_LIBRARIES,)):
        raise FolderError(
            f"{folder.path / MODEL_INDEX} says {entry!r} for {spec.source}",
            "a model of diffusers or transformers",
            "export the original diffusers pipeline",
        )
    library, class_name = entry
    return _model_plan(spec, folder.component(spec.source), library, str(class_name), spec.source in allow_pickle)


def _model_plan(spec: ComponentSpec, component: Path, library: str, class_name: str, allow_pickle: bool) -> _Plan:
    config = read_json(component / "config.json")
    weights = WeightFiles(component, allow_pickle=allow_pickle)
    build = _builder(library, class_name, component)
    _require_weights(build, component, weights)
    return _Plan(spec, build, weights, config, (component / "config.json").read_text(encoding="utf-8"))


def _adapted(
    family: Family, plans: Sequence[_Plan], files: Sequence[AdapterFile], encoder: Path, allow_pickle: bool
) -> tuple[Family, list[_Plan]]:
    """Return the family with IP-Adapters, and how its components are exported."""
    unet = next(plan for plan in plans if plan.spec.role is Role.DENOISER)
    with init_empty_weights(include_buffers=True):
        empty: Any = unet.build()
        attentions = list(empty.attn_processors)
        adapters = adapter_set(files, encoder, empty)
    family = family.adapted(adapters)

    def build() -> torch.nn.Module:
        module = unet.build()
        attend_to_images(module, len(files))
        return module

    projections = partial(build_projections, files)
    own = {plan.spec.name: plan for plan in plans}
    for spec in family.components:
        if spec.role is Role.DENOISER:
            weights = AdaptedWeights(unet.weights, files, attentions)
            own[spec.name] = replace(unet, spec=spec, build=build, weights=weights)
        elif spec.role is Role.IMAGE_PROMPT_ENCODER:
            own[spec.name] = _model_plan(spec, encoder, "transformers", "CLIPVisionModelWithProjection", allow_pickle)
        elif spec.role is Role.IMAGE_PROMPT_ADAPTER:
            written = json.dumps(adapters.config(), indent=2) + "\n"
            own[spec.name] = _Plan(spec, projections, ProjectionWeights(files), adapters.config(), written)
    return family, [own[spec.name] for spec in family.components]


def _builder(library: str, class_name: str, component: Path) -> Callable[[], torch.nn.Module]:
    """Return a function that makes the component's torch module, with no weights in it."""
    model_class: Any = getattr(importlib.import_module(_LIBRARIES[library]), class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, torch.nn.Module)):
        raise FolderError(
            f"{component} is a {class_name}, which is no model of {library}",
            f"a model of the installed {library}",
            f"correct {MODEL_INDEX}, or install the version of {library} that has it",
        )
    loader: Any = model_class
    try:
        if library == "diffusers":
            config = loader.load_config(str(component))
            return lambda: loader.from_config(config)
        config = loader.config_class.from_pretrained(str(component))
    except Exception as error:  # each library has its own, and they share no class
        raise _bad_config(component, error) from error
    parts = [getattr(config, name) for name in config.sub_configs]
    # A model made of others, as the safety checker is, attends in its parts and takes no choice for itself.
    for part in parts or [config]:
        part._attn_implementation = "sdpa"

    def build() -> torch.nn.Module:
        for each in (config, *parts):
            # A model within a model is made in the type that its configuration says, not in torch's default.
            each.dtype = torch.get_default_dtype()
        model: torch.nn.Module = loader(config)
        return model

    return build


@contextlib.contextmanager
def _at_most(modules: int) -> Iterator[None]:
    """Let no more modules than that be put together: a configuration may ask for a billion layers."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > modules:
            raise ValueError("it describes far more layers than there are weights for")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _require_weights(build: Callable[[], torch.nn.Module], component: Path, weights: WeightFiles) -> None:
    """Raise unless the configuration makes a module and the files hold every parameter of it.

    The module has no storage, so this takes a second or two where tracing takes minutes.
    """
    try:
        # A layer has two tensors or so, and few modules around it.
        with init_empty_weights(include_buffers=True), _at_most(100 + 10 * len(weights)):
            module = build()
    except Exception as error:  # whatever a module's constructor makes of a wrong value
        raise _bad_config(component, error) from error
    for name, tensor in module.state_dict().items():
        weights.find(name, tuple(tensor.shape))


def _bad_config(component: Path, error: Exception) -> FolderError:
    return FolderError(
        f"{component / 'config.json'} cannot be used ({type(error).__name__}: {error})",
        "the configuration of the model that model_index.json names",
        "copy it again from the original pipeline",
    )


def _write(model: ir.Model, component: Path, progress: Progress | None) -> None:
    component.mkdir()

    def told(tensor: ir.TensorProtocol, info: Any) -> None:
        if progress:
            progress(f"{component.name}: writing", info.index + 1, info.total)

    ir.save(model, component / ONNX_MODEL, external_data=ONNX_WEIGHTS, callback=told)


def _copy_extras(folder: PipelineFolder, family: Family, out: Path) -> None:
    for name, _ in family.extras:
        if name == IMAGE_PROCESSOR:
            continue  # made for the image encoder, whatever the pipeline has
        shutil.copytree(folder.component(name), out / name)
        if name.startswith("tokenizer"):
            _add_tokenizer_json(out / name)
    if family.adapters is None:
        shutil.copyfile(folder.path / MODEL_INDEX, out / MODEL_INDEX)
        return
    index = dict(folder.index) | {ADAPTERS: ["sdonnx", "AdapterSet"]}
    index["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"]
    (out / MODEL_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _require_sentencepiece(tokenizer: Path) -> None:
    """Raise where a tokenizer is a file of SentencePiece, which alone reads it."""
    alone = (tokenizer / _SENTENCEPIECE).is_file() and not (tokenizer / _TOKENIZER).is_file()
    if alone and importlib.util.find_spec("sentencepiece") is None:
        raise FolderError(
            f"{tokenizer} has no {_TOKENIZER} but {_SENTENCEPIECE}",
            "the package sentencepiece",
            "pip install sentencepiece",
        )


def _add_tokenizer_json(tokenizer: Path) -> None:
    """Write tokenizer.json, which the run-time reads, where a folder has only vocab and merges, or SentencePiece's."""
    if (tokenizer / _TOKENIZER).is_file():
        return
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False, local_files_only=True)
        text = made.backend_tokenizer.to_str()
    except Exception as error:  # the tokenizers library raises nothing more special
        raise FolderError(f"{tokenizer} cannot be read ({error})", "a tokenizer", "copy the folder again") from error
    (tokenizer / _TOKENIZER).write_text(text, encoding="utf-8")
