"""Open a single-file checkpoint as a pipeline folder without weights, and the weights of its components.

The folder is temporary. It contains `model_index.json`, the configurations, the scheduler and the tokenizers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, WeightsError
from sdonnx.export.module_construction import max_modules
from sdonnx.export.open_source import download_files, is_hub_id
from sdonnx.export.single_file.checkpoint_file import RenamedWeights, open_checkpoint
from sdonnx.export.single_file.checkpoint_kinds import VAE_PREFIXES, Kind, kind_of
from sdonnx.export.single_file.convert_keys import text_encoder_weights, unet_weights, vae_weights
from sdonnx.export.single_file.shape_configs import text_encoder_config, unet_config, vae_config
from sdonnx.export.stored_tensors import StoredTensors, WeightFiles
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, copy_folder, read_json, require_inside
from sdonnx.models.registry import family_of
from sdonnx.sample.architecture import ClassSpec
from sdonnx.sample.write_sample import build_network

__all__ = ["SingleFile", "open_single_file"]

_LOGGER = logging.getLogger(__name__)

_UNET, _VAE, _SCHEDULER = "unet", "vae", "scheduler"
_SCHEDULER_FILE = "scheduler_config.json"
_TOKENIZER_FILE = "tokenizer_config.json"

# Components that no checkpoint contains, as in diffusers' `from_single_file`.
_ABSENT = ("safety_checker", "feature_extractor", "image_encoder")

# Empty tensors with which checkpoints of Stable Diffusion XL say that they predict v and that their noise ends at a
# signal-to-noise ratio of zero (github.com/comfyanonymous/ComfyUI, comfy/supported_models.py).
_MARKS: Mapping[str, Mapping[str, Any]] = {
    "v_pred": {"prediction_type": "v_prediction"},
    "ztsnr": {"rescale_betas_zero_snr": True},
}


@dataclass(frozen=True)
class SingleFile:
    """A checkpoint as a pipeline.

    Attributes:
        folder: The pipeline without weights.
        weights: Weights, by the name of the component.
        configs: Folder with the configuration of each component.
        inputs: All files and folders that are read.
    """

    folder: PipelineFolder
    weights: Mapping[str, RenamedWeights | WeightFiles]
    configs: Mapping[str, Path]
    inputs: tuple[Path, ...]


@contextlib.contextmanager
def open_single_file(
    path: Path,
    config: str | Path | None = None,
    vae: Path | None = None,
    allow_pickle: Collection[str] = (),
) -> Iterator[SingleFile]:
    """Open a checkpoint in the original layout; its kind follows from its keys and shapes.

    Args:
        path: The checkpoint.
        config: A diffusers folder, or its id on the hub, with the tokenizers. Its scheduler and configurations replace
            those that come with the package. None for the tokenizers of the published pipeline on the hub.
        vae: File of an autoencoder that replaces the checkpoint's.
        allow_pickle: "all" or, for the file of the autoencoder, "vae", if these files may be pickles.

    Raises:
        FolderError: There are no tokenizers, or the folder does not fit the checkpoint.
        WeightsError: A file is broken, is no checkpoint, or lacks weights.
    """
    file = open_checkpoint(path, allow_pickle="all" in allow_pickle)
    kind, pipeline = kind_of(file.shapes, path)
    given = _given_folder(config)
    index = _index(kind, pipeline, given, path)
    weights: dict[str, RenamedWeights | WeightFiles] = {_UNET: unet_weights(file, has_sizes=kind.sizes > 0)}
    weights |= {encoder.name: text_encoder_weights(file, encoder) for encoder in kind.encoders}
    weights[_VAE] = _vae(file, vae, given, allow_pickle)
    with tempfile.TemporaryDirectory() as temporary:
        folder = PipelineFolder(Path(temporary), index)
        (folder.path / MODEL_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        configs = _write_configs(folder.path, kind, weights, given, path)
        _write_scheduler(folder.path, kind, given, file)
        _copy_tokenizers(folder.path, kind, given, path)
        _LOGGER.info("%s is %s, a %s", path, kind.title, index["_class_name"])
        inputs = (path, *([] if vae is None else [vae]), *([] if given is None else [given]))
        yield SingleFile(folder, weights, configs, inputs)


def _given_folder(config: str | Path | None) -> Path | None:
    """Return the folder of `--config`, after downloading it if it is an id on the hub."""
    if config is None:
        return None
    if is_hub_id(config):
        return download_files(str(config), ["*.json", "*.txt", "*/*.json", "*/*.txt", "*/*.model"], "pass a folder")
    folder = Path(config)
    if not folder.is_dir():
        raise FolderError(
            f"--config {config} is not a folder",
            "a diffusers folder, or the id of a pipeline on the hub",
        )
    return folder


def _index(kind: Kind, pipeline: str, given: Path | None, path: Path) -> dict[str, Any]:
    """Return the pipeline's model_index.json."""
    if given is None or not (given / MODEL_INDEX).exists():
        published = kind.published
        entries: dict[str, Any] = {
            "_class_name": pipeline,
            **{key: value for key, value in published.options.items() if key not in _ABSENT},
            **{name: _entry(spec) for name, spec in published.networks.items()},
            **{name: ["transformers", "CLIPTokenizer"] for name in published.tokenizers},
            _SCHEDULER: ["diffusers", published.scheduler.name],
        }
        absent = {key: [None, None] for key, value in entries.items() if value is None}
        return entries | absent | {name: [None, None] for name in _ABSENT if name in published.options}
    opened = PipelineFolder.open(given)
    known = family_of(opened).name == kind.family.name
    names = {_UNET, _VAE, *(encoder.name for encoder in kind.encoders)}
    has = {name for name in names | {"text_encoder", "text_encoder_2"} if _names_class(opened.index.get(name))}
    if not known or names != has:
        raise FolderError(
            f"{path} is {kind.title}, and {given} is a {opened.class_name} with {', '.join(sorted(has))}",
            f"a folder of {kind.title} for --config",
            "pass the folder of the pipeline that the checkpoint was made from",
        )
    for name in sorted(names):
        entry = _entry(kind.published.networks[name])
        if opened.index[name] != entry:
            raise FolderError(
                f"{given / MODEL_INDEX} says {opened.index[name]!r} for {name}",
                f"{entry!r}",
                f"pass --config FOLDER, a diffusers folder of {kind.title}",
            )
    index = dict(opened.index)
    index.update({name: [None, None] for name in _ABSENT if name in index})
    if "requires_safety_checker" in index:
        index["requires_safety_checker"] = False
    return index


