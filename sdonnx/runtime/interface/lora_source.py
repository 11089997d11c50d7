"""Where LoRA weights come from: a file, a folder, the hub, or tensors in memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdonnx.errors import OptionError
from sdonnx.lora.adapter_file import AdapterFile, adapter_from_tensors, read_adapter
from sdonnx.lora.adapter_tensors import checked
from sdonnx.runtime.interface.hub import download_lora, is_hub_id

__all__ = ["read_lora_source"]

_IN_MEMORY = Path("the LoRA's tensors")  # replaces the file in messages


def read_lora_source(
    source: Any,
    weight_name: str | None,
    subfolder: str | None,
    names: Mapping[str, Collection[str]],
    hub_options: Mapping[str, Any],
) -> AdapterFile:
    """Return the adapter of a source.

    Args:
        source: a safetensors file; a folder that PEFT or diffusers wrote; an id of the hub; tensors of torch or numpy
            by their names; or an adapter that was read.
        weight_name: the file in a folder or a repository.
        subfolder: the folder of the file in a folder or a repository.
        names: see `read_adapter`.
        hub_options: options of the download from the hub.

    Raises:
        OptionError: the source has another type.
        WeightsError: the file cannot be used.
        FolderError: the repository, or a configuration next to the file, cannot be read.
    """
    if isinstance(source, AdapterFile):
        return source
    if isinstance(source, Mapping):
        tensors = {str(key): _tensor(str(key), value) for key, value in source.items()}
        return adapter_from_tensors(_IN_MEMORY, tensors, {}, names)
    if not isinstance(source, str | Path):
        raise OptionError(
            f"a LoRA of the type {type(source).__name__}",
            "a safetensors file, a folder, an id of the hub, or tensors by their names",
        )
    if isinstance(source, str) and not os.path.exists(source) and is_hub_id(source):
        return read_adapter(download_lora(source, weight_name, subfolder, hub_options), names)
    parts = [part for part in (subfolder, weight_name) if part is not None]
    return read_adapter(Path(source, *parts), names)


def _tensor(key: str, value: Any) -> Any:
    """Return a tensor of torch or numpy as an array, as if it were read from a file."""
    if hasattr(value, "detach"):  # numpy has no bfloat16
        plain = value.detach().cpu()
        value = (plain if str(plain.dtype) == "torch.float16" else plain.float()).numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fi":
        raise OptionError(f"{key} of the LoRA is of the type {type(value).__name__}", "a tensor")
    return checked(_IN_MEMORY, key, value)
