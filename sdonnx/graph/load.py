"""Loading an ONNX file that may be broken: what later stages would trip over is said here, in one line."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data
from onnx_ir.external_data import set_base_dir

from sdonnx.errors import FolderError, WeightsError
from sdonnx.graph.prepare import OPSET
from sdonnx.graph.tensors import lazy, read

__all__ = ["OLDEST_OPSET", "load_model"]

OLDEST_OPSET = 14

_DEFAULT_DOMAINS = ("", "ai.onnx")
# From this version on an initializer need not be an input, and one that is holds a default that callers can override.
# Source: onnx.proto, IR_VERSION_2019_1_22.
_IR_VERSION_OF_DEFAULTS = 4


def load_model(path: Path, inputs: Collection[str] | None = None) -> ir.Model:
    """Load a graph; weights stay on disk.

    An initializer that is an input too, as TorchScript writes them with keep_initializers_as_inputs,
    is a default that the caller can override; before IR version 4 it is a constant, as ONNX Runtime
    takes it. With `inputs` none is left to override: what is not among them becomes a constant, and
    what is among them loses its default.

    Args:
        path: the ONNX file.
        inputs: the names of the inputs that callers give. None: those that the graph has.

    Raises:
        FolderError: the file is no ONNX graph, or a graph that breaks ONNX's rules.
        WeightsError: its weights lie elsewhere, are missing, are truncated or do not fit their shapes.
    """
    proto = _parsed(path)
    _require_opset(path, proto)
    _require_graph(path, proto.graph, {(function.domain, function.name) for function in proto.functions}, _opset(proto))
    for graph in _graphs(proto.graph):
        for tensor in _tensors(graph.initializer, graph.node):
            _require_data(path, tensor)
    for function in proto.functions:
        for tensor in _tensors((), function.node):
            if uses_external_data(tensor):
                found = f"{path} keeps the constant {tensor.name!r} of the function {function.name!r} in another file"
                raise WeightsError(found, "constants of functions in the graph itself", "export it again")
    try:
        onnx.checker.check_model(str(path))
        model = ir.from_proto(proto)
    except (onnx.checker.ValidationError, ir.serde.SerdeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FolderError(f"{path} holds no valid graph ({reason})", "an ONNX graph", "export it again") from error
    set_base_dir(model.graph, path.parent)
    _detach_inner_data(model)
    _settle_defaults(model, inputs)
    return model


def _parsed(path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read ({error})", "an ONNX graph", "export it again") from error
    if not proto.ByteSize():
        raise FolderError(f"{path} is empty", "an ONNX graph", "export it again")
    if not proto.graph.output:
        raise FolderError(f"{path} holds a graph without outputs", "an ONNX graph", "export it again")
    return proto


def _opset(proto: onnx.ModelProto) -> int | None:
    return next((entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS), None)


def _require_opset(path: Path, proto: onnx.ModelProto) -> None:
    versions = sorted({entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS})
    if len(versions) == 1 and OLDEST_OPSET <= versions[0] <= OPSET:
        return
    found = f"opset {' and '.join(map(str, versions))}" if versions else "no opset of ONNX's own operators"
    raise FolderError(
        f"{path} has {found}",
        f"one from {OLDEST_OPSET} to {OPSET}",
        "export again with opset_version=17 for TorchScript, or 18 with dynamo=True",
    )


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and all that its nodes hold."""
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from _graphs(inner)


