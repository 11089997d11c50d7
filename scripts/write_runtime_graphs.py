"""Write the graph sdonnx/runtime/device/one_block.onnx, with which the run-time reserves memory.

The run-time does not import onnx.

    python scripts/write_runtime_graphs.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir

OUTPUT = Path(__file__).parents[1] / "sdonnx" / "runtime" / "device"


def one_block() -> ir.Model:
    """Return the model: `block` is a tensor of `size` bytes."""
    size = ir.Value(name="size", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    block = ir.Value(name="block", shape=ir.Shape(["bytes"]), type=ir.TensorType(ir.DataType.UINT8))
    zero = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.uint8)))
    node = ir.Node("", "ConstantOfShape", [size], [zero], outputs=[block], name="allocate")
    graph = ir.Graph([size], [block], nodes=[node], opset_imports={"": 18}, name="one_block")
    return ir.Model(graph, ir_version=10)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder to write to")
    ir.save(one_block(), parser.parse_args().output / "one_block.onnx")


if __name__ == "__main__":
    main()
