"""Give a cached graph new values of a module's weights, without building it again.

The entry of a graph says which initializers hold a weight, and how. That is proven when the graph is built: the values
are compared (docs/decisions/0185-change-values-of-cached-graphs.md). Other parameters, such as biases that a rule
multiplied with a weight, need a new graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.module_graph import EXPORTED, load_model
from sdonnx.compiler.saved_graph import float_tensors
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.folder.weight_table import Place, put_channels, rows_of
from sdonnx.graph.edit import required
from sdonnx.graph.tensors import read
from sdonnx.optimize.find_weights import find_places, module_weights
from sdonnx.runtime.device.session import Graph

__all__ = ["load_changed", "weight_places"]

Array = npt.NDArray[Any]


def weight_places(model: ir.Model, module: torch.nn.Module, unique: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return where a built model keeps weights of the module, by name, as JSON values.

    A weight is left out if one of its initializers is unknown, or if its layout cannot be told from its values.

    Args:
        model: The model of `sdonnx.compiler.module_graph.build_model`, with its weights.
        module: The module that it was built from.
        unique: Names of tensors with values that no other tensor has; others may share an initializer.
    """
    exported: ir.Model = model.meta[EXPORTED]
    tensors = float_tensors(module)
    weights = {each.name: each.initializer.removesuffix(".T") for each in module_weights(exported)}

    def values_of(name: str) -> Array | None:
        return tensors[name].cpu().numpy() if name in tensors else None

    found = {}
    for name, places in find_places(model, exported, values_of).items():
        # Initializers that were made with a weight have its name in theirs.
        related = {each for each in model.graph.initializers if weights[name] in str(each)}
        is_whole = all(place.vector is None for place in places) and related <= {each.initializer for each in places}
        if name in unique and is_whole and not _is_ambiguous(tensors[name]):
            found[name] = [each.as_json() for each in places]
    return found


def load_changed(
    path: Path,
    references: Mapping[str, str],
    places: Mapping[str, Sequence[Mapping[str, Any]]],
    module: torch.nn.Module,
    signature: GraphSignature,
) -> Graph | None:
    """Load a cached graph with new values of some weights; None if one exceeds the range of its type.

    Args:
        path: The folder of the entry.
        references: The parameters that the graph uses as they are, by the initializer.
        places: Where the graph keeps the changed weights (`weight_places`).
        module: The module, with the new values.
        signature: The signature of the graph, and where it runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    model = ir.load(path / ONNX_MODEL)
    stored = {name: required(value.const_value, name) for name, value in model.graph.initializers.items()}
    tensors = float_tensors(module)
    arrays = {name: tensors[source].cpu().contiguous().numpy() for name, source in references.items()}
    for name, each in places.items():
        values = tensors[name].cpu().numpy()
        for place in map(Place.from_json, each):
            if place.initializer in references:
                continue
            if place.initializer not in arrays:
                arrays[place.initializer] = np.array(read(stored[place.initializer]))
            target = arrays[place.initializer]
            with np.errstate(over="ignore"):
                rows = rows_of(values, place.layout).astype(target.dtype)
            if not np.isfinite(rows).all():
                return None
            put_channels(target, place.layout, place.channels, rows)
    for name, tensor in stored.items():
        if name not in arrays and isinstance(tensor, ir.ExternalTensor):
            arrays[name] = np.array(tensor.numpy())  # a mapped file cannot be passed to ONNX Runtime
    for name, array in arrays.items():
        model.graph.initializers[name].const_value = ir.Tensor(array, dtype=stored[name].dtype, name=name)
    return load_model(model, type(module).__name__, signature.target)


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Return whether a weight has the same values in several layouts, so that they do not show which one it has."""
    values = tensor.detach().cpu().numpy()
    if values.ndim == 2 or values.shape[2:] == (1, 1):
        square = values.reshape(len(values), -1)
        is_square = square.shape[0] == square.shape[1]
        return is_square and np.array_equal(square[0], square[:, 0]) and np.array_equal(square, square.T)
    parts = (values[:1], values)  # mostly, the first channel decides
    return all(np.array_equal(rows_of(each, "rows"), rows_of(each, "nhwc")) for each in parts)
