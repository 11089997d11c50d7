"""Write a kernel case as a graph, and the small cases as the file that `sdonnx.doctor` reads.

The run-time has neither onnx nor the reference bodies, so the file holds both as graphs: for each case the operator in
each data type of its contract, and its reference body in float32. Their shapes are ranks and their weights are
external data, so that many cases share a graph. Input values are generated when a case runs.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.operators.kernel_case import Array, KernelCase
from sdonnx.operators.operator_table import (
    CONTRACTS,
    DTYPES,
    KERNEL_CASES,
    LowerContribOperators,
    contract_of_case,
    dtypes_of,
)

__all__ = ["MAX_ELEMENTS", "is_small", "kernel_case_file", "model_of", "serialized"]

MAX_ELEMENTS = 2**20
"""The maximum number of elements of a tensor in a case that the doctor runs, so that all cases take seconds."""


def model_of(case: KernelCase, dtype: str, arrays: Sequence[Array | None] | None = None) -> ir.Model:
    """Return a graph of one contrib operator: inputs x0, x1, ..., outputs y0, y1, ...

    Python cannot pass bfloat16 to ONNX Runtime: for it, inputs and outputs are float32 and are cast inside the graph.

    Args:
        case: the operator, its attributes and shapes.
        dtype: "float16", "float32" or "bfloat16".
        arrays: the values of the inputs, which initializers hold. Without them shapes are ranks, and initializers are
            external data that must be provided when the graph is loaded.
    """
    contract, inner = contract_of_case(case), DTYPES[dtype]
    outer = ir.DataType.FLOAT if dtype == "bfloat16" else inner
    # The inputs that have the same data type in every precision.
    fixed = dict.fromkeys(contract.float32_inputs, ir.DataType.FLOAT)
    fixed |= {index: ir.DataType[name.upper()] for index, name in case.integers.items()}
    nodes: list[ir.Node] = []
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []
    arguments: list[ir.Value | None] = []
    for index, shape in enumerate(case.shapes):
        if shape is None:
            arguments.append(None)
            continue
        kind = fixed.get(index, outer)
        value = ir.Value(name=f"x{index}", type=ir.TensorType(kind))
        if index in case.weights:
            value.shape = ir.Shape(shape)
            value.const_value = _weight(shape, kind, f"x{index}", None if arrays is None else arrays[index])
            initializers.append(value)
        else:
            static = range(len(shape)) if arrays is not None else case.static_axes.get(index, ())
            value.shape = ir.Shape([size if axis in static else None for axis, size in enumerate(shape)])
            inputs.append(value)
        arguments.append(value)
        if inner != outer and index not in fixed:
            nodes.append(_cast(value, inner))
            arguments[-1] = nodes[-1].outputs[0]
    node = ir.node(case.op_type, arguments, dict(case.attributes), domain=contract.domain, num_outputs=case.outputs)
    nodes.append(node)
    results = []
    rank = contract.output_rank or next(len(shape) for shape in case.shapes if shape)
    for index, output in enumerate(node.outputs):
        if index in contract.unused_outputs:
            output.name, output.type = "", None
            continue
        kind, axes = contract.other_outputs.get(index, (inner, rank))
        output.name, output.type, output.shape = f"y{index}", ir.TensorType(kind), ir.Shape([None] * axes)
        is_cast = kind == inner != outer
        if is_cast:
            nodes.append(_cast(output, outer))
        results.append(nodes[-1].outputs[0] if is_cast else output)
    imports = {"": 23, contract.domain: 1}
    graph = ir.Graph(inputs, results, nodes=nodes, initializers=initializers, opset_imports=imports, name="one")
    return ir.Model(graph, ir_version=10)


def _weight(shape: tuple[int, ...], kind: ir.DataType, name: str, array: Array | None) -> ir.TensorProtocol:
    if array is not None:
        return ir.Tensor(array.astype(kind.numpy()), name=name)
    length = int(kind.itemsize * math.prod(shape))
    return ir.ExternalTensor("drawn", 0, length, kind, shape=ir.Shape(shape), name=name, base_dir="")


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": dtype})
    output = node.outputs[0]
    output.name, output.type, output.shape = f"{value.name}_cast", ir.TensorType(dtype), value.shape
    return node


def serialized(model: ir.Model) -> bytes:
    """Return the model as the content of a file."""
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content


def is_small(case: KernelCase) -> bool:
    """Return whether no tensor of a case has more than MAX_ELEMENTS elements."""
    sizes = [math.prod(shape) for shape in case.shapes if shape is not None]
    return max(*sizes, case.intermediate_size) <= MAX_ELEMENTS


def kernel_case_file(flags: Mapping[str, str], cases: Sequence[KernelCase] = KERNEL_CASES) -> str:
    """Return the text of a file of kernel cases, which `scripts/write_kernel_cases.py` writes.

    There are two: ONNX Runtime's kernels are in `sdonnx/doctor/kernel_cases.json`, our own in `own_kernel_cases.json`.

    Args:
        flags: the flag of `sdonnx optimize` that leaves an operator out, by operator; empty for our own operators.
        cases: the cases; only the small ones are written.
    """
    names: dict[bytes, str] = {}
    counts: dict[str, int] = {}

    def add_graph(content: bytes, kind: str) -> str:
        if content not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[content] = f"{kind} {counts[kind]}"
        return names[content]

    rows = [_row(case, add_graph) for case in cases if is_small(case)]
    graphs = {name: base64.b64encode(content).decode() for content, name in names.items()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    graph_lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(text)}" for name, text in graphs.items())
    own = json.dumps({op_type: flags[op_type] for op_type in CONTRACTS if op_type in flags})
    return f'{{"flags": {own},\n"kernel_cases": [\n{lines}\n],\n"graphs": {{\n{graph_lines}\n}}}}\n'


def _row(case: KernelCase, add_graph: Callable[[bytes, str], str]) -> Mapping[str, Any]:
    contract = contract_of_case(case)
    body = model_of(case, "float32")
    LowerContribOperators()(body)
    return {
        "op_type": case.op_type,
        "name": case.name,
        "shapes": case.shapes,
        "weights": case.weights,
        "fills": case.fills,
        "float32_inputs": sorted(contract.float32_inputs),
        "first_use": case.name in contract.first_use,
        "cpu": contract.cpu and not case.cuda_only,
        "reference": add_graph(serialized(body), f"{case.op_type} reference"),
        "kernels": {
            dtype: add_graph(serialized(model_of(case, dtype)), f"{case.op_type} {dtype}") for dtype in dtypes_of(case)
        },
    }
