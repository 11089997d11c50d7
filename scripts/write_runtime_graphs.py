"""Write the graphs sdonnx/runtime/device/*.onnx for the run-time, which does not import onnx.

It runs in_place_probe*.onnx to see whether weights can be changed in place, and one_block.onnx to reserve memory.

    python scripts/write_runtime_graphs.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir

OUTPUT = Path(__file__).parents[1] / "sdonnx" / "runtime" / "device"

SIZE = 16


def probe() -> ir.Model:
    """Return the model: `result` is `x` times `first` (MatMul) times `second` (Gemm) plus `bias`, in float16.

    A SkipLayerNormalization adds the bias; its last output is the sum that it normalizes.
    """
    kind = ir.TensorType(ir.DataType.FLOAT16)
    matrix, vector = ir.Shape([SIZE, SIZE]), ir.Shape([SIZE])

    def value(name: str, shape: ir.Shape, *, stored: bool = False) -> ir.Value:
        content = ir.tensor(np.zeros(shape.numpy(), np.float16), name=name) if stored else None
        return ir.Value(name=name, shape=shape, type=kind, const_value=content)

    x, between, product, result = (value(name, matrix) for name in ("x", "between", "product", "result"))
    first, second, skip = (value(name, matrix, stored=True) for name in ("first", "second", "skip"))
    gamma, beta, bias = (value(name, vector, stored=True) for name in ("gamma", "beta", "bias"))
    unused = [ir.Value(name=name) for name in ("normalized", "", "")]
    nodes = [
        ir.Node("", "MatMul", [x, first], outputs=[between], name="matmul"),
        ir.Node("", "Gemm", [between, second], outputs=[product], name="gemm"),
        ir.Node(
            "com.microsoft",
            "SkipLayerNormalization",
            [product, skip, gamma, beta, bias],
            [ir.AttrFloat32("epsilon", 1e-5)],
            outputs=[*unused, result],
            name="skip_layer_norm",
        ),
    ]
    weights = [first, second, skip, gamma, beta, bias]
    opsets = {"": 18, "com.microsoft": 1}
    graph = ir.Graph([x], [result], nodes=nodes, initializers=weights, opset_imports=opsets, name="in_place_probe")
    return ir.Model(graph, ir_version=10)


def int8_probe() -> ir.Model:
    """Return the model: `result` is `x` in float16 times `stored`, in int8, with scales of columns."""
    half, matrix = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([SIZE, SIZE])
    x, restored, result = (ir.Value(name=name, shape=matrix, type=half) for name in ("x", "restored", "result"))
    stored = ir.tensor(np.zeros((SIZE, SIZE), np.int8), name="stored")
    scales = ir.tensor(np.ones(SIZE, np.float16), name="scales")
    weights = [
        ir.Value(name=each.name, shape=ir.Shape(each.shape.numpy()), type=ir.TensorType(each.dtype), const_value=each)
        for each in (stored, scales)
    ]
    axis = [ir.AttrInt64("axis", 1)]
    nodes = [
        ir.Node("", "DequantizeLinear", weights, axis, outputs=[restored], name="restore"),
        ir.Node("", "MatMul", [x, restored], outputs=[result], name="matmul"),
    ]
    graph = ir.Graph([x], [result], nodes=nodes, initializers=weights, opset_imports={"": 23}, name="int8_probe")
    return ir.Model(graph, ir_version=10)


def fp8_probe() -> ir.Model:
    """Return the model: `result` is `x` in float16 times `e4m3` times `e5m2`, each with scales of columns."""
    half, matrix = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([SIZE, SIZE])
    x = ir.Value(name="x", shape=matrix, type=half)
    nodes, weights, last = list[ir.Node](), list[ir.Value](), x
    for name, dtype in (("e4m3", ir.DataType.FLOAT8E4M3FN), ("e5m2", ir.DataType.FLOAT8E5M2)):
        stored = ir.tensor(np.zeros((SIZE, SIZE), dtype.numpy()), name=name)
        scales = ir.tensor(np.ones(SIZE, np.float16), name=f"{name}_scales")
        inputs = [
            ir.Value(
                name=each.name, shape=ir.Shape(each.shape.numpy()), type=ir.TensorType(each.dtype), const_value=each
            )
            for each in (stored, scales)
        ]
        restored = ir.Value(name=f"restored_{name}", shape=matrix, type=half)
        product = ir.Value(name="result" if nodes else "between", shape=matrix, type=half)
        axis = [ir.AttrInt64("axis", 1)]
        nodes += [
            ir.Node("", "DequantizeLinear", inputs, axis, outputs=[restored], name=f"restore_{name}"),
            ir.Node("", "MatMul", [last, restored], outputs=[product], name=f"matmul_{name}"),
        ]
        weights, last = [*weights, *inputs], product
    graph = ir.Graph([x], [last], nodes=nodes, initializers=weights, opset_imports={"": 23}, name="fp8_probe")
    return ir.Model(graph, ir_version=10)


def nhwc_conv_probe() -> ir.Model:
    """Return the model: `result` is `x` convolved with `weight` of 3x3, plus `bias`, in float16 with channels last.

    It has the operator and the attributes that `sdonnx.fusions.fuse_nhwc_conv` writes.
    """
    half, image = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([1, 6, 6, SIZE])
    x, result = (ir.Value(name=name, shape=image, type=half) for name in ("x", "result"))
    weights = [
        ir.Value(
            name=name, shape=ir.Shape(size), type=half, const_value=ir.tensor(np.zeros(size, np.float16), name=name)
        )
        for name, size in (("weight", (SIZE, 3, 3, SIZE)), ("bias", (SIZE,)))
    ]
    sizes = {"dilations": [1, 1], "kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1]}
    attributes = [ir.AttrInt64("group", 1), *(ir.AttrInt64s(name, values) for name, values in sizes.items())]
    node = ir.Node("com.microsoft", "NhwcConv", [x, *weights], attributes, outputs=[result], name="convolve")
    opsets = {"": 18, "com.microsoft": 1}
    graph = ir.Graph([x], [result], nodes=[node], initializers=weights, opset_imports=opsets, name="nhwc_conv_probe")
    return ir.Model(graph, ir_version=10)


def one_block() -> ir.Model:
    """Return the model: `block` is a tensor of `size` bytes."""
    size = ir.Value(name="size", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    block = ir.Value(name="block", shape=ir.Shape(["bytes"]), type=ir.TensorType(ir.DataType.UINT8))
    zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.uint8)))
    node = ir.Node("", "ConstantOfShape", [size], [zero], outputs=[block], name="allocate")
    graph = ir.Graph([size], [block], nodes=[node], opset_imports={"": 18}, name="one_block")
    return ir.Model(graph, ir_version=10)


MODELS = {
    "in_place_probe": probe,
    "in_place_probe_int8": int8_probe,
    "in_place_probe_fp8": fp8_probe,
    "in_place_probe_nhwc_conv": nhwc_conv_probe,
    "one_block": one_block,
}
"""The models, by the name of their file without .onnx."""


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder to write to")
    folder = parser.parse_args().output
    for name, model in MODELS.items():
        ir.save(model(), folder / f"{name}.onnx")


if __name__ == "__main__":
    main()