def _tensors(initializers: Sequence[onnx.TensorProto], nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and the tensors in the nodes' attributes."""
    yield from initializers
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _require_graph(
    path: Path, graph: onnx.GraphProto, functions: set[tuple[str, str]], opset: int | None, outer: frozenset[str] = frozenset()
) -> None:
    """Raise unless each value is made once, from values that are made before it, by operators that exist."""
    inputs = [value.name for value in graph.input]
    weights = [tensor.name for tensor in graph.initializer]
    weights += [tensor.values.name for tensor in graph.sparse_initializer]
    made = [name for node in graph.node for name in node.output if name]
    for kind, names in (("input", inputs), ("initializer", weights)):
        _require_once(path, f"the {kind}", names)
    _require_once(path, "the value", [*{*inputs, *weights}, *made])
    _require_once(path, "the output", [value.name for value in graph.output])
    present = outer | {*inputs, *weights}
    known = set(present)
    for node in graph.node:
        if node.domain in _DEFAULT_DOMAINS and (node.domain, node.op_type) not in functions:
            _require_operator(path, node, opset)
        for name in _reads(node):
            if name not in known:
                _refuse_order(path, graph, node, name, present)
        for inner in _subgraphs(node):
            _require_graph(path, inner, functions, opset, frozenset(known))
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            raise FolderError(
                f"{path} has the output {value.name!r}, which nothing makes", "a node that does", "export it again"
            )


def _require_once(path: Path, kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FolderError(f"{path} has {kind} {name!r} twice", "a name of its own for each", "export it again")
        seen.add(name)


def _require_operator(path: Path, node: onnx.NodeProto, opset: int | None) -> None:
    try:
        onnx.defs.get_schema(node.op_type, max_inclusive_version=opset or OPSET)
    except onnx.defs.SchemaError as error:
        raise FolderError(
            f"{path} has the operator {node.op_type!r}, which opset {opset} of ONNX lacks",
            "ONNX's operators, or a custom one in a domain of its own",
            "export it again without it, or give it a domain",
        ) from error


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return what a node reads, what its subgraphs take from around them included."""
    names = [name for name in node.input if name]
    for graph in _subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {tensor.values.name for tensor in graph.sparse_initializer}
        own |= {name for inner in graph.node for name in inner.output}
        names += [name for inner in graph.node for name in _reads(inner) if name not in own]
    return names


def _refuse_order(
    path: Path, graph: onnx.GraphProto, reader: onnx.NodeProto, name: str, present: Collection[str]
) -> None:
    """Raise for a node that reads what no node before it makes: none does, a later one does, or they form a cycle."""
    makers = {output: index for index, node in enumerate(graph.node) for output in node.output if output}
    if name not in makers and name not in present:
        raise FolderError(
            f"{path} has the node {_called(reader)}, which reads {name!r}, and nothing makes it",
            "a node, an input or an initializer of that name",
            "export it again",
        )
    order = graphlib.TopologicalSorter(
        {index: {makers[read] for read in _reads(node) if read in makers} for index, node in enumerate(graph.node)}
    )
    try:
        order.prepare()
    except graphlib.CycleError as error:
        cycle = " <- ".join(_called(graph.node[index]) for index in error.args[1][:4])
        raise FolderError(f"{path} has a cycle ({cycle})", "a graph without cycles", "export it again") from error
    raise FolderError(
        f"{path} has the node {_called(reader)} before the one that makes {name!r}",
        "nodes in the order in which they can run",
        "sort them with onnx_ir.passes.common.TopologicalSortPass, or export it again",
    )


def _called(node: onnx.NodeProto) -> str:
    return repr(node.name or f"{node.op_type} of {', '.join(node.output)}")


def _require_data(path: Path, tensor: onnx.TensorProto) -> None:
    """Raise unless a tensor's data are as long as its shape says; external ones must lie beside the model."""
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        return  # ONNX's checker says it
    if any(size < 0 for size in tensor.dims):
        raise WeightsError(
            f"{path} has the tensor {tensor.name!r} of shape {list(tensor.dims)}", "sizes of 0 or more", "export it again"
        )
    if uses_external_data(tensor):
        _require_external(path, tensor, _size_bytes(tensor, dtype))
    elif tensor.HasField("raw_data") and dtype != ir.DataType.STRING:
        # A copy of one tensor, while the parsed file holds them all.
        if len(tensor.raw_data) != _size_bytes(tensor, dtype):
            raise _misfit(path, tensor, dtype, len(tensor.raw_data))


def _size_bytes(tensor: onnx.TensorProto, dtype: ir.DataType) -> int:
    elements = 1
    for size in tensor.dims:
        elements *= size  # of Python's integers, which do not overflow
    return -(-elements * dtype.bitwidth // 8)


def _misfit(path: Path, tensor: onnx.TensorProto, dtype: ir.DataType, found: int) -> WeightsError:
    return WeightsError(
        f"{path} has {found} bytes for {tensor.name!r}",
        f"{_size_bytes(tensor, dtype)}, as {dtype.name} {list(tensor.dims)} has",
        "export it again",
    )
