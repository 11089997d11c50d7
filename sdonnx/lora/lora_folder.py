"""Names of the LoRA files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["list_loras", "lora_files", "lora_name"]

_SUFFIX = ".safetensors"
_SAME_NAMES = ("pytorch_lora_weights", "adapter_model")  # of all files that diffusers and PEFT save


def lora_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder and of those inside it.

    Raises:
        OptionError: there is no such folder.
    """
    if not os.path.isdir(folder):  # also for names that cannot exist
        raise OptionError(f"{folder} is no folder", "the folder of the LoRA files")
    return [path for path in sorted(folder.rglob(f"*{_SUFFIX}")) if path.is_file()]


def lora_name(path: Path) -> str:
    """Return the name of a LoRA file without suffix, or its folder's name if diffusers or PEFT chose the file's."""
    return Path(os.path.abspath(path)).parent.name if path.stem in _SAME_NAMES else path.stem


def list_loras(folder: Path) -> dict[str, Path]:
    """Return the safetensors files of a folder and of those inside it, by the names that `lora_name` returns.

    Args:
        folder: the folder.

    Raises:
        OptionError: there is no such folder, it has no files, a name occurs twice, or it cannot be shown.
    """
    found: dict[str, Path] = {}
    for path in lora_files(folder):
        name = lora_name(path)
        if name in found:
            raise OptionError(f"the LoRA name {name!r} occurs twice ({found[name]} and {path})", "a name for each")
        if not name.isprintable():  # bytes that are no UTF-8 cannot be sent as JSON
            raise OptionError(f"the LoRA file {path} has a name that cannot be shown", "printable text")
        found[name] = path
    if not found:
        raise OptionError(f"{folder} has no LoRA files", f"files with the suffix {_SUFFIX}")
    return found
