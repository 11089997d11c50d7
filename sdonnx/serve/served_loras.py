"""LoRA files that a server offers by name, and the adapters that its pipelines use."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdonnx.errors import DeviceMemoryError, OptionError, SdonnxError, WeightsError
from sdonnx.lora.adapter_file import AdapterFile
from sdonnx.lora.loaded_adapters import warn_of_unknown_keys
from sdonnx.runtime.device.device import host_memory_errors

if TYPE_CHECKING:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = ["MAX_LORAS", "MAX_LORA_WEIGHT", "LoraWeights", "ServedLoras", "plan_loras"]

MAX_LORAS = 8
"""Maximum number of LoRAs in a request."""

MAX_LORA_WEIGHT = 10.0
"""Maximum absolute weight of a LoRA."""

_MAX_FILES = 16  # files with kept content; at least MAX_LORAS, so that a request's files fit

_LOG = logging.getLogger("sdonnx")

LoraWeights = tuple[tuple[str, float], ...]
"""Names and weights, in the order of the names, without weights of 0."""


def plan_loras(given: Any, known: Collection[str]) -> LoraWeights:
    """Return the LoRAs of a request in a form that is equal for equal images.

    Args:
        given: weights by name, or None.
        known: names of the LoRAs that the server offers.

    Raises:
        OptionError: a name is unknown, a weight cannot be used, or there are too many.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise OptionError(f"loras is a {type(given).__name__}", "a mapping of names to weights", "pass {NAME: 1.0}")
    if given and not known:
        raise OptionError("loras given, but no LoRA files are served", "a request without loras")
    if len(given) > MAX_LORAS:
        raise OptionError(f"loras has {len(given)} entries", f"at most {MAX_LORAS}")
    for name, weight in given.items():
        if not isinstance(name, str) or name not in known:
            raise OptionError(f"the LoRA {name!r} is unknown", "a name of a LoRA that is served")
        is_number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not is_number or not -MAX_LORA_WEIGHT <= weight <= MAX_LORA_WEIGHT:  # NaN is neither
            expected = f"a number from {-MAX_LORA_WEIGHT:g} to {MAX_LORA_WEIGHT:g}"
            raise OptionError(f"the weight of the LoRA {name} is {weight!r}", expected)
    return tuple((name, float(weight)) for name, weight in sorted(given.items()) if weight)


class ServedLoras:
    """LoRA files by name. Only the thread that generates images calls `use` and `is_used`.

    Args:
        files: safetensors files, or folders that PEFT or diffusers wrote, by name.

    Attributes:
        names: the names, in the order of the files.

    Raises:
        OptionError: a name is empty, or there is no such file.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            if not name:
                raise OptionError("the name of a LoRA is empty", "a text", "pass {NAME: PATH}")
            if not path.exists():
                raise OptionError(f"the LoRA {path}, which does not exist", "a safetensors file")
        self._paths = {name: path.absolute() for name, path in files.items()}
        self.names = list(files)
        self._read: OrderedDict[tuple[str, str], AdapterFile] = OrderedDict()  # by model and name, the oldest first
        self._used: dict[str, LoraWeights] = {}  # by model

    def is_used(self, model: str, loras: LoraWeights) -> bool:
        """Return whether the pipeline of a model uses exactly these adapters."""
        return not self._paths or self._used.get(model, ()) == loras

    def use(self, model: str, pipeline: OrtDiffusionPipeline, loras: LoraWeights) -> float | None:
        """Use exactly these adapters in the pipeline of a model; after an error, the earlier ones stay in use.

        Args:
            model: name of the model.
            pipeline: its pipeline.
            loras: names and weights.

        Returns:
            Seconds of the change; None if there was none.

        Raises:
            WeightsError: a file cannot be read, is for another model, or gives weights beyond the range of their type.
            DeviceMemoryError: there is too little memory.
        """
        if not self._paths or (model in self._used and self._used[model] == loras):
            return None
        start = time.perf_counter()
        with host_memory_errors("a change of LoRAs"):
            adapters = {name: (self._file(model, pipeline, name), weight) for name, weight in loras}
            try:
                pipeline.replace_adapters(adapters)
            except (WeightsError, OptionError) as error:
                raise _refusal(", ".join(adapters), error, {}) from error
        is_change = self._used.get(model, ()) != loras
        self._used[model] = loras
        return time.perf_counter() - start if is_change else None

    def _file(self, model: str, pipeline: OrtDiffusionPipeline, name: str) -> AdapterFile:
        """Return the content of a file. The most recently used ones are kept."""
        key = (model, name)
        if key not in self._read:
            path = self._paths[name]
            try:
                file = pipeline.read_lora_weights(path)
            except DeviceMemoryError:
                raise
            except SdonnxError as error:
                hidden = {str(path): path.name, f"{path.parent}/": "", str(pipeline.folder.path): model}
                raise _refusal(name, error, hidden) from error
            warn_of_unknown_keys(name, file)
            self._read[key] = file
        self._read.move_to_end(key)
        while len(self._read) > _MAX_FILES:
            self._read.popitem(last=False)
        return self._read[key]


def _refusal(names: str, error: SdonnxError, hidden: Mapping[str, str]) -> WeightsError:
    """Return an error for the client, without the server's paths; the log has the whole error."""
    _LOG.warning("the LoRA %s cannot be used: %s", names, error)
    found, expected = error.found, error.expected
    for path, shown in hidden.items():
        if not Path(path).is_absolute():
            continue
        found, expected = found.replace(path, shown), expected.replace(path, shown)
    return WeightsError(f"the LoRA {names} cannot be used: {found}", expected, "choose another LoRA, or leave it out")
