"""A corner as a graph of one contrib operator, and the file of small corners that `sdonnx.doctor` runs.

The run-time has neither onnx nor the reference bodies. What it needs of both is written here into one file: for each
corner a graph of the operator in each type of its contract, and a graph of its reference body in float32. Shapes are
ranks and weights are left open, so that many corners share a graph; values are drawn where they are needed.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sdonnx.doctor.corner import Array, Corner
from sdonnx.graph.contract import CONTRACTS
from sdonnx.graph.corners import CORNERS, DTYPES, dtypes_of
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.lowering import LowerContribOperators

__all__ = ["LARGEST", "corner_file", "model_of", "serialized", "small"]

LARGEST = 2**20
"""Elements of the largest tensor of a corner that the doctor runs: the whole of them takes seconds."""

# What a machine's first use is checked with: for each operator one size that pipelines have, in fp16; for attention
# every head size, a prompt's 77 tokens, a mask that is causal and one that is given, and numbers of keys.
_FIRST = {
    "GroupNorm": ["C=320 G=32 2x9x13 activation=1"],
    "SkipGroupNorm": ["C=320 G=32 3x5x7 skip=image bias=True outputs=2 activation=1"],
    "BiasSplitGelu": ["D=2560 3x7"],
    "BiasAdd": ["C=320 3x7"],
    "NhwcConv": ["halving 2x10x14 bias=True"],
    "SkipLayerNormalization": ["D=320 3x7 beta=True bias=True outputs=4"],
    "SkipSimplifiedLayerNormalization": ["D=768 3x7 bias=True outputs=4"],
    "FusedMatMul": ["3x7 64x1152"],
    "FastGelu": ["D=1152 3x7 bias=True"],
    "MultiHeadAttention": [
        *(f"plain H={size} N=2 {sizes}" for size in (40, 64, 72, 80, 128, 160) for sizes in ("2x64x80", "1x256x256")),
        *(f"plain H={size} N=2 3x1x77" for size in (40, 64, 160)),
        "plain H=512 N=1 1x256x256",
        "causal H=64 N=4 2x77x77",
        "mask=3x1 H=64 N=4 3x64x80",
        *(f"lengths H={size} N=2 {sizes}" for size, sizes in ((64, "3x64x80"), (72, "3x77x77"), (72, "3x77x120"))),
    ],
}

_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_PACKED = 5  # dimensions of MultiHeadAttention's packed inputs


def model_of(corner: Corner, dtype: str, arrays: Sequence[Array | None] | None = None) -> ir.Model:
    """Return a graph of one contrib operator: inputs x0, x1, ..., outputs y0, y1, ...

    Python has no way to pass bfloat16 to ONNX Runtime: for it, inputs and outputs are float32, cast inside.

    Args:
        corner: the operator, its attributes and shapes.
        dtype: "float16", "float32" or "bfloat16".
        arrays: values of the inputs; initializers hold theirs. Without them shapes are ranks, and initializers are
            external data that whoever loads the graph gives.
    """
    contract, inner = CONTRACTS[corner.op_type], DTYPES[dtype]
    outer = ir.DataType.FLOAT if dtype == "bfloat16" else inner
    # The inputs that have the same type in every one of the operator's.
    same = dict.fromkeys(contract.float32_inputs, ir.DataType.FLOAT) | dict.fromkeys(corner.integers, ir.DataType.INT32)
    nodes: list[ir.Node] = []
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []
    given: list[ir.Value | None] = []
    for index, shape in enumerate(corner.shapes):
        if shape is None:
            given.append(None)
            continue
        kind = same.get(index, outer)
        value = ir.Value(name=f"x{index}", type=ir.TensorType(kind))
        if index in corner.weights:
            value.shape = ir.Shape(shape)
            value.const_value = _weight(shape, kind, f"x{index}", None if arrays is None else arrays[index])
            initializers.append(value)
        else:
            value.shape = _shape(shape, known=arrays is not None)
            inputs.append(value)
        given.append(value)
        if inner != outer and index not in same:
            nodes.append(_cast(value, inner))
            given[-1] = nodes[-1].outputs[0]
    node = ir.node(corner.op_type, given, dict(corner.attributes), domain=MICROSOFT, num_outputs=corner.outputs)
    nodes.append(node)
    results = []
    rank = 3 if corner.op_type == "MultiHeadAttention" else next(len(shape) for shape in corner.shapes if shape)
    for index, output in enumerate(node.outputs):
        # Outputs 1 and 2 of the norms, mean and deviation, are not asked for.
        if corner.op_type in _NORMS and index in (1, 2):
            output.name, output.type = "", None
            continue
        output.name, output.type, output.shape = f"y{index}", ir.TensorType(inner), ir.Shape([None] * rank)
        if inner != outer:
            nodes.append(_cast(output, outer))
        results.append(nodes[-1].outputs[0] if inner != outer else output)
    imports = {"": 23, MICROSOFT: 1}
    graph = ir.Graph(inputs, results, nodes=nodes, initializers=initializers, opset_imports=imports, name="one")
    return ir.Model(graph, ir_version=10)


def _shape(shape: tuple[int, ...], known: bool) -> ir.Shape:
    if known:
        return ir.Shape(shape)
    # A reference body takes heads and head sizes of packed inputs as constants.
    return ir.Shape([None, None, *shape[2:]] if len(shape) == _PACKED else [None] * len(shape))


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
    """Return the model as a file holds it."""
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content


def small(corner: Corner) -> bool:
    """Tell whether a corner takes little enough for the doctor: no tensor, and no scores, above LARGEST elements."""
    sizes = [math.prod(shape) for shape in corner.shapes if shape is not None]
    if corner.op_type == "MultiHeadAttention" and len(corner.shapes) >= 3:
        (batch, queries, _), keys = corner.shapes[0] or (0, 0, 0), (corner.shapes[1] or (0, 0, 0))[1]
        sizes.append(batch * corner.attributes["num_heads"] * queries * keys)
    return max(sizes) <= LARGEST


def corner_file(corners: Sequence[Corner] = CORNERS) -> str:
    """Return the text of `sdonnx/doctor/corners.json`; `scripts/write_corners.py` writes it."""
    names: dict[bytes, str] = {}
    counts: dict[str, int] = {}

    def kept(content: bytes, kind: str) -> str:
        if content not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[content] = f"{kind} {counts[kind]}"
        return names[content]

    rows = [_row(corner, kept) for corner in corners if small(corner)]
    graphs = {name: base64.b64encode(content).decode() for content, name in names.items()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    kept_graphs = ",\n".join(f"{json.dumps(name)}: {json.dumps(text)}" for name, text in graphs.items())
    return f'{{"corners": [\n{lines}\n],\n"graphs": {{\n{kept_graphs}\n}}}}\n'


def _row(corner: Corner, kept: Any) -> Mapping[str, Any]:
    contract = CONTRACTS[corner.op_type]
    body = model_of(corner, "float32")
    LowerContribOperators()(body)
    packed = any(shape is not None and len(shape) == _PACKED for shape in corner.shapes)
    return {
        "op_type": corner.op_type,
        "name": corner.name,
        "shapes": corner.shapes,
        "weights": corner.weights,
        "float32_inputs": sorted(contract.float32_inputs),
        "first": corner.name in _FIRST[corner.op_type],
        "cpu": contract.cpu and not packed,
        "reference": kept(serialized(body), f"{corner.op_type} reference"),
        "kernels": {
            dtype: kept(serialized(model_of(corner, dtype)), f"{corner.op_type} {dtype}") for dtype in dtypes_of(corner)
        },
    }
