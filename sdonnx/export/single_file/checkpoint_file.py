"""Read tensors of a single-file checkpoint one at a time, also under their names in diffusers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.export.open_source import PICKLES
from sdonnx.export.stored_tensors import Shape, StoredTensors, narrowed, spellings

__all__ = ["RenamedWeights", "Source", "Sources", "open_checkpoint"]


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
class Source:
    """Where a parameter is in a file.

    It has the operations that diffusers' converters apply to tensors: slices of rows (OpenCLIP's `in_proj_weight`), the
    transpose (`text_projection`), and 1x1 convolutions as matrices (attention of the autoencoder).

    Attributes:
        key: Key of the tensor.
        shape: Shape of the parameter. The tensor has the same elements, in this order.
        rows: Rows of the tensor that are the parameter; None for all.
        transposed: Whether the parameter is the transpose of the tensor.
    """

    key: str
    shape: Shape
    rows: slice | None = None
    transposed: bool = False

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def T(self) -> Source:  # noqa: N802  as in torch
        """The transpose."""
        return replace(self, shape=self.shape[::-1], transposed=True)

    def __getitem__(self, index: Any) -> Source:
        """Return rows, `[a:b]` or `[a:b, :]`, or a matrix, `[:, :, 0]` or `[:, :, 0, 0]`, of a 1x1 convolution only."""
        first, *others = index if isinstance(index, tuple) else (index,)
        if 0 in others:
            return replace(self, shape=self.shape[:2]) if set(self.shape[2:]) == {1} else self
        rows = range(self.shape[0])[slice(first.start, first.stop)]
        return replace(self, shape=(len(rows), *self.shape[1:]), rows=slice(rows.start, rows.stop))

    def contiguous(self) -> Source:
        """Return itself, as `clone` and `detach` do: nothing is in memory."""
        return self

    clone = detach = contiguous


Sources = dict[str, Source]
"""Where each parameter is in a file, by its name."""


@dataclass(frozen=True)
class RenamedWeights:
    """Weights of one component of a single file, by their names in its torch module.

    Attributes:
        file: The file.
        component: Name of the component.
        sources: Where each parameter is in the file.
    """

    file: StoredTensors
    component: str
    sources: Mapping[str, Source]

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.sources)

    @property
    def is_text_encoder(self) -> bool:
        """Whether tensors may be left over: buffers, and the last layer of Stable Diffusion 2."""
        return self.component.startswith("text_encoder")

    def find(self, name: str, shape: Shape) -> str:
        """Return the key of the parameter `name`.

        Raises:
            WeightsError: The parameter is missing, has another shape, or has an encoding that is not known.
        """
        key = next((each for each in spellings(name) if each in self.sources), None)
        if key is None:
            raise WeightsError(
                f"{self.file.path} has no tensor for {name} of the {self.component}",
                "all weights of a checkpoint in the original layout",
                "download the file again, or pass --config FOLDER with the configuration of this model",
            )
        source = self.sources[key]
        self.file.require_number(source.key)
        if source.shape != shape:
            raise WeightsError(
                f"{self.file.path} has {source.key} with shape {self.file.shapes[source.key]}",
                f"{shape} for {name} of the {self.component}",
                "pass --config FOLDER with the configuration of this model",
            )
        return key

    def require_all_read(self, keys: Collection[str]) -> None:
        """Raise unless the tensors with keys from `find` are all of their layers, and all except of a text encoder.

        Raises:
            WeightsError: There is another tensor: the weight of a further layer, or one that changes the meaning of a
                tensor that is read.
        """
        self.file.require_all_read({self.sources[key].key for key in keys})
        if (others := sorted(self.sources.keys() - keys)) and not self.is_text_encoder:
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
