"""Time the forms in which MultiHeadAttention can be told of padding, on a GPU: what `docs/decisions.md` decides by.

python scripts/attention_masks.py --json docs/results/attention-masks-h200.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.benchmark.files import append_json, refuse_file
from sdonnx.benchmark.record import environment
from sdonnx.graph.edit import MICROSOFT
from sdonnx.parity import relative_error
from sdonnx.runtime.device import Device, device_for
from sdonnx.runtime.session import Graph
from sdonnx.terminal import console, guarded

_RUNS, _WARM_UPS = 50, 5
_FORMS = ("none", "bias", "lengths")

# PixArt at 1024x1024 with guidance: rows, queries, heads, their size.
_ROWS, _QUERIES, _HEADS, _SIZE = 2, 4096, 16, 72


def _model(keys: int, form: str) -> ir.Model:
    """Return a graph of one attention."""
    width, half = _HEADS * _SIZE, ir.TensorType(ir.DataType.FLOAT16)
    q = ir.Value(name="q", type=half, shape=ir.Shape([_ROWS, _QUERIES, width]))
    k, v = (ir.Value(name=name, type=half, shape=ir.Shape([_ROWS, keys, width])) for name in "kv")
    bias = ir.Value(name="bias", type=half, shape=ir.Shape([_ROWS, 1, _QUERIES, keys]))
    lengths = ir.Value(name="lengths", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([_ROWS]))
    told: dict[str, list[ir.Value | None]] = {
        "none": [],
        "bias": [None, None, bias],
        "lengths": [None, lengths],
    }
    node = ir.node("MultiHeadAttention", [q, k, v, *told[form]], {"num_heads": _HEADS}, domain=MICROSOFT)
    output = node.outputs[0]
    output.name, output.type, output.shape = "y", half, q.shape
    inputs = [q, k, v, *(value for value in told[form] if value is not None)]
    graph = ir.Graph(inputs, [output], nodes=[node], opset_imports={"": 23, MICROSOFT: 1}, name="attention")
    return ir.Model(graph, ir_version=10)


def _measured(device: Device, keys: int, form: str, folder: Path) -> tuple[float, npt.NDArray[Any]]:
    """Return the microseconds of a run, on the device's clock with runs queued up, and the result."""
    draw = np.random.default_rng(0)
    width, lengths = _HEADS * _SIZE, np.array([1, keys - 50], np.int32)
    allowed = np.arange(keys) < lengths[:, None]
    bias = np.broadcast_to(np.where(allowed, 0, -10000)[:, None, None], (_ROWS, 1, _QUERIES, keys))
    feeds: dict[str, npt.NDArray[Any]] = {
        "q": draw.standard_normal((_ROWS, _QUERIES, width)).astype(np.float16),
        "k": draw.standard_normal((_ROWS, keys, width)).astype(np.float16),
        "v": draw.standard_normal((_ROWS, keys, width)).astype(np.float16),
        "bias": bias.astype(np.float16),
        "lengths": lengths,
    }
    path = folder / f"{form}{keys}.onnx"
    ir.save(_model(keys, form), path)
    graph = Graph(path, device)
    output = device.empty(feeds["q"].shape, np.float16)
    run = graph.bind({name: device.upload(feeds[name]) for name in graph.inputs} | {"y": output})
    for _ in range(_WARM_UPS):
        run()
    start = device.mark()
    for _ in range(_RUNS):
        run()
    microseconds = device.milliseconds(start, device.mark()) / _RUNS * 1e3
    device.synchronize()
    return microseconds, output.numpy().astype(np.float32)


def _run(options: argparse.Namespace) -> int:
    if options.json is not None:
        refuse_file(options.json)
    device = device_for(options.provider)
    device.enter()
    rows = []
    with TemporaryDirectory() as folder:
        for keys in (120, 304):
            found = {form: _measured(device, keys, form, Path(folder)) for form in _FORMS}
            row: dict[str, Any] = {"keys": keys} | {form: round(found[form][0], 2) for form in _FORMS}
            row["difference"] = relative_error(found["lengths"][1], found["bias"][1])
            console().print(row)
            rows.append(row)
    if options.json is not None:
        record = {"benchmark": "attention masks", "command": shlex.join(sys.orig_argv), "microseconds": rows}
        append_json(options.json, record | {"environment": environment()})
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time attention that is told of padding in several forms.")
    parser.add_argument("--provider", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="append what was measured to this file")
    parser.add_argument("--debug", action="store_true", help="show a traceback where it fails")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
