"""Load an ONNX file that may be broken, and report faults that would make later stages fail in one line."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.external_data import set_base_dir

from sdonnx.errors import FolderError
from sdonnx.graph.loading.check_nodes import (
    require_depth,
    require_deterministic,
    require_functions,
    require_graph,
    require_operators,
    require_opset,
    require_sizes,
)
from sdonnx.graph.loading.check_tensors import require_tensors
from sdonnx.graph.prepare import OPSET
from sdonnx.graph.tensors import lazy, read

__all__ = ["load_model"]

# From this version on an initializer need not be an input, and one that is holds a default that callers can override.
# Source: onnx.proto, IR_VERSION_2019_1_22.
_IR_VERSION_OF_DEFAULTS = 4


def load_model(path: Path, inputs: Collection[str] | None = None, *, draws: bool = False) -> ir.Model:
    """Load a graph; weights stay on disk.

    An initializer that is also an input, as TorchScript writes them with keep_initializers_as_inputs,
    is a default that the caller can override; before IR version 4 it is a constant, as in ONNX Runtime.
    With `inputs`, no default remains: an input in `inputs` loses its default, and any other becomes a constant.

    Args:
        path: the ONNX file.
        inputs: the names of the inputs that callers pass. None: all inputs of the graph.
        draws: accept operators that draw random numbers; the caller must remove them.

    Raises:
        FolderError: the file is not an ONNX graph, or breaks ONNX's rules.
        WeightsError: its weights lie elsewhere, are missing, are truncated or do not fit their shapes.
    """
    proto = _parsed(path)
    require_opset(path, proto)
    require_depth(path, proto.graph)
    require_operators(path, proto)
    require_functions(path, proto)
    require_graph(path, proto.graph)
    require_sizes(path, proto)
    require_tensors(path, proto)
    try:
        onnx.checker.check_model(str(path))
        model = ir.from_proto(proto)
    except (onnx.checker.ValidationError, ir.serde.SerdeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FolderError(f"{path} holds no valid graph ({reason})", "an ONNX graph") from error
    imports = model.graph.opset_imports
    imports[""] = imports.pop("ai.onnx", imports.get("", OPSET))  # two names of one domain
    set_base_dir(model.graph, path.parent)
    _detach_inner_data(model)
    _settle_defaults(model, inputs)
    if not draws:
        require_deterministic(path, model)
    return model


def _parsed(path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "an ONNX graph") from error
    if not proto.ByteSize():
        raise FolderError(f"{path} is empty", "an ONNX graph")
    if not proto.graph.output:
        raise FolderError(f"{path} holds a graph without outputs", "an ONNX graph")
    return proto


def _detach_inner_data(model: ir.Model) -> None:
    """Make external data of attributes and subgraphs lazy tensors, which are written inline.

    onnx_ir moves only initializers of the main graph; other tensors would keep the name of the source file.
    """

    def detached(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        return lazy(lambda: read(tensor), tensor.dtype, tensor.shape, tensor.name)

    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, detached(attribute.value))
    for graph in model.graph.subgraphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = detached(value.const_value)


def _settle_defaults(model: ir.Model, inputs: Collection[str] | None) -> None:
    """Make initializers that are also inputs constants, unless callers pass them; see `load_model`."""
    graph = model.graph
    old = model.ir_version < _IR_VERSION_OF_DEFAULTS
    for value in [value for value in graph.inputs if value.is_initializer()]:
        if inputs is not None and value.name in inputs:
            graph.initializers.pop(value.name or "")
            value.const_value = None
        elif inputs is not None or old:
            graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, _IR_VERSION_OF_DEFAULTS)
