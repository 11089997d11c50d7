"""Computations of sizes that may be negative, compared with Python's integers, before and after they are rewritten."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sdonnx.graph.passes import infer_shapes, tidy
from sdonnx.graph.shapes.recompute import ComputeSizesFromInputs

SIZES = ((1, 1), (2, 7), (3, 2), (5, 18), (8, 3), (23, 12))
TABLE = np.arange(40, dtype=np.float32)

# `int(a / b)` is ONNX's Div of integers. `len(x[a:b])` is the size of a slice of a tensor with h rows.
EXPRESSIONS = st.recursive(
    st.one_of(
        st.sampled_from(["h", "w", "h", "w", "1", "2", "5", "64"]),
        st.tuples(st.integers(-6, 6), st.integers(-6, 12)).map(lambda ends: f"len(x[{ends[0]}:{ends[1]}])"),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from(["2", "3", "8", "-2", "-3"])).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(inner, st.sampled_from("23")).map(lambda parts: f"int({parts[0]} / {parts[1]})"),
        st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
    ),
    max_leaves=6,
)


class Written:
    """A graph that slices a table from a computed row, and from the first to a computed row."""

    def __init__(self, expression: str) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {"table": numpy_helper.from_array(TABLE, "table")}
        self.add("Shape", ["x"], "shape")
        for index, name in enumerate("hw"):
            self.add("Gather", ["shape", self.number(index)], name)
        row = self.add("Unsqueeze", [self.write(ast.parse(expression, mode="eval").body), self.row(0)])
        self.add("Slice", ["table", row, self.row(100)], "after")
        self.add("Slice", ["table", self.row(0), row], "before")

    def add(self, operator: str, inputs: list[str], name: str | None = None) -> str:
        name = name or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=f"{operator}_{len(self.nodes)}"))
        return name

    def number(self, value: int) -> str:
        name = f"number_{value}"
        self.constants[name] = numpy_helper.from_array(np.array(value), name)
        return name

    def row(self, value: int) -> str:
        name = f"row_{value}"
        self.constants[name] = numpy_helper.from_array(np.array([value]), name)
        return name

    def write(self, part: ast.expr) -> str:
        """Add the nodes of an expression; the floor of a quotient as exporters write it, by the remainder."""
        match part:
            case ast.Name(name):
                return name
            case ast.Constant(int(value)):
                return self.number(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
                return self.number(-value)
            case ast.BinOp(left, ast.FloorDiv(), right):
                above, below = self.write(left), self.write(right)
                return self.add("Div", [self.add("Sub", [above, self.add("Mod", [above, below])]), below])
            case ast.BinOp(left, kind, right):
                operator = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Mod: "Mod", ast.Div: "Div"}[type(kind)]
                return self.add(operator, [self.write(left), self.write(right)])
            case ast.Call(ast.Name("int"), [quotient]):
                return self.write(quotient)
            case ast.Call(ast.Name("len"), [ast.Subscript(_, ast.Slice(lower, upper))]):
                ends = [self.row(ast.literal_eval(end)) for end in (lower, upper) if end is not None]
                sliced = self.add("Slice", ["x", *ends])
                return self.add("Gather", [self.add("Shape", [sliced]), self.number(0)])
            case ast.Call(ast.Name(name), arguments):
                return self.add(name.title(), [self.write(argument) for argument in arguments])
        raise AssertionError(ast.dump(part))

    def model(self) -> ir.Model:
        rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("after", "before")]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["h", "w"])
        graph = helper.make_graph(self.nodes, "sizes", [x], rows, list(self.constants.values()))
        return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def recomputed(expression: str) -> ir.Model:
    model = Written(expression).model()
    infer_shapes(model)
    ComputeSizesFromInputs()(model)
    tidy(model)
    return model


def results(model: ir.Model) -> list[list[list[float]]]:
    """Return both outputs for each of `SIZES`, as ONNX Runtime computes them from the nodes as they are."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = (session.run(["after", "before"], {"x": np.zeros(size, np.float32)}) for size in SIZES)
    return [[each.tolist() for each in pair] for pair in outputs]


def expected(expression: str) -> list[list[list[float]]]:
    table, code = TABLE.tolist(), compile(expression, "expression", "eval")
    rows = [eval(code, {"h": h, "w": w, "x": range(h)}) for h, w in SIZES]
    return [[table[row:], table[:row]] for row in rows]


@given(expression=EXPRESSIONS)
@settings(max_examples=80, deadline=None)
def test_rewritten_sizes_are_those_of_python(expression: str) -> None:
    assert results(recomputed(expression)) == expected(expression)


@pytest.mark.parametrize(
    ("expression", "divisions"),
    [
        ("h // 2", ["Div"]),
        ("(h - 1) // 2 + 1", ["Div"]),
        ("((h - 1) // 2) // 2", ["Div"]),
        ("h * w // 4", ["Div"]),
        ("(64 - h) // 2", ["Mod", "Div"]),
        ("(64 - h // 2) // 2", ["Div", "Mod", "Div"]),
        ("(0 - h) % 8", ["Mod", "Div"]),
    ],
)
def test_only_a_negative_dividend_needs_a_remainder(expression: str, divisions: list[str]) -> None:
    model = recomputed(expression)
    assert [node.op_type for node in model.graph if node.op_type in ("Div", "Mod")] == divisions
    assert not any(node.op_type == "Gather" for node in model.graph)  # all of it was written again
    assert results(model) == expected(expression)
