"""Check the nodes of a graph in a file: the opset, the operators and their order."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from sdonnx.errors import FolderError
from sdonnx.graph.prepare import OPSET

__all__ = [
    "MIN_OPSET",
    "graphs_of",
    "require_depth",
    "require_deterministic",
    "require_domains",
    "require_functions",
    "require_graph",
    "require_operators",
    "require_opset",
    "require_sizes",
]

MIN_OPSET = 14

_MAX_DEPTH = 8  # exporters nest at most one If or Loop in another
_MAX_NODES = 10**6  # a hundred times the nodes of the largest denoisers

# Sizes are expanded to sums of products, a few brackets at a time. Exporters write two brackets and 100 characters.
_MAX_SIZE_LENGTH, _MAX_PRODUCTS = 400, 4
_POWER = re.compile(r"\*\*(?:([0-9])(?![0-9.*]))?")  # its exponent, where that is one digit

_DEFAULT_DOMAINS = ("", "ai.onnx")
_RUNTIME_DOMAINS = frozenset({*_DEFAULT_DOMAINS, "ai.onnx.ml", "com.microsoft"})  # which ONNX Runtime has
# ONNX Runtime 1.31 has no kernels of their versions of opset 22, and OPSET is later.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def require_opset(path: Path, proto: onnx.ModelProto) -> None:
    """Raise unless the graph has one opset, from MIN_OPSET to OPSET.

    Raises:
        FolderError: it has none, another or several.
    """
    versions = sorted({entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS})
    if len(versions) == 1 and MIN_OPSET <= versions[0] <= OPSET:
        return
    found = f"opset {' and '.join(map(str, versions))}" if versions else "no opset of ONNX's own operators"
    raise FolderError(
        f"{path} has {found}",
        f"one from {MIN_OPSET} to {OPSET}",
        "export again with opset_version=17 for TorchScript, or 18 with dynamo=True",
    )


def require_sizes(path: Path, proto: onnx.ModelProto) -> None:
    """Raise for the name of a size that is an expression which takes long to expand, such as a tower of powers.

    Raises:
        FolderError: there is one.
    """
    values = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    values += [value for graph in graphs_of(proto.graph) for value in (*graph.input, *graph.output, *graph.value_info)]
    names = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}
    for name in sorted(names):
        text = "".join(name.split())
        powers = _POWER.findall(text)
        products = text.count(")*") + text.count("*(") + sum(map(int, filter(None, powers)))
        if len(text) > _MAX_SIZE_LENGTH or "" in powers or products > _MAX_PRODUCTS:
            raise FolderError(f"{path} calls a size {name!r:.80}", "a name, or a short expression of names")


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and all of its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from graphs_of(inner)


def require_operators(path: Path, proto: onnx.ModelProto) -> None:
    """Raise for an operator that ONNX's own domain lacks; ONNX Runtime checks operators of other domains.

    Raises:
        FolderError: there is one, or one of sequences or optionals.
    """
    (opset,) = {entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS}
    known = {function.name for function in proto.functions if function.domain in _DEFAULT_DOMAINS}
    nodes = [node for graph in graphs_of(proto.graph) for node in graph.node if node.domain in _DEFAULT_DOMAINS]
    for op_type in sorted({node.op_type for node in nodes} - known):
        if "Sequence" in op_type or op_type.startswith("Optional"):
            raise FolderError(
                f"{path} has the operator {op_type!r}, which is not about tensors",
                "operators on tensors",
            )
        try:
            onnx.defs.get_schema(op_type, max_inclusive_version=opset)
        except onnx.defs.SchemaError as error:
            raise FolderError(
                f"{path} has the operator {op_type!r}, which opset {opset} of ONNX lacks",
                "ONNX's own operators",
                "export it again without it",
            ) from error


def require_depth(path: Path, graph: onnx.GraphProto, depth: int = 0) -> None:
    """Raise for subgraphs that are nested more than 8 deep.

    Raises:
        FolderError: they are nested deeper.
    """
    if depth > _MAX_DEPTH:
        raise FolderError(
            f"{path} has subgraphs within one another", f"at most {_MAX_DEPTH} of them", "export it again without them"
        )
    for node in graph.node:
        for inner in _subgraphs(node):
            require_depth(path, inner, depth + 1)


def require_functions(path: Path, proto: onnx.ModelProto) -> None:
    """Raise for functions that call themselves, or that would make the graph huge when they are expanded.

    Raises:
        FolderError: there are such functions.
    """
    functions = {(each.domain, each.name): each.node for each in proto.functions}
    sizes: dict[tuple[str, str], int | None] = {}

    def size(nodes: Sequence[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in functions and key not in sizes:
                sizes[key] = None
                sizes[key] = size(functions[key])
            if (own := sizes.get(key, 1)) is None:
                raise FolderError(
                    f"{path} has the function {node.op_type!r}, which calls itself",
                    "functions that end",
                )
            total += own + sum(size(inner.node) for inner in _subgraphs(node))
        return total

    if functions and (nodes := size(proto.graph.node)) > _MAX_NODES:
        raise FolderError(f"{path} has functions that stand for {nodes:.1e} nodes", f"{_MAX_NODES} at most")


def require_deterministic(path: Path, model: ir.Model) -> None:
    """Raise for an operator that draws random numbers.

    Raises:
        FolderError: there is one.
    """
    nodes = [node for node in model.graph.all_nodes() if node.domain in _DEFAULT_DOMAINS]
    for op_type in sorted({node.op_type for node in nodes} & _RANDOM):
        raise FolderError(
            f"{path} has the operator {op_type!r}, which draws random numbers",
            "noise as an input, or none: ONNX Runtime cannot draw it in the opset of fused graphs",
            "export it again without it; a VAE encoder gives the parameters of its distribution",
        )


def require_domains(path: Path, model: ir.Model) -> None:
    """Raise for an operator of a domain that ONNX Runtime does not have.

    Raises:
        FolderError: there is one.
    """
    graphs: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    for node in (node for graph in graphs for node in graph.all_nodes()):
        if node.domain not in _RUNTIME_DOMAINS and node.op_identifier() not in model.functions:
            raise FolderError(
                f"{path} has the operator '{node.domain}::{node.op_type}', of a domain that ONNX Runtime does not have",
                f"operators of {', '.join(sorted(filter(None, _RUNTIME_DOMAINS)))}",
                "export it again without it",
            )


def require_graph(path: Path, graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Raise unless each value is computed once, from values that are computed before it.

    Args:
        path: the file.
        graph: the graph in it, or a subgraph.
        outer: the names that a subgraph may read from the outer scope.

    Raises:
        FolderError: a value is computed twice, by no node, or too late; or nodes form a cycle.
    """
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
            require_graph(path, inner, frozenset(known))
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            raise FolderError(f"{path} has the output {value.name!r}, which nothing makes", "a node that does")


