"""Give a cached graph new values of a module's parameters, without building it again.

The entry of a graph says which initializers hold a parameter, and how. An entry is proven when the graph is built: the
values are compared (docs/decisions/0185-change-values-of-cached-graphs.md). Parameters without an entry, such as those
that a rule multiplied with another, need a new graph.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from sdonnx.graph.tensors import read
from sdonnx.optimize.find_weights import find_places, module_weights
from sdonnx.runtime.device.session import Graph

__all__ = ["load_changed", "parameter_places"]

Array = npt.NDArray[Any]

# No rule combines the vectors of these modules with anything unless an initializer's name says so.
_PLAIN = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.LayerNorm)

_SAMPLES = 4096  # values of a tensor that are compared first


def parameter_places(model: ir.Model, module: torch.nn.Module) -> dict[str, list[dict[str, Any]]]:
    """Return where a built model keeps parameters of the module, by name, as JSON values.

    A parameter is left out if one of its initializers is unknown, if another tensor has equal values, so that both may
    share an initializer, or if its layout cannot be told from its values.

    Args:
        model: The model of `sdonnx.compiler.module_graph.build_model`, with its weights.
        module: The module that it was built from.
    """
    exported: ir.Model = model.meta[EXPORTED]
    tensors = float_tensors(module)
    single = _single(tensors)
    weights = {each.name: each.initializer.removesuffix(".T") for each in module_weights(exported)}
    found: dict[str, list[Place]] = {}

    def values_of(name: str) -> Array | None:
        return tensors[name].cpu().numpy() if name in tensors else None

    for name, places in find_places(model, exported, values_of).items():
        related = _related(model, weights[name])
        is_whole = all(place.vector is None for place in places) and related <= {each.initializer for each in places}
        if name in single and is_whole and not _is_ambiguous(tensors[name]):
            found[name] = places
    for name in _vectors(module):
        initializers = [each for each in exported.graph.initializers if f".{each}".endswith(f".{name}")]
        if name not in single or len(initializers) != 1 or _related(model, initializers[0]) != set(initializers):
            continue
        value = model.graph.initializers[initializers[0]].const_value
        kept = None if value is None else read(value)
        expected = tensors[name].cpu().numpy()
        if kept is not None and kept.shape == expected.shape and np.array_equal(kept, expected.astype(kept.dtype)):
            found[name] = [Place(initializers[0], "rows", ((0, len(expected)),))]
    return {name: [each.as_json() for each in places] for name, places in found.items()}


def load_changed(
    path: Path,
    references: Mapping[str, str],
    places: Mapping[str, Sequence[Mapping[str, Any]]],
    module: torch.nn.Module,
    signature: GraphSignature,
) -> Graph | None:
    """Load a cached graph with new values of some parameters; None if one exceeds the range of its type.

    Args:
        path: The folder of the entry.
        references: The parameters that the graph uses as they are, by the initializer.
        places: Where the graph keeps the changed parameters (`parameter_places`).
        module: The module, with the new values.
        signature: The signature of the graph, and where it runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    model = ir.load(path / ONNX_MODEL)
    initializers = model.graph.initializers
    tensors = float_tensors(module)
    arrays = {name: tensors[source].cpu().contiguous().numpy() for name, source in references.items()}
    copied: dict[str, Array] = {}
    for name, each in places.items():
        values = tensors[name].cpu().numpy()
        for place in map(Place.from_json, each):
            if place.initializer in references:
                continue
            if place.initializer not in copied:
                copied[place.initializer] = np.array(read(_stored(initializers[place.initializer])))
            target = copied[place.initializer]
            with np.errstate(over="ignore"):
                rows = rows_of(values, place.layout).astype(target.dtype)
            if not np.isfinite(rows).all():
                return None
            put_channels(target, place.layout, place.channels, rows)
    for name, value in initializers.items():
        array = arrays.get(name, copied.get(name))
        if array is None and isinstance(value.const_value, ir.ExternalTensor):
            array = np.array(value.const_value.numpy())  # a mapped file cannot be passed to ONNX Runtime
        if array is not None:
            value.const_value = ir.Tensor(array, dtype=_stored(value).dtype, name=name)
    return load_model(model, type(module).__name__, signature.target)


def _stored(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise ValueError(f"{value.name} has no values")
    return value.const_value


def _vectors(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the biases and norms of plain layers."""
    for path, part in module.named_modules():
        if type(part) in _PLAIN:
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.ndim == 1:
                    yield f"{path}.{name}" if path else name


def _related(model: ir.Model, name: str) -> set[str]:
    """Return the initializers that were made with another one, according to their names."""
    return {str(each) for each in model.graph.initializers if name in str(each)}


def _single(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors with values that no other tensor has."""
    groups = defaultdict[tuple[Any, ...], list[str]](list)
    for name, tensor in tensors.items():
        values = tensor.detach().reshape(-1)  # all values are compared only where a few are equal
        groups[tensor.shape, _digest(values[:: max(len(values) // _SAMPLES, 1)])].append(name)
    single = {names[0] for names in groups.values() if len(names) == 1}
    for names in groups.values():
        digests = {name: _digest(tensors[name]) for name in names if name not in single}
        counts = Counter(digests.values())
        single.update(name for name, digest in digests.items() if counts[digest] == 1)
    return single


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).digest()


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Return whether a weight has the same values in several layouts, so that they do not show which one it has."""
    values = tensor.detach().cpu().numpy()
    if values.ndim == 2 or values.shape[2:] == (1, 1):
        square = values.reshape(len(values), -1)
        is_square = square.shape[0] == square.shape[1]
        return is_square and np.array_equal(square[0], square[:, 0]) and np.array_equal(square, square.T)
    parts = (values[:1], values)  # mostly, the first channel decides
    return all(np.array_equal(rows_of(each, "rows"), rows_of(each, "nhwc")) for each in parts)
