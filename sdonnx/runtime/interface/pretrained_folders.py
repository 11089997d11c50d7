"""Folders of `from_pretrained` and `save_pretrained`: where to find one, how to load it, and how to copy it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OptionError, OutputError, SdonnxError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.folder.folder_version import command_for
from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, atomic_folder, copy_folder
from sdonnx.runtime.graph_set import require_low_memory
from sdonnx.runtime.interface.missing_features import require_known

__all__ = ["PretrainedOptions", "changed_files", "require_arguments", "save_folder", "stale_files"]

_LOG = logging.getLogger("sdonnx")

_WITHOUT_EFFECT = {
    "add_watermarker": "no watermark is added",
    "feature_extractor": "images are prepared as the folder says",
    "image_processor": "images are prepared as the folder says",
    "low_cpu_mem_usage": "weights are mapped from the files",
    "requires_safety_checker": "the safety checker is used where the folder has one",
    "use_io_binding": "buffers are always bound",
    "use_onnx": "the folder is ONNX",
    "use_safetensors": "the folder's weights are ONNX files",
}
_COMPONENTS = (
    "image_encoder",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "transformer",
    "unet",
    "vae",
)
_REFUSED = {
    **dict.fromkeys(_COMPONENTS, "set it in diffusers, call save_pretrained, then export and optimize that folder"),
    "custom_pipeline": "leave it out; the folder says which pipeline it is",
    "adapter": "export the pipeline with --t2i_adapter FOLDER, and optimize it",
    "controlnet": "export the pipeline with --controlnet FOLDER, and optimize it",
    "export": "export and optimize the pipeline first, with sdonnx export and sdonnx optimize",
    "quantization_config": "leave it out; sdonnx optimize --quantize makes folders with weights in 8 bits",
}
_HUB_OPTIONS = ("token", "revision", "local_files_only", "cache_dir", "force_download")

# Variants of diffusers' weight files, with the precision of an optimized folder that they correspond to.
_VARIANTS = {"fp16": "float16", "fp32": "float32"}

_FOR_CPU = "folders for the CPU are float32"


@dataclass(frozen=True)
class PretrainedOptions:
    """Arguments of `from_pretrained` with the names that they have in diffusers.

    Attributes:
        pretrained_model_name_or_path: the folder, if it is passed by that name.
        scheduler: assigned to `pipeline.scheduler` after loading.
        device: "cpu", "cuda", "cuda:1", an index of a GPU or a torch.device, instead of provider and device_index.
        device_map: as `device`; "auto" and "balanced" have no effect on one device.
        torch_dtype: type of the weights, which must be the folder's type; "auto" for any.
        dtype: another name of torch_dtype.
        variant: "fp16" or "fp32", which must be the type of the folder.
        token: token of the Hugging Face hub; None for the one that `hf auth login` stored.
        revision: branch, tag or commit on the hub.
        local_files_only: whether to look only into the hub's cache.
        cache_dir: the hub's cache folder.
        force_download: whether to download files that are in the cache again.
    """

    pretrained_model_name_or_path: Any = None
    scheduler: Any = None
    device: Any = None
    device_map: Any = None
    torch_dtype: Any = None
    dtype: Any = None
    variant: str | None = None
    token: str | bool | None = None
    revision: str | None = None
    local_files_only: bool = False
    cache_dir: Path | str | None = None
    force_download: bool = False

    @classmethod
    def read(cls, options: Mapping[str, Any], own: Sequence[str]) -> PretrainedOptions:
        """Return the options; arguments without effect are logged.

        Args:
            options: keyword arguments by name.
            own: names of the other arguments of `from_pretrained`.

        Raises:
            OptionError: an argument is unknown, or not possible here.
        """
        known = [each.name for each in fields(cls)]
        for name, value in options.items():
            if name in _REFUSED and value is not None:
                raise OptionError(f"the argument {name}", "a folder that contains all components", _REFUSED[name])
            if name in _WITHOUT_EFFECT:
                _LOG.info("from_pretrained(%s=...) has no effect: %s", name, _WITHOUT_EFFECT[name])
        require_known(options, [*own, *known, *_WITHOUT_EFFECT, *_REFUSED])
        return cls(**{name: value for name, value in options.items() if name in known})

    def find(self, folder: Any) -> Path | str:
        """Return the folder, downloaded from the hub if it is the id of a repository.

        Args:
            folder: the folder as the caller passed it; None if it was passed by its name in diffusers.

        Raises:
            OptionError: it is no path, or given twice.
            FolderError: it cannot be downloaded.
        """
        if self.pretrained_model_name_or_path is not None:
            if folder is not None:
                raise OptionError("the folder and pretrained_model_name_or_path", "one of them")
            folder = self.pretrained_model_name_or_path
        if not isinstance(folder, str | os.PathLike) or not str(folder):
            raise OptionError(f"the folder is {folder!r}", "a path, or an id of the hub", "pass an optimized folder")
        from sdonnx.runtime.interface.hub import download, is_hub_id

        path = folder if isinstance(folder, str) else Path(folder)
        if not is_hub_id(path):
            return path
        return download(str(path), {name: getattr(self, name) for name in _HUB_OPTIONS})

    def place(self, provider: str | None, device_index: int) -> tuple[str | None, int]:
        """Return the provider and the index of the device.

        Raises:
            OptionError: the device is unknown, or differs from `provider`.
        """
        if isinstance(device_index, bool) or not isinstance(device_index, int) or device_index < 0:
            raise OptionError(f"device_index is {device_index!r}", "the index of a GPU", "pass for example 0")
        device = self.device
        if device is None and self.device_map not in (None, "auto", "balanced"):
            device = self.device_map
        if device is None:
            return provider, device_index
        found, index = parse_device(device)
        if provider is not None and found not in provider.lower():
            raise OptionError(f"provider is {provider!r} and device is {device!r}", "one of them", "leave out provider")
        return found, device_index if index is None else index

    def require_precision(self, folder: Path | str, report: Mapping[str, Any]) -> None:
        """Raise OptionError if the requested type of the weights is not the folder's type.

        Args:
            folder: the folder, for the message.
            report: content of `sdonnx.json`.
        """
        requested = {"torch_dtype": self.torch_dtype, "dtype": self.dtype, "variant": self.variant}
        for name, value in requested.items():
            if value is None or value == "auto":
                continue
            text = value.__name__ if isinstance(value, type) else str(value)
            wanted = _VARIANTS.get(text, text) if name == "variant" else text.removeprefix("torch.")
            if wanted == report.get("precision"):
                continue
            raise OptionError(
                f"{name} is {text}, and {folder} is {report.get('precision')}",
                f"{name} of the folder, or none",
                _remedy(wanted, report),
            )


def _remedy(wanted: str, report: Mapping[str, Any]) -> str:
    if wanted == "float16" and report.get("provider") == "cpu":
        return f"leave it out, since {_FOR_CPU}, or optimize again for a GPU: " + command_for(
            {**report, "precision": wanted}, provider="cuda"
        )
    if wanted in ("float16", "float32"):
        return f"leave it out, or optimize again: {command_for({**report, 'precision': wanted})}"
    return "leave it out; folders are float32 or float16"


def parse_device(device: Any) -> tuple[str, int | None]:
    """Return the provider and the index of a device: "cpu", "cuda", "cuda:1", an index, or a torch.device.

    Raises:
        OptionError: it is no such device.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return "cuda", device
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "cuda") and (index.isdecimal() or (not index and not str(device).endswith(":"))):
        return kind, int(index) if index else None
    raise OptionError(f"the device is {device!r}", '"cpu", "cuda" or for example "cuda:1"')


