"""Loading an ONNX file that may be broken: what later stages would trip over is said here, in one line."""

from __future__ import annotations

import graphlib
import math
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath

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
# ONNX Runtime 1.31 has no kernels of their versions of opset 22, and OPSET is later.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_LONGEST_NUMBER = 40  # digits of an offset: far beyond any file, and Python refuses to read thousands of them


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
    _require_operators(path, proto)
    _require_graph(path, proto.graph)
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
    imports = model.graph.opset_imports
    imports[""] = imports.pop("ai.onnx", imports.get("", OPSET))  # two names of one domain
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


def _require_operators(path: Path, proto: onnx.ModelProto) -> None:
    """Raise for an operator that ONNX's own domain lacks; those of other domains are for the runtime to know."""
    (opset,) = {entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS}
    known = {function.name for function in proto.functions if function.domain in _DEFAULT_DOMAINS}
    nodes = [node for graph in _graphs(proto.graph) for node in graph.node if node.domain in _DEFAULT_DOMAINS]
    for op_type in sorted({node.op_type for node in nodes} - known):
        if op_type in _RANDOM:
            raise FolderError(
                f"{path} has the operator {op_type!r}, which draws random numbers",
                "noise as an input, or none: ONNX Runtime cannot draw it in the opset of fused graphs",
                "export it again without it; a VAE encoder gives the parameters of its distribution",
            )
        if "Sequence" in op_type or op_type.startswith("Optional"):
            raise FolderError(
                f"{path} has the operator {op_type!r}, which is not about tensors", "tensors alone", "export it again"
            )
        try:
            onnx.defs.get_schema(op_type, max_inclusive_version=opset)
        except onnx.defs.SchemaError as error:
            raise FolderError(
                f"{path} has the operator {op_type!r}, which opset {opset} of ONNX lacks",
                "ONNX's operators, or a custom one in a domain of its own",
                "export it again without it, or with a domain",
            ) from error


def _require_graph(path: Path, graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Raise unless each value is made once, from values that are made before it."""
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
        for name in _reads(node):
            if name not in known:
                _refuse_order(path, graph, node, name, present)
        for inner in _subgraphs(node):
            _require_graph(path, inner, frozenset(known))
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


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return what a node reads, what its subgraphs take from around them included."""
    names = [name for name in node.input if name]
    for graph in _subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {tensor.values.name for tensor in graph.sparse_initializer}
        own |= {name for inner in graph.node for name in inner.output}
        inside = [name for inner in graph.node for name in _reads(inner)]
        names += [name for name in (*inside, *(value.name for value in graph.output)) if name not in own]
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
    name, kind = repr(tensor.name), tensor.data_type
    if any(size < 0 for size in tensor.dims):
        found = f"{path} has the tensor {name} of shape {list(tensor.dims)}"
        raise WeightsError(found, "sizes of 0 or more", "export it again")
    if kind not in set(ir.DataType):
        raise WeightsError(f"{path} has {name} of the unknown type {kind}", "a type of ONNX", "export it again")
    if kind in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        if uses_external_data(tensor):
            raise WeightsError(f"{path} keeps {name}, no numbers, in another file", "numbers", "export it again")
        return  # ONNX's checker knows
    wanted = _size_bytes(tensor)
    # Raw data are copied to be measured: one tensor at a time, while the parsed file holds them all.
    found_bytes = _external_bytes(path, tensor) if uses_external_data(tensor) else None
    if tensor.HasField("raw_data") and not uses_external_data(tensor):
        found_bytes = len(tensor.raw_data)
    if found_bytes is not None and found_bytes != wanted:
        raise WeightsError(
            f"{path} has {found_bytes} bytes for {name}",
            f"{wanted}, as {ir.DataType(kind).name} {list(tensor.dims)} has",
            "export it again",
        )


def _external_bytes(path: Path, tensor: onnx.TensorProto) -> int:
    """Return how long the external data of one tensor are; raise unless they lie beside the model, all of them."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, name = entries.get("location", ""), repr(tensor.name)
    for key in ("offset", "length"):
        number = entries.get(key, "0")
        if not (number.isascii() and number.isdecimal() and len(number) <= _LONGEST_NUMBER):
            raise WeightsError(
                f"{path} has the {key} {number!r:.40} for {name}", "a number of bytes", "export it again"
            )
    if not location or not location.isprintable():
        raise WeightsError(
            f"{path} names no file for {name} ({location!r:.40})", "weights beside it", "export it again"
        )
    file = path.parent / location
    beside = Path(os.path.realpath(path.parent)) in Path(os.path.realpath(file)).parents
    if PurePath(location).is_absolute() or ".." in PurePath(location).parts or not beside:
        raise WeightsError(
            f"{path} keeps {name} in {file}, outside its folder",
            "weights beside it, no links to elsewhere",
            "copy the folder with its links followed (cp -rL), or export it again",
        )
    length = int(entries.get("length", _size_bytes(tensor)))
    end = int(entries.get("offset", "0")) + length
    if not os.path.isfile(file):
        raise WeightsError(f"{file} is missing", f"a file of at least {end} bytes", "copy the file again")
    if (size := file.stat().st_size) < end:
        raise WeightsError(f"{file} has {size} bytes", f"at least {end} bytes", "copy the file again")
    if file.stat().st_nlink > 1:
        # ONNX refuses them: anybody could link a file of somebody else's here, whole and in its place.
        raise WeightsError(f"{file} has several hard links", "a file of its own", "copy the folder without links")
    return length


def _size_bytes(tensor: onnx.TensorProto) -> int:
    bits = ir.DataType(tensor.data_type).bitwidth
    size: int = -(-math.prod(tensor.dims) * bits // 8)  # Python's integers do not overflow
    return size


def _detach_inner_data(model: ir.Model) -> None:
    """Let external data of attributes and subgraphs be read when they are written: they are written inline.

    onnx_ir moves initializers of the main graph alone; other tensors would keep naming the file that was read.
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
    """Make constants of the initializers that are inputs too, unless callers may give them; see `load_model`."""
    graph = model.graph
    old = model.ir_version < _IR_VERSION_OF_DEFAULTS
    for value in [value for value in graph.inputs if value.is_initializer()]:
        if inputs is not None and value.name in inputs:
            graph.initializers.pop(value.name or "")
            value.const_value = None
        elif inputs is not None or old:
            graph.inputs.remove(value)
    model.ir_version = max(model.ir_version, _IR_VERSION_OF_DEFAULTS)