def _entry(spec: ClassSpec) -> list[str]:
    """Return the entry of a component in model_index.json."""
    return [spec.library, spec.name]


def _names_class(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and None not in entry


def _vae(
    file: StoredTensors, vae: Path | None, given: Path | None, allow_pickle: Collection[str]
) -> RenamedWeights | WeightFiles:
    """Return the weights of the autoencoder: of its own file, of the checkpoint, or of the folder of `--config`."""
    if vae is not None:
        allowed = bool({"all", _VAE} & set(allow_pickle))
        file = open_checkpoint(vae, allow_pickle=allowed, component=_VAE)
    prefix = next((each for each in VAE_PREFIXES if any(key.startswith(each) for key in file.shapes)), None)
    if prefix is None and vae is not None:
        prefix = ""
    if prefix is not None:
        if all(f"{prefix}{coder}.conv_in.weight" in file.shapes for coder in ("encoder", "decoder")):
            return vae_weights(file, prefix)
        raise WeightsError(
            f"{file.path} has no complete autoencoder ({prefix}encoder.* and {prefix}decoder.*)",
            "an AutoencoderKL in the original or diffusers' layout",
            "pass --vae FILE with the autoencoder of this model",
        )
    if given is not None and any((given / _VAE).glob("*.safetensors")):
        _LOGGER.info("%s has no autoencoder; reading the one in %s", file.path, given / _VAE)
        return WeightFiles(given / _VAE)
    raise WeightsError(
        f"{file.path} has no autoencoder (VAE)",
        "tensors named first_stage_model.*",
        "pass --vae FILE, or --config FOLDER with an autoencoder",
    )


def _write_configs(
    folder: Path,
    kind: Kind,
    weights: Mapping[str, RenamedWeights | WeightFiles],
    given: Path | None,
    path: Path,
) -> dict[str, Path]:
    """Write the components' configurations; return the folders to read them from, which messages name."""
    configs = {}
    for name, read in weights.items():
        (folder / name).mkdir()
        if given is not None and _copied(given, Path(name, "config.json"), folder):
            configs[name] = given / name
            continue
        if isinstance(read, WeightFiles):
            raise FolderError(f"{given} has no {name}/config.json", "its configuration", "copy the folder again")
        spec = kind.published.networks[name]
        spec = replace(spec, config=_config(kind, name, spec, read, weights))
        try:
            with max_modules(len(read)):
                network: Any = build_network(spec)
        except Exception as error:  # a module's constructor raises any exception for a wrong value
            raise WeightsError(
                f"{path} has a {name} whose sizes do not fit together ({error})",
                "sizes as in Stable Diffusion 1, 2 or XL",
                "pass --config FOLDER with the configuration of this model",
            ) from error
        write = getattr(network, "save_config", None) or network.config.save_pretrained
        write(folder / name)
        configs[name] = folder / name
    return configs


def _copied(given: Path, file: Path, folder: Path) -> bool:
    """Copy a configuration of the folder of `--config`, and return whether there is one.

    Args:
        given: The folder of `--config`.
        file: The file of JSON, relative to the folder.
        folder: The folder to copy to; it contains the file's parent.

    Raises:
        FolderError: The file is broken, or a link leads out of the folder.
    """
    if not (given / file).exists():
        return False
    read_json(given / file)
    require_inside(given / file, given)
    shutil.copyfile(given / file, folder / file)
    return True


def _config(
    kind: Kind, name: str, spec: ClassSpec, read: RenamedWeights, weights: Mapping[str, RenamedWeights | WeightFiles]
) -> dict[str, Any]:
    shapes = {name.removeprefix("text_model."): source.shape for name, source in read.sources.items()}
    if name == _VAE:
        return vae_config(shapes, spec.config)
    if name != _UNET:
        unused = next(encoder.unused for encoder in kind.encoders if encoder.name == name)
        return text_encoder_config(shapes, spec.config, unused)
    pooled = None
    if kind.sizes:
        second = weights[kind.encoders[-1].name]
        projection = second.sources.get("text_projection.weight") if isinstance(second, RenamedWeights) else None
        pooled = 0 if projection is None else projection.shape[0]
    return unet_config(shapes, spec.config, pooled, kind.sizes)


def _write_scheduler(folder: Path, kind: Kind, given: Path | None, file: StoredTensors) -> None:
    (folder / _SCHEDULER).mkdir()
    if given is not None and _copied(given, Path(_SCHEDULER, _SCHEDULER_FILE), folder):
        return
    import diffusers

    published = kind.published.scheduler
    marks = {key: value for mark, changes in _MARKS.items() if mark in file.shapes for key, value in changes.items()}
    scheduler_class: Any = getattr(diffusers, published.name)
    scheduler_class.from_config(dict(published.config) | marks).save_pretrained(folder / _SCHEDULER)
    prediction = marks.get("prediction_type", published.config.get("prediction_type", "epsilon"))
    _LOGGER.info(
        "the model is assumed to predict %s; pass --config FOLDER with another scheduler otherwise", prediction
    )


def _copy_tokenizers(folder: Path, kind: Kind, given: Path | None, path: Path) -> None:
    names = list(kind.published.tokenizers)
    if given is None:
        patterns = [f"{name}/*" for name in names]
        remedy = f"pass --config FOLDER, a diffusers folder of {kind.title}"
        given = download_files(kind.hub, patterns, remedy, f"{path} has no tokenizer, and {kind.hub}")
    for name in names:
        source = given / name
        if not any((source / file).is_file() for file in ("tokenizer.json", "vocab.json")):
            raise FolderError(
                f"{given} has no {name}",
                f"a folder {name} with tokenizer.json or vocab.json",
                f"pass --config FOLDER, a diffusers folder of {kind.title}",
            )
        require_inside(source, given)
        read_json(source / _TOKENIZER_FILE)
        copy_folder(source, folder / name)