def _require_once(path: Path, kind: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FolderError(f"{path} has {kind} {name!r} twice", "a name of its own for each")
        seen.add(name)


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return the names that a node reads, including those that its subgraphs read from the outer scope."""
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
    """Raise for a node that reads a value which no earlier node computes: no node does, a later one, or a cycle."""
    makers = {output: index for index, node in enumerate(graph.node) for output in node.output if output}
    if name not in makers and name not in present:
        raise FolderError(
            f"{path} has the node {_called(reader)}, which reads {name!r}, and nothing makes it",
            "a node, an input or an initializer of that name",
        )
    order = graphlib.TopologicalSorter(
        {index: {makers[read] for read in _reads(node) if read in makers} for index, node in enumerate(graph.node)}
    )
    try:
        order.prepare()
    except graphlib.CycleError as error:
        cycle = " <- ".join(_called(graph.node[index]) for index in error.args[1][:4])
        raise FolderError(f"{path} has a cycle ({cycle})", "a graph without cycles") from error
    raise FolderError(
        f"{path} has the node {_called(reader)} before the one that makes {name!r}",
        "nodes in the order in which they can run",
        "sort them with onnx_ir.passes.common.TopologicalSortPass, or export it again",
    )


def _called(node: onnx.NodeProto) -> str:
    return repr(node.name or f"{node.op_type} of {', '.join(node.output)}")
