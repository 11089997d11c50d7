"""Export a diffusers pipeline to a folder of ONNX graphs, one component at a time."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from sdonnx.errors import FolderError, OptionError
from sdonnx.export.component_plan import ComponentPlan, plan_component
from sdonnx.export.config_entries import require_known_index
from sdonnx.export.control_network_export import ControlFiles
from sdonnx.export.exported_families import wrapper_of
from sdonnx.export.ip_adapter_export import IMAGE_ENCODER, AdapterFiles
from sdonnx.export.open_source import is_single_file, open_source
from sdonnx.export.single_file.open_single_file import SingleFile, open_single_file
from sdonnx.export.trace import trace
from sdonnx.export.weight_files import find_weights, require_safetensors, require_variant
from sdonnx.folder.pipeline_folder import (
    MODEL_INDEX,
    ONNX_MODEL,
    ONNX_WEIGHTS,
    PipelineFolder,
    atomic_folder,
    copy_folder,
)
from sdonnx.installation import install_command
from sdonnx.models.control_networks import CONTROLNET, T2I_ADAPTER
from sdonnx.models.image_adapters import IMAGE_PROCESSOR
from sdonnx.models.registry import family_of
from sdonnx.models.spec import Family

__all__ = ["DTYPES", "Progress", "export_pipeline"]

DTYPES = {"float32": torch.float32, "float16": torch.float16}

Progress = Callable[[str, int, int], None]
"""Progress callback: `(message, tensors_written, total_tensors)`."""

_LOGGER = logging.getLogger(__name__)

_ALL = "all"  # of allow_pickle: every component

_TOKENIZER, _SENTENCEPIECE = "tokenizer.json", "spiece.model"


@dataclass(frozen=True)
class _AddedFiles:
    """Files that a pipeline is exported with; see `export_pipeline`."""

    ip_adapters: Sequence[str | Path]
    image_encoder: str | Path | None
    controlnets: Sequence[str | Path]
    t2i_adapters: Sequence[str | Path]

    @property
    def components(self) -> set[str]:
        """Names of further components that may have pickles as weights."""
        encoder = {IMAGE_ENCODER} if self.ip_adapters else set()
        controls = {CONTROLNET} if self.controlnets else set()
        return encoder | controls | ({T2I_ADAPTER} if self.t2i_adapters else set())


def export_pipeline(
    source: str | Path,
    out: Path,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
    allow_pickle: Collection[str] = (),
    variant: str | None = None,
    ip_adapters: Sequence[str | Path] = (),
    image_encoder: str | Path | None = None,
    config: str | Path | None = None,
    vae: str | Path | None = None,
    controlnets: Sequence[str | Path] = (),
    t2i_adapters: Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> None:
    """Export the diffusers pipeline `source` to the ONNX folder `out`.

    Graphs have opset 23, only standard operators, and dynamic batch, height, width and sequence length. Weights are
    read one at a time, so peak memory does not grow with the model.

    Args:
        source: A local pipeline folder, the id of a pipeline on the Hugging Face hub, or a single-file checkpoint of
            Stable Diffusion 1, 2 or XL in the original layout.
        out: The folder to write.
        dtype: "float32" or "float16": type of weights, inputs and outputs.
        overwrite: Replace `out` if it contains a pipeline.
        allow_pickle: Components that may read their weights from a pickle (`.bin`); "all" for every one, and
            for a single file (`.ckpt`).
        variant: Variant of the weights, such as "fp16" for `*.fp16.safetensors`. Components without it are read from
            the files without a variant. By default, a variant is read only where there are no other weights.
        ip_adapters: Files of IP-Adapters, or folders with one adapter each, in the order in which a call passes images.
        image_encoder: Folder of their image encoder. None for the pipeline's, or `image_encoder` next to an adapter.
        config: For a single file, a diffusers folder or its id on the hub: its tokenizers, scheduler and configurations
            are used. None for the tokenizers of the published pipeline on the hub, and its scheduler.
        vae: For a single file, a file with the autoencoder to use.
        controlnets: Folders of ControlNets, in the order in which a call passes images.
        t2i_adapters: Folders of T2I-Adapters, instead of ControlNets.
        progress: Progress callback.

    Raises:
        SdonnxError: The pipeline cannot be read or the output cannot be written.
    """
    if dtype not in DTYPES:
        raise OptionError(f"the dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}")
    with contextlib.ExitStack() as stack:
        single = None
        if is_single_file(source):
            if variant is not None:
                raise OptionError(f"--variant {variant} with the file {source}", "no --variant")
            autoencoder = None if vae is None else Path(vae)
            single = stack.enter_context(open_single_file(Path(source), config, autoencoder, allow_pickle))
        elif config is not None or vae is not None:
            name = "--vae" if config is None else "--config"
            raise OptionError(f"{name} with {source}", "a single-file checkpoint", f"omit {name}")
        folder = open_source(source, variant) if single is None else single.folder
        files = _AddedFiles(ip_adapters, image_encoder, controlnets, t2i_adapters)
        _export(folder, single, out, dtype, overwrite, allow_pickle, variant, files, progress)


def _export(
    folder: PipelineFolder,
    single: SingleFile | None,
    out: Path,
    dtype: str,
    overwrite: bool,
    allow_pickle: Collection[str],
    variant: str | None,
    added: _AddedFiles,
    progress: Progress | None,
) -> None:
    """Export an opened pipeline; its weights are in `single` if it is a single file, else in the folder."""
    family = family_of(folder)
    controls = ControlFiles.open(added.controlnets, added.t2i_adapters, family)
    allow_pickle = _require_options(family, dtype, allow_pickle, added)
    # All inputs are checked before anything is written.
    require_known_index(folder)
    for name, file in family.extras:
        folder.config(name, file)
        _require_sentencepiece(folder.path / name)
    sources = [folder.path / name for name in dict.fromkeys(spec.source for spec in family.components)]
    if single is None:
        require_safetensors(sources, allow_pickle)
        if variant is not None:
            require_variant(sources, variant)
    plans = [plan_component(folder, spec, allow_pickle, variant, single) for spec in family.components]
    if single is None:
        _log_variants(folder, family, allow_pickle, variant)
    adapters = AdapterFiles.open(added.ip_adapters, added.image_encoder, folder)
    inputs = [folder.path] if single is None else list(single.inputs)
    index, processor = (folder.path / MODEL_INDEX).read_bytes(), None
    if adapters is not None:
        family, plans = adapters.adapt(family, plans, IMAGE_ENCODER in allow_pickle)
        inputs += adapters.inputs
        processor = adapters.processor(folder)
        index = (json.dumps(adapters.index(folder), indent=2) + "\n").encode()
    plans += controls.plans(plans, allow_pickle)
    family, inputs, index = controls.extend(family, plans), [*inputs, *controls.inputs], controls.index(index)
    with atomic_folder(out, overwrite, inputs) as made:
        _copy_extras(folder, family, made)
        (made / MODEL_INDEX).write_bytes(index)
        if processor is not None:
            processor.save_pretrained(made / IMAGE_PROCESSOR)
        for plan in plans:
            _export_component(folder, family, plan, made, dtype, progress)


def _require_options(family: Family, dtype: str, allow_pickle: Collection[str], added: _AddedFiles) -> list[str]:
    """Return the components that may have pickles as weights, after a check of the options."""
    if dtype == "float16" and any(spec.stream_scale is not None for spec in family.components):
        raise OptionError(
            f"--dtype float16 of {family.name}, whose text encoder exceeds its range",
            "float32",
            "export in float32, and pass --float16 to the optimizer, which scales the text encoder",
        )
    sources = sorted({spec.source for spec in family.components} | added.components)
    if unknown := sorted(set(allow_pickle) - {_ALL, *sources}):
        known = f"all, or components of {', '.join(sources)}"
        raise OptionError(f"--allow_pickle {unknown[0]}", known)
    return sources if _ALL in allow_pickle else list(allow_pickle)


def _log_variants(folder: PipelineFolder, family: Family, allow_pickle: Collection[str], variant: str | None) -> None:
    """Log the variants that are read, unless there are none."""
    sources = dict.fromkeys(spec.source for spec in family.components)
    chosen = {
        source: find_weights(folder.path / source, allow_pickle=source in allow_pickle, variant=variant)[1]
        for source in sources
    }
    for name in dict.fromkeys(filter(None, chosen.values())):
        components = ", ".join(each for each in chosen if chosen[each] == name)
        _LOGGER.info("reading the weights of the variant %s of %s", name, components)


def _export_component(
    folder: PipelineFolder, family: Family, plan: ComponentPlan, out: Path, dtype: str, progress: Progress | None
) -> None:
    """Trace a component, and write its graph, weights and configuration to the folder `out`."""
    name, start = plan.spec.name, time.perf_counter()
    if progress:
        progress(f"{name}: tracing", 0, 0)
    config = family.join_config(folder, plan.config)
    model = trace(plan.spec, config, plan.build, wrapper_of(family, plan.spec), plan.weights, DTYPES[dtype])

    def on_tensor(tensor: ir.TensorProtocol, info: Any) -> None:
        if progress:
            progress(f"{name}: writing", info.index + 1, info.total)

    (out / name).mkdir()
    ir.save(model, out / name / ONNX_MODEL, external_data=ONNX_WEIGHTS, callback=on_tensor)
    (out / name / "config.json").write_text(plan.text, encoding="utf-8")
    _LOGGER.debug("exported %s in %.1f s", name, time.perf_counter() - start)
    del model
    gc.collect()


def _copy_extras(folder: PipelineFolder, family: Family, out: Path) -> None:
    for name, _ in family.extras:
        if name == IMAGE_PROCESSOR:
            continue  # written for the image encoder, independent of the pipeline's own
        copy_folder(folder.component(name), out / name)
        if name.startswith("tokenizer"):
            _add_tokenizer_json(out / name)


def _require_sentencepiece(tokenizer: Path) -> None:
    """Raise if a tokenizer is only a SentencePiece file and the package that reads it is missing."""
    only = (tokenizer / _SENTENCEPIECE).is_file() and not (tokenizer / _TOKENIZER).is_file()
    if only and importlib.util.find_spec("sentencepiece") is None:
        raise FolderError(
            f"{tokenizer} has {_SENTENCEPIECE} but no {_TOKENIZER}",
            "the package sentencepiece",
            install_command("export"),
        )


def _add_tokenizer_json(tokenizer: Path) -> None:
    """Write tokenizer.json, which the run-time reads, if a folder has only vocab and merges or a SentencePiece file."""
    if (tokenizer / _TOKENIZER).is_file():
        return
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False, local_files_only=True)
        text = made.backend_tokenizer.to_str()
    except Exception as error:  # the tokenizers library raises plain Exception
        raise FolderError(f"{tokenizer} cannot be read ({error})", "a tokenizer", "copy the folder again") from error
    (tokenizer / _TOKENIZER).write_text(text, encoding="utf-8")