def require_arguments(max_sizes: Any, low_memory: Any, require_certificate: Any) -> None:
    """Check arguments of `from_pretrained`.

    Raises:
        OptionError: `low_memory` or `require_certificate` has another value than its type allows, or `max_sizes` is no
            positive integer.
    """
    require_low_memory(low_memory)
    if not isinstance(require_certificate, bool):
        raise OptionError(f"require_certificate is {require_certificate!r}", "True or False")
    if isinstance(max_sizes, bool) or not isinstance(max_sizes, int) or max_sizes < 1:
        raise OptionError(f"max_sizes is {max_sizes!r}", "a whole number from 1 on", "pass for example 8")


_SCHEDULER = "scheduler/scheduler_config.json"


def changed_files(folder: PipelineFolder, scheduler_config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the files that another scheduler configuration changes, by path with `/`."""
    if folder.config("scheduler", "scheduler_config.json") == dict(scheduler_config):
        return {}
    index = {**folder.index, "scheduler": ["diffusers", scheduler_config["_class_name"]]}
    contents = {_SCHEDULER: scheduler_config, MODEL_INDEX: index}
    return {name: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode() for name, content in contents.items()}


def stale_files(changed: Mapping[str, bytes]) -> frozenset[str]:
    """Return the files that do not belong into a changed copy: the certificate holds the hash of every file."""
    return frozenset({CERTIFICATE, CERTIFICATE_PAGE}) if changed else frozenset()


def save_folder(
    folder: PipelineFolder, out: Path | str, scheduler_config: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Write a copy of an optimized folder; on failure, nothing is left.

    Args:
        folder: the folder to copy.
        out: the folder to write.
        scheduler_config: content of the copy's `scheduler_config.json`.
        overwrite: whether to replace a pipeline folder at `out`.

    Raises:
        OutputError: `out` exists, overlaps `folder`, or cannot be written.
        FolderError: a file of `folder` cannot be read.
    """
    if not isinstance(out, str | Path) or not str(out):
        raise OutputError(f"the output is {out!r}", "a path", "pass the folder to write")
    changed = changed_files(folder, scheduler_config)
    stale = stale_files(changed)

    def ignored(at: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(at) == folder.path and (name in stale or name.startswith("."))]

    try:
        with atomic_folder(Path(out), overwrite=overwrite, inputs=[folder.path]) as partial:
            copy_folder(folder.path, partial, ignored)
            for name, content in changed.items():
                (partial / name).write_bytes(content)
    except SdonnxError as error:
        if "pass --overwrite" in error.remedy:
            raise type(error)(error.found, error.expected, "pass overwrite=True to replace it") from None
        raise
    except OSError as error:
        raise FolderError(f"{folder.path} cannot be copied ({error.strerror or error})", "readable files") from error
