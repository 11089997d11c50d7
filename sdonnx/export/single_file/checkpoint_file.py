"""Read tensors of a single-file checkpoint one at a time, also under their names in diffusers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.export.checkpoint_weights import narrowed
from sdonnx.export.single_file.original_keys import Source
from sdonnx.export.single_file.suffixes import PICKLES
from sdonnx.export.stored_tensors import StoredTensors

__all__ = ["RenamedWeights", "open_checkpoint"]

_CLIP_PREFIX = "text_model."


def open_checkpoint(path: Path, *, allow_pickle: bool, component: str = "all") -> StoredTensors:
    """Open a safetensors file, or a pickle (`.ckpt`, `.pt`) if that is allowed.

    Args:
        path: The file.
        allow_pickle: Whether a pickle may be read, with `weights_only=True`.
        component: Name that allows a pickle, for the message.

    Raises:
        WeightsError: The file is missing or broken, or a pickle that is not allowed.
    """
    if not path.is_file():
        raise WeightsError(f"{path} is not a file", "a file of weights")
    if path.suffix in PICKLES and not allow_pickle:
        raise WeightsError(
            f"{path} is a pickle, which can run code when opened",
            "safetensors",
            f"convert to safetensors, or pass --allow_pickle {component} if you trust the author",
        )
    return StoredTensors(path, [path], pickles=PICKLES, training_state=True)


@dataclass(frozen=True)
class RenamedWeights:
    """Weights of one component of a single file, by their names in its torch module.

    Attributes:
        file: The file.
        component: Name of the component, for messages.
        sources: Where each parameter is in the file.
    """

    file: StoredTensors
    component: str
    sources: Mapping[str, Source]

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.sources)

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of the parameter `name`.

        Raises:
            WeightsError: The parameter is missing, has another shape, or has an encoding that is not known.
        """
        # The prefix depends on the version of transformers.
        key = name if name in self.sources else name.removeprefix(_CLIP_PREFIX)
        if (source := self.sources.get(key)) is None:
            raise WeightsError(
                f"{self.file.path} has no tensor for {name} of the {self.component}",
                "all weights of a checkpoint in the original layout",
                "download the file again, or pass --config FOLDER with the configuration of this model",
            )
        self.file.require_number(source.key)
        if source.shape != shape:
            raise WeightsError(
                f"{self.file.path} has {source.key} with shape {self.file.shapes[source.key]}",
                f"{shape} for {name} of the {self.component}",
                "pass --config FOLDER with the configuration of this model",
            )
        return key

    def require_all_read(self, keys: Collection[str]) -> None:
        """Raise unless the tensors with keys from `find` are all that their layers have.

        Raises:
            WeightsError: A layer has another tensor, which may change the meaning of the ones that are read.
        """
        self.file.require_all_read({self.sources[key].key for key in keys})

    def require_no_others(self, names: Iterable[str]) -> None:
        """Raise unless each tensor belongs to one of a module's parameters, `names`.

        Raises:
            WeightsError: There are other tensors, such as the weights of further layers.
        """
        if others := sorted(set(self.sources) - set(names)):
            raise WeightsError(
                f"{self.file.path} has {self.sources[others[0]].key}, which the {self.component} does not have",
                "the layers of Stable Diffusion 1, 2 or XL",
                "pass --config FOLDER with the configuration of this model, if it is one of these",
            )

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of the parameter with a key from `find`, converted to `dtype`.

        Raises:
            WeightsError: The file changed after it was opened, or a value exceeds the range of `dtype`.
        """
        source = self.sources[key]
        tensor = self.file.read(source.key, source.rows)
        tensor = tensor.T if source.transposed else tensor
        return narrowed(tensor.reshape(source.shape), dtype, source.key, self.file.path)
