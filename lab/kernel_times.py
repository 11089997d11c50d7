"""Time alternative forms of a transformer block's operators in ONNX Runtime.

python lab/kernel_times.py --json docs/results/kernel-times-h200.json

docs/lab/choices.md has these times. They are the durations of the kernels according to torch's profiler,
without the time that the host needs to launch them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.benchmark.operator_times import trace_kernels
from sdonnx.environment_record import environment
from sdonnx.errors import SdonnxError
from sdonnx.runtime.device.device import Device, device_for
from sdonnx.runtime.device.session import Graph, SessionSettings
from sdonnx.terminal import console, guarded

_RUNS, _ROUNDS = 3, 4

_TOKENS, _TEXT, _LONG = "float16[2,4096,1152]", "float16[2,120,1152]", "float16[2,304,1152]"
_FLAT, _MATRIX, _ROW = "float16[8192,1152]", "float16[1152,1152]", "float16[1152]"
_ROWS, _WIDE, _WIDE_ROW = "float16[28,1,1152]", "float16[2,4096,4608]", "float16[4608]"
_QKV = f"{_TOKENS} q, {_TOKENS} k, {_TOKENS} v"
_ATTENTION = "y = com.microsoft.MultiHeadAttention<num_heads=16>"
_NORM = "com.microsoft.SkipLayerNormalization<epsilon=0.000001>"

# For 1024x1024 with guidance; alternatives are listed together. name -> inputs, output, graph, provider options.
_CASES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "self-attention: default": (_QKV, _TOKENS, f"{_ATTENTION}(q, k, v)", {}),
    "self-attention: flash": (_QKV, _TOKENS, f"{_ATTENTION}(q, k, v)", {"sdpa_kernel": "1"}),
    "self-attention: memory-efficient": (_QKV, _TOKENS, f"{_ATTENTION}(q, k, v)", {"sdpa_kernel": "2"}),
    "self-attention: cuDNN": (_QKV, _TOKENS, f"{_ATTENTION}(q, k, v)", {"sdpa_kernel": "8"}),
    **{
        f"attention to {size} tokens: {name}": (
            f"{_TOKENS} q, {keys} k, {keys} v{extra_input}", _TOKENS, f"{_ATTENTION}(q, k, v{argument})", {},
        )
        for size, keys in ((120, _TEXT), (304, _LONG))
        for name, extra_input, argument in (
            ("no mask", "", ""),
            ("a bias", f", float16[2,1,4096,{size}] bias", ", , , bias"),
            ("sequence lengths", ", int32[2] lengths", ", , lengths"),
        )
    },
    "gate of 8192 tokens": (f"{_TOKENS} x, float16[1,1,1152] g", _TOKENS, "y = Mul(x, g)", {}),
    "gate of a weight of 1152 rows": (f"{_MATRIX} x, {_ROW} g", _MATRIX, "y = Mul(x, g)", {}),
    "gate of a weight of 4608 rows": (f"float16[4608,1152] x, {_ROW} g", "float16[4608,1152]", "y = Mul(x, g)", {}),
    "product": (f"{_TOKENS} x, {_MATRIX} w", _TOKENS, "y = MatMul(x, w)", {}),
    "product, bias by Add": (
        f"{_TOKENS} x, {_MATRIX} w, {_ROW} b", _TOKENS, "p = MatMul(x, w) n = Neg(b) y = Add(n, p)", {},
    ),
    "product, bias by Gemm": (f"{_FLAT} x, {_MATRIX} w, {_ROW} b", _FLAT, "y = Gemm(x, w, b)", {}),
    "product, residual by Gemm": (f"{_FLAT} x, {_MATRIX} w, {_FLAT} r", _FLAT, "y = Gemm(x, w, r)", {}),
    "residual by Add": (f"{_TOKENS} x, {_TOKENS} r", _TOKENS, "y = Add(x, r)", {}),
    "residual and bias by BiasAdd": (
        f"{_TOKENS} x, {_ROW} b, {_TOKENS} r", _TOKENS, "y = com.microsoft.BiasAdd(x, b, r)", {},
    ),
    "residual and bias by SkipLayerNormalization": (
        f"{_TOKENS} x, {_TOKENS} r, {_ROW} g, {_ROW} b", _TOKENS, f"n, , , y = {_NORM}(x, r, g, g, b)", {},
    ),
    "norm": (f"{_TOKENS} x, {_ROW} g", _TOKENS, "y = LayerNormalization(x, g, g)", {}),
    "norm of a sum": (f"{_TOKENS} x, {_TOKENS} r, {_ROW} g", _TOKENS, f"y = {_NORM}(x, r, g, g)", {}),
    "norm of a sum with one image's": (
        f"{_TOKENS} x, float16[1,4096,1152] r, {_ROW} g", _TOKENS, f"y = {_NORM}(x, r, g, g)", {},
    ),
    "28 rows by matrices": (f"{_ROWS} x, float16[28,1152,1152] w", _ROWS, "y = MatMul(x, w)", {}),
    "gelu and bias": (f"{_WIDE} x, {_WIDE_ROW} b", _WIDE, "y = com.microsoft.FastGelu(x, b)", {}),
    "gelu by erf and bias": (f"{_WIDE} x, {_WIDE_ROW} b", _WIDE, "y = com.microsoft.BiasGelu(x, b)", {}),
}  # fmt: skip


def _feeds(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(0)
    feeds: dict[str, npt.NDArray[Any]] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [size.dim_value for size in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.INT32:
            feeds[value.name] = np.array([70, 120], np.int32)
        else:
            feeds[value.name] = rng.standard_normal(shape, np.float32).astype(np.float16)
    return feeds


def _microseconds(device: Device, name: str, folder: Path) -> float:
    """Return the total of the kernels' minimum durations in microseconds; on a CPU, the duration of the run."""
    inputs, output, body, options = _CASES[name]
    opsets = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{opsets} case ({inputs}) => ({output} y) {{ {body} }}")
    path = folder / "case.onnx"
    onnx.save(model, path)
    graph = Graph(path, device, settings=SessionSettings(provider_options=options))
    shape = [size.dim_value for size in model.graph.output[0].type.tensor_type.shape.dim]
    buffers = {given: device.upload(values) for given, values in _feeds(model).items()}
    run = graph.bind(buffers | {"y": device.empty(shape, np.float16)})
    run()
    device.synchronize()
    if device.provider == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6

    def runs() -> None:
        for _ in range(_RUNS):
            run()

    totals = []
    for _ in range(_ROUNDS):
        times: dict[str, list[float]] = {}
        for kernel, begin, end in trace_kernels(runs):
            times.setdefault(kernel, []).append(end - begin)
        totals.append(sum(min(each) * len(each) / _RUNS for each in times.values()))
    return min(totals)


def _run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable(options.json)
    device = device_for(options.provider)
    device.enter()
    found: dict[str, float | str] = {}
    with TemporaryDirectory() as folder:
        for name in _CASES:
            try:
                found[name] = round(_microseconds(device, name, Path(folder)), 1)
            except SdonnxError as error:
                found[name] = str(error)  # no kernel of this provider
            console().print(f"{name}: {found[name]}", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        record = {"benchmark": "kernel times", "command": shlex.join(sys.orig_argv), "microseconds": found}
        append_json(options.json, record | {"environment": environment()})
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time alternative forms of a transformer block's operators.")
    parser.add_argument("--provider", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="append the measurements to this file")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
