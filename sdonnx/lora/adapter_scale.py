"""Scales of adapters without `alpha` tensors: PEFT's configuration, from the file's metadata or a file next to it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdonnx.errors import WeightsError
from sdonnx.folder.pipeline_folder import read_json
from sdonnx.lora.module_names import COMPONENTS

__all__ = ["AdapterScale", "adapter_scales", "metadata_config", "read_peft_config"]

_METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY
_CONFIG = "adapter_config.json"  # peft.utils.CONFIG_NAME
_METHODS = ("LORA", "LOHA", "LOKR")

_MODULE_PATTERN = re.compile(r"\^?[\w.]{1,500}")


@dataclass(frozen=True)
class AdapterScale:
    """Scales of the modules of one component.

    Attributes:
        alpha: numerator; None for a scale of 1.
        rank: denominator of LoHa and LoKr; their tensors do not show it if they are whole.
        alpha_pattern: alphas of modules, by the ends of their names.
        rank_pattern: ranks of modules, by the ends of their names.
        by_root: whether the denominator is the root of the rank (https://arxiv.org/abs/2312.03732).
    """

    alpha: float | None = None
    rank: int | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    by_root: bool = False

    def factor(self, module: str, rank: int) -> float:
        """Return the factor of a module's change at scale 1.

        Args:
            module: the module's name with dots.
            rank: the rank of its tensors; 0 if they do not show it.
        """
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        if alpha is None:
            return 1.0
        divisor = rank or _matched(self.rank_pattern, module, self.rank) or 0
        if divisor < 1:
            return 1.0
        return float(alpha) / (math.sqrt(divisor) if self.by_root else divisor)


def _matched(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first name that a module has or ends with; `^` marks the beginning of a name."""
    for key, value in pattern.items():
        name = key.removeprefix("^")
        if module == name or (not key.startswith("^") and module.endswith(f".{name}")):
            return value
    return default


def metadata_config(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the configuration that diffusers wrote into a file's metadata; empty if there is none.

    Raises:
        WeightsError: it is not a JSON object.
    """
    text = metadata.get(_METADATA_KEY)
    if text is None:
        return {}
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"{_METADATA_KEY} in its metadata", str(error)) from None
    return config


def read_peft_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration in a folder that PEFT wrote; empty if there is none.

    Raises:
        FolderError: it is not a JSON object.
        WeightsError: it is for another method.
    """
    if not (folder / _CONFIG).exists():
        return {}
    config = read_json(folder / _CONFIG)
    method = config.get("peft_type")
    if method not in _METHODS:
        raise WeightsError(f"{folder / _CONFIG} has the method {method!r}", f"one of {', '.join(_METHODS)}")
    return config


def adapter_scales(path: Path, config: Mapping[str, Any]) -> dict[str, AdapterScale]:
    """Return the scales of each component from a configuration.

    Args:
        path: the adapter's file, for messages.
        config: PEFT's configuration, or one for each of several components with prefixes such as "unet.".

    Raises:
        WeightsError: a value cannot be used.
    """
    return {component: _scale(path, _of_component(config, component)) for component in COMPONENTS}


def _of_component(config: Mapping[str, Any], component: str) -> Mapping[str, Any]:
    prefix = f"{component}."
    own = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
    return own or config


def _scale(path: Path, config: Mapping[str, Any]) -> AdapterScale:
    alpha, rank = config.get("lora_alpha", config.get("alpha")), config.get("r")
    alphas, ranks = (_pattern(path, name, config.get(name)) for name in ("alpha_pattern", "rank_pattern"))
    for value in (alpha, *alphas.values()):
        if value is not None and not (type(value) in (int, float) and -1e30 < value < 1e30):
            raise _unusable(path, "an alpha in its configuration", f"it is {value!r}")
    for value in (rank, *ranks.values()):
        if value is not None and not (type(value) is int and 0 < value < 2**31):
            raise _unusable(path, "a rank in its configuration", f"it is {value!r}")
    return AdapterScale(alpha, rank, alphas, ranks, config.get("use_rslora") is True)


def _pattern(path: Path, name: str, value: Any) -> Mapping[str, Any]:
    """Return a pattern of PEFT. Its keys are regular expressions; only names of modules are accepted."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _unusable(path, f"{name} in its configuration", "it is not an object")
    for key in value:
        if not _MODULE_PATTERN.fullmatch(key):
            raise _unusable(path, f"{name} in its configuration", f"{key!r} is not the name of a module")
    return value


def _unusable(path: Path, subject: str, problem: str) -> WeightsError:
    return WeightsError(f"{path}: {subject} cannot be used ({problem})", "a configuration of PEFT")
