"""Run a contrib operator by its reference body or by a kernel, and find the file that tests it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from sdonnx.graph.edit import dtype_of, required
from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import TOLERANCE, Array, KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import (
    OUR_CONTRACTS,
    LowerContribOperators,
    contract_of,
    contract_of_case,
)
from sdonnx.runtime.device.device import device_for
from support.graphs import graph


@dataclass(frozen=True)
class OperatorTest:
    """The test data of a contrib operator, beyond its contract.

    Attributes:
        torch: compute the outputs from the inputs (None for an absent one) and the attributes.
        refused: cases that the contract and the kernel refuse, in fp16.
        tolerance: the maximum relative error of the reference body to torch.
    """

    torch: Callable[[Any, Mapping[str, Any]], list[torch.Tensor]]
    refused: tuple[KernelCase, ...] = ()
    tolerance: float = 2e-5


def operator_test(op_type: str) -> OperatorTest:
    """Return OPERATOR_TEST of an operator's test file: tests/operators/test_bias_add.py for BiasAdd."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", op_type).lower()
    found = importlib.import_module(f"operators.test_{name}").OPERATOR_TEST
    assert isinstance(found, OperatorTest)
    return found


def sdonnx_operator_test(op_type: str) -> OperatorTest:
    """Return the test data of one of our own operators, of the test file that mirrors its contract's file."""
    family = OUR_CONTRACTS[op_type].lower.__module__.rpartition(".")[2]
    found = importlib.import_module(f"operators.sdonnx_domain.test_{family}").OPERATOR_TESTS[op_type]
    assert isinstance(found, OperatorTest)
    return found


def half(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT16) -> ir.Value:
    """Return a value of a shape in float16, or another type."""
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(dtype))


def single(*shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """Return a value of a shape in float32, or another type."""
    return half(*shape, dtype=dtype)


def feeds_of(model: ir.Model, inputs: Sequence[Array | None]) -> dict[str, Array]:
    """Return the values of a case's graph inputs x0, x1, ... by name, in their data types."""
    feeds = {}
    for value in model.graph.inputs:
        name = required(value.name)
        feeds[name] = required(inputs[int(name[1:])]).astype(dtype_of(value).numpy())
    return feeds


def lowered_results(case: KernelCase, inputs: Sequence[Array | None]) -> list[Array]:
    """Return the outputs of the reference body in float32, on the CPU."""
    body = model_of(case, "float32", inputs)
    LowerContribOperators()(body)
    options = quiet_options()
    # Without optimization: ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model_bytes(body), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, feeds_of(body, inputs))
    return results


def kernel_results(case: KernelCase, inputs: Sequence[Array | None], dtype: str) -> list[Array]:
    """Return the outputs of the CUDA provider's kernel; nothing may fall back to the CPU."""
    model = model_of(case, dtype, inputs)
    device_for("cuda")
    options = quiet_options()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = ("CUDAExecutionProvider", {"use_tf32": "0"})
    session = onnxruntime.InferenceSession(model_bytes(model), options, providers=[provider])
    results: list[Array] = session.run(None, feeds_of(model, inputs))
    return results


def compare_kernel(case: KernelCase, arrays: Sequence[Array | None], dtype: str, note: Any) -> None:
    """Run the kernel in a data type and compare it with the reference body on the same values."""
    inputs = rounded(arrays, dtype, sorted(contract_of_case(case).float32_inputs))
    found, reference = kernel_results(case, inputs, dtype), lowered_results(case, inputs)
    errors = [relative_error(a, b) for a, b in zip(found, reference, strict=True)]
    row = {"operator": case.op_type, "case": case.name, "dtype": dtype, "relative_error": max(errors)}
    note("contracts", row)
    assert max(errors) < TOLERANCE[dtype], (str(case), dtype, errors)


def model_bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def quiet_options() -> onnxruntime.SessionOptions:
    """Return session options that log only fatal errors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def attention_graph(head_size: int, heads: int, dtype: str) -> ir.Model:
    """Attention with its heads split and joined around it, as exporters write it."""
    width, kind = heads * head_size, {"float16": "float16", "float32": "float"}[dtype]
    split = " ".join(f"{x}_s = Reshape({x}, split) {x}_h = Transpose<perm=[0,2,1,3]>({x}_s)" for x in ("q", "k", "v"))
    return graph(
        ", ".join(f"{kind}[B,{length},{width}] {x}" for x, length in (("q", "S"), ("k", "L"), ("v", "L"))),
        f"{kind}[B,S,{width}] y",
        f"{split} a = Attention(q_h, k_h, v_h) t = Transpose<perm=[0,2,1,3]>(a) y = Reshape(t, join)",
        split=np.array([0, 0, heads, head_size], np.int64),
        join=np.array([0, 0, width], np.int64),
    )


def attention_feeds(head_size: int, heads: int, queries: int, keys: int) -> dict[str, Array]:
    """Return q, k and v of two images, as float32."""
    generator = np.random.default_rng(head_size)
    lengths = {"q": queries, "k": keys, "v": keys}
    return {x: generator.standard_normal((2, length, heads * head_size), np.float32) for x, length in lengths.items()}


def failure_of(model: ir.Model) -> str | None:
    """Return why the contract of the graph's contrib operator does not accept it."""
    ((contract, node),) = [(contract, node) for node in model.graph if (contract := contract_of(node)) is not None]
    return contract.check(node)
