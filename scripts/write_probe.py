"""Write sdonnx/runtime/device/in_place_probe.onnx.

The run-time, which does not import onnx, runs it to see whether weights can be changed in place.

    python scripts/write_probe.py [--output FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir

OUTPUT = Path(__file__).parents[1] / "sdonnx" / "runtime" / "device" / "in_place_probe.onnx"

SIZE = 16


def probe() -> ir.Model:
    """Return the model: `result` is `x` times `first` (MatMul) times `second` (Gemm), in float16."""
    kind = ir.TensorType(ir.DataType.FLOAT16)
    shape = ir.Shape([SIZE, SIZE])
    x = ir.Value(name="x", shape=shape, type=kind)
    weights = []
    for name in ("first", "second"):
        tensor = ir.tensor(np.zeros((SIZE, SIZE), np.float16), name=name)
        weights.append(ir.Value(name=name, shape=shape, type=kind, const_value=tensor))
    between = ir.Value(name="between", shape=shape, type=kind)
    result = ir.Value(name="result", shape=shape, type=kind)
    nodes = [
        ir.Node("", "MatMul", [x, weights[0]], outputs=[between], name="matmul"),
        ir.Node("", "Gemm", [between, weights[1]], outputs=[result], name="gemm"),
    ]
    graph = ir.Graph([x], [result], nodes=nodes, initializers=weights, opset_imports={"": 18}, name="in_place_probe")
    return ir.Model(graph, ir_version=10)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file to write")
    ir.save(probe(), parser.parse_args().output)


if __name__ == "__main__":
    main()
