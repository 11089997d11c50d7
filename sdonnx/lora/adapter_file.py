"""Read adapter files (LoRA, LoHa, LoKr, DoRA) of Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_changes import Tensors, module_changes
from sdonnx.lora.adapter_keys import AdapterKey, enclosing_modules, format_of, parse_key, unsupported_method
from sdonnx.lora.adapter_scale import adapter_scales, metadata_config, read_peft_config
from sdonnx.lora.adapter_tensors import read_tensors
from sdonnx.lora.module_names import COMPONENTS, ModuleNames, is_original_block
from sdonnx.lora.weight_change import WeightChange

__all__ = ["PICKLES", "AdapterFile", "WeightChange", "adapter_from_tensors", "read_adapter"]

PICKLES = (".ckpt", ".pt", ".pth", ".bin")
"""Suffixes of files that are pickles, which can run code."""

# Names of the files in folders that PEFT and diffusers write.
_FILES_OF_FOLDERS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")

_SHOWN_KEYS = 3
_DIFFUSERS_BLOCKS = ("down_blocks_", "mid_block_", "up_blocks_")
_DIMENSIONS_OF_BOFT = 4  # of LyCORIS's oft_blocks; OFT has 3


@dataclass(frozen=True)
class AdapterFile:
    """The changes that an adapter makes to the weights of a pipeline.

    Attributes:
        changes: component -> name of the weight in its state dict, as diffusers and transformers spell it -> change.
        unknown: keys of the file that match nothing, none of which belongs to a layer of the model.
        format: "kohya", "lycoris", "diffusers", "diffusers-old" or "peft".
        metadata: the file's metadata.
    """

    changes: Mapping[str, Mapping[str, WeightChange]]
    unknown: tuple[str, ...]
    format: str
    metadata: Mapping[str, str]


def read_adapter(path: Path, names: Mapping[str, Collection[str]] | None = None) -> AdapterFile:
    """Return the content of an adapter file.

    Args:
        path: a safetensors file, or a folder that PEFT or diffusers wrote. PEFT's `adapter_config.json` next to its
            file is read too.
        names: names of the weights in the state dict of each component of the model. Keys that match none of them are
            unknown. By default, names that models of Stable Diffusion can have.

    Raises:
        WeightsError: the file cannot be used: it is a pickle, broken, exceeds a limit, has inconsistent tensors, or
            changes no weight, or has a tensor of a layer of the model that is not known.
        FolderError: the configuration next to it is broken.
    """
    path = _file_in(path)
    if path.suffix.lower() in PICKLES:
        raise WeightsError(
            f"{path} is a pickle, which can run code when opened",
            "a safetensors file",
            f"if you trust its author: sdonnx lora convert {path.name} -o {path.stem}.safetensors --allow_pickle",
        )
    return adapter_from_tensors(path, *read_tensors(path), names)


def adapter_from_tensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str], names: Mapping[str, Collection[str]] | None = None
) -> AdapterFile:
    """Return the adapter that a file's tensors are.

    Args:
        path: the file, for messages and for the configuration next to it.
        tensors: its tensors by key.
        metadata: its metadata.
        names: see `read_adapter`.

    Raises:
        WeightsError: the tensors cannot be used.
        FolderError: the configuration next to the file is broken.
    """
    modules, used, unknown = _grouped(path, tensors, ModuleNames(names))
    if not modules:
        shown = ", ".join(unknown[:_SHOWN_KEYS]) + (", ..." if len(unknown) > _SHOWN_KEYS else "")
        raise WeightsError(
            f"{path} changes no weight of {'the model' if names else 'Stable Diffusion 1, 2 or XL'} (keys: {shown})",
            "an adapter for the family of the model",
            "list the keys of the file with sdonnx lora show" if names else "use another adapter",
        )
    config = metadata_config(path, metadata)
    if not config and (path.name == _FILES_OF_FOLDERS[0] or any(key.spelling == "peft" for key in used)):
        config = read_peft_config(path.parent)
    scales = adapter_scales(path, config)
    changes: dict[str, dict[str, WeightChange]] = {}
    for (component, module), parts in sorted(modules.items()):
        found = module_changes(f"{path.name}: {module}", module, parts, scales[component])
        changes.setdefault(component, {}).update(found)
    frozen = {component: MappingProxyType(changes[component]) for component in COMPONENTS if component in changes}
    return AdapterFile(MappingProxyType(frozen), tuple(unknown), format_of(used), MappingProxyType(dict(metadata)))


def _file_in(path: Path) -> Path:
    """Return a file, or the file of an adapter in a folder."""
    if not os.path.isdir(path):  # also a name that cannot exist, which `read_tensors` refuses
        return path
    files = [path / name for name in _FILES_OF_FOLDERS if (path / name).is_file()]
    if len(files) != 1:
        raise WeightsError(f"{path} has {len(files)} of the files {' and '.join(_FILES_OF_FOLDERS)}", "one of them")
    return files[0]


def _grouped(
    path: Path, content: Tensors, names: ModuleNames
) -> tuple[dict[tuple[str, str], Tensors], list[AdapterKey], list[str]]:
    """Return the tensors by component, module and part; the keys that were used; and the other keys.

    A file with names of both diffusers and the original repositories has the same weights twice; as in diffusers, the
    original ones are left out.
    """
    parsed = {key: found for key in content if (found := parse_key(key)) is not None}
    of_unet = [found.module for found in parsed.values() if found.component == "unet"]
    has_both = any(map(is_original_block, of_unet)) and any(flat.startswith(_DIFFUSERS_BLOCKS) for flat in of_unet)
    modules: dict[tuple[str, str], Tensors] = {}
    used, unknown, parts = [], [], dict[str, str]()
    for key, tensor in content.items():
        name = None
        if (found := parsed.get(key)) is not None and not (has_both and is_original_block(found.module)):
            component = found.component or _default_text_encoder(path)
            parameter = "bias" if found.part in ("diff_b", "up_bias") else "weight"
            name = names.weight_name(component, found.module, parameter)
        if found is None or name is None:
            unknown.append(key)
            if found is None or not (has_both and is_original_block(found.module)):
                parts |= _part_of_a_layer(path, key, names)
            continue
        used.append(found)
        tensors = modules.setdefault((component, name.rpartition(".")[0]), {})
        if found.part in tensors:
            raise WeightsError(f"{path} has {key} also by another name", "one tensor")
        tensors[found.part] = tensor
    if parts:
        _refuse_parts(path, parts, content)
    return modules, used, unknown


def _part_of_a_layer(path: Path, key: str, names: ModuleNames) -> dict[str, str]:
    """Return a key that matches nothing with its last part, if it belongs to a layer of the model."""
    for found in enclosing_modules(key):
        if names.weight_name(found.component or _default_text_encoder(path), found.module) is not None:
            return {key: found.part}
    return {}


def _refuse_parts(path: Path, parts: Mapping[str, str], content: Tensors) -> NoReturn:
    """Raise WeightsError because of tensors of layers that the model has, by key, with the method that they belong to.

    Without them, the file would be another adapter.
    """
    method = unsupported_method(parts.values())
    key = next(key for key, part in parts.items() if method == unsupported_method([part]))
    if method == "OFT" and content[key].ndim == _DIMENSIONS_OF_BOFT:
        method = "BOFT"
    found = f"{path} has {key}, " + (f"a tensor of {method}" if method else "an unknown tensor of a layer of the model")
    remedy = f"{method} is not supported; use another adapter" if method else "use another adapter"
    raise WeightsError(found, "LoRA, LoHa, LoKr, DoRA or differences of weights", remedy)


def _default_text_encoder(path: Path) -> str:
    """Return the text encoder of a file that names none: the second one in a folder of that name."""
    return "text_encoder_2" if path.parent.name == "text_encoder_2" else "text_encoder"
