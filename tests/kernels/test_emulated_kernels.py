"""Every case of our own kernels, on the CPU: the sources of the GPU's kernels, run by kernels/src/emulation.h.

It checks indexes, barriers, launch sizes, arithmetic and the operators around the kernels.
tests/gpu/test_kernels_gpu.py runs the same cases on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.kernel_library import emulated_library, options_with
from support.operator_tests import feeds_of, lowered_results, model_bytes

from sdonnx.metrics import output_error
from sdonnx.operators.kernel_case import TOLERANCE, Array, Fill, KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import OUR_CONTRACTS, OUR_KERNEL_CASES, contract_of_case

CAPABILITY, ORDER = "SDONNX_EMULATED_CAPABILITY", "SDONNX_EMULATED_ORDER"

FIRST_USE = [case for case in OUR_KERNEL_CASES if case.name in OUR_CONTRACTS[case.op_type].first_use]
GROUP_NORMS = [case for case in OUR_KERNEL_CASES if case.op_type == "GroupNorm"]
ROUNDS = [case for case in OUR_KERNEL_CASES if case.op_type == "Attention" and case.name.endswith("N=4 2x150x16")]


def session(case: KernelCase) -> tuple[onnxruntime.InferenceSession, dict[str, Array], Sequence[Array | None]]:
    """Return a case's session, the values of its graph inputs, and the rounded inputs."""
    inputs = rounded(case.make_inputs(), "float16", sorted(contract_of_case(case).float32_inputs))
    model = model_of(case, "float16", inputs)
    return open_session(model), feeds_of(model, inputs), inputs


def open_session(model: ir.Model) -> onnxruntime.InferenceSession:
    options = options_with(emulated_library())
    return onnxruntime.InferenceSession(model_bytes(model), options, providers=["CPUExecutionProvider"])


def results(case: KernelCase) -> list[Array]:
    opened, feeds, _ = session(case)
    found: list[Array] = opened.run(None, feeds)
    return found


def error_of(found: Sequence[Array], expected: Sequence[Array]) -> float:
    assert [array.shape for array in found] == [array.shape for array in expected]
    pairs = zip(found, expected, strict=True)
    return max((output_error(a, b) for a, b in pairs if b.size), default=0.0)


def assert_agrees(case: KernelCase) -> None:
    """Compare a case's results with its reference body's."""
    opened, feeds, inputs = session(case)
    assert error_of(opened.run(None, feeds), lowered_results(case, inputs)) < TOLERANCE["float16"]


@pytest.mark.parametrize("case", OUR_KERNEL_CASES, ids=str)
def test_kernel_agrees_with_the_reference_body(case: KernelCase) -> None:
    assert_agrees(case)


@pytest.mark.parametrize("case", GROUP_NORMS[:16], ids=str)
def test_group_norm_without_clusters_agrees_with_the_reference_body(
    case: KernelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs before sm_90: one block per slab, or two launches."""
    monkeypatch.setenv(CAPABILITY, "8")
    assert_agrees(case)


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_attention_in_several_rounds_agrees_with_the_reference_body(
    case: KernelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two multiprocessors, a warp computes several tiles of queries."""
    monkeypatch.setenv(CAPABILITY, "8")
    assert_agrees(case)


@pytest.mark.parametrize("case", [*FIRST_USE, *ROUNDS], ids=str)
@pytest.mark.parametrize("capability", ["8", "9"])
def test_order_of_threads_does_not_change_a_byte(
    case: KernelCase, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing barrier, or a sum in the order of arrival, would change the result."""
    monkeypatch.setenv(CAPABILITY, capability)
    forward = results(case)
    monkeypatch.setenv(ORDER, "reverse")
    backward = results(case)
    assert [array.tobytes() for array in forward] == [array.tobytes() for array in backward]


# Products and convolutions are computed by loops here, and by libraries on a GPU.
OWN_CODE = sorted(OUR_CONTRACTS.keys() - {"MatMul", "StackedMatMul", "ChannelsLastConv"})


@pytest.mark.parametrize("op_type", OWN_CODE)
def test_unaligned_tensors(op_type: str) -> None:
    """Buffers of the caller may begin at any element: the vectors of eight numbers are then read one by one."""
    case = next(case for case in OUR_KERNEL_CASES if case.op_type == op_type)
    opened, feeds, _ = session(case)
    expected = opened.run(None, feeds)
    binding = opened.io_binding()
    held = []
    for name, array in feeds.items():
        held.append(shifted(array))
        binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), held[-1].ctypes.data)
    found = []
    for value, array in zip(opened.get_outputs(), expected, strict=True):
        found.append(shifted(np.zeros_like(array)))
        binding.bind_output(value.name, "cpu", 0, array.dtype, list(array.shape), found[-1].ctypes.data)
    opened.run_with_iobinding(binding)
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


def shifted(array: Array) -> Array:
    """Return a copy that begins one element behind an address which is a multiple of 16."""
    size, offset = array.nbytes, array.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    copy: Array = memory[start : start + size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert copy.ctypes.data % 16 == offset
    return copy


OUTPUTS = {
    "GroupNorm": 2, "SkipLayerNorm": 2, "QuantizeRows": 2, "LayerNormRows": 2, "SplitGeluRows": 2, "SumRows": 3,
}  # fmt: skip
FILLS = {
    "ScaledMatMul": {0: Fill.E4M3_BITS, 1: Fill.SCALES, 2: Fill.E4M3_BITS, 3: Fill.SCALES},
    "SumRows": {1: Fill.SCALES, 2: Fill.SCALES},
}


def one(op_type: str, shapes: Sequence[tuple[int, ...] | None], **attributes: Any) -> KernelCase:
    return KernelCase(
        op_type,
        "a shape that is refused",
        tuple(shapes),
        attributes,
        OUTPUTS.get(op_type, 1),
        fills=FILLS.get(op_type, {}),
        domain="sdonnx",
    )


TABLE_TOO_NARROW = replace(
    one("GroupNorm", [(2, 3, 4, 64), (64,), (64,), (4, 64), None, (1,)], groups=8, offset=8), fills={5: Fill.ROW_INDEX}
)
REFUSED = [
    (one("LayerNorm", [(2, 3, 12), (12,), (12,)]), "LayerNorm of 12 channels; expected a multiple of 8"),
    (one("LayerNorm", [(2, 3, 2056), (2056,), (2056,)]), "LayerNorm of 2056 channels"),
    (one("LayerNorm", [(2, 3, 16), (8,), (16,)]), "gamma and beta must have 16 elements"),
    (one("SkipLayerNorm", [(2, 3, 12), (2, 3, 12), (12,)]), "SkipLayerNorm of 12 channels; expected a multiple of 8"),
    (one("SkipLayerNorm", [(3, 3, 16), (2, 3, 16), (16,)]), "skip must have the shape of x, or a first axis that"),
    (one("SkipLayerNorm", [(2, 3, 16), (1, 4, 16), (16,)]), "skip must have the shape of x, or a first axis that"),
    (one("SkipLayerNorm", [(2, 3, 16), (2, 3, 16), (8,)]), "gamma must have 16 elements"),
    (one("SkipLayerNorm", [(2, 3, 16), (2, 3, 16), (16,), None, None, (8,)]), "bias and gate must have 16 elements"),
    (one("BiasSplitGelu", [(2, 3, 24), (24,)]), "BiasSplitGelu of width 24; expected a multiple of 16"),
    (one("BiasSplitGelu", [(2, 3, 32), (16,)]), "the bias must have 32 elements"),
    (one("GroupNorm", [(2, 3, 64), (64,), (64,)], groups=8), "GroupNorm of 3 dimensions"),
    (one("GroupNorm", [(2, 3, 4, 64), (64,), (64,)], groups=32), "GroupNorm of 64 channels in 32 groups"),
    (one("GroupNorm", [(2, 3, 4, 60), (60,), (60,)], groups=6), "GroupNorm of 60 channels in 6 groups"),
    (one("GroupNorm", [(2, 3, 4, 64), (64,), (64,)], groups=7), "GroupNorm of 64 channels in 7 groups"),
    (one("GroupNorm", [(2, 3, 4, 64), (64,), (64,), (1, 3, 4, 64)], groups=8), "skip must have the shape of x"),
    (TABLE_TOO_NARROW, "expected one index, and a table of rows that hold a number per channel"),
    (one("GroupNorm", [(2, 3, 4, 64), (64,), (64,), None, (32,)], groups=8), "the bias must have a number per channel"),
    (one("MatMul", [(2, 3, 16), (24, 16)]), "must have the same K"),
    (one("MatMul", [(2, 3, 12), (12, 16)]), "MatMul of 12 x 16; expected multiples of 8"),
    (one("MatMul", [(2, 3, 16), (16, 24), (16,)]), "the bias must have a number per column"),
    (one("MatMul", [(2, 3, 16), (16, 24), None, (2, 3, 24)], gelu=1), "gelu excludes a residual"),
    (one("MatMul", [(2, 3, 16), (16, 24), None, (1, 3, 24)]), "the residual must have the shape of the result"),
    (one("Attention", [(2, 3, 48)] * 3, num_heads=1), "Attention of width 48 in 1 heads; expected heads of 40, 64"),
    (one("Attention", [(2, 3, 144)] * 3, num_heads=1), "Attention of width 144 in 1 heads"),
    (one("Attention", [(2, 3, 144)] * 3), "Attention of width 144 in 0 heads"),
    (one("Attention", [(2, 3, 72), (2, 3, 72), (2, 4, 72)], num_heads=1), "k and v of one shape"),
    (
        one("Attention", [(2, 3, 72), (3, 3, 72), (3, 3, 72)], num_heads=1),
        "k and v must have the width of q, and its batch or a multiple of it",
    ),
    (one("Attention", [(2, 3, 72), (2, 0, 72), (2, 0, 72)], num_heads=1), "there is no key"),
    (one("Attention", [(2, 3, 72)] * 3, num_heads=1, scale=-1.0), "the scale is negative"),
    (one("ConcatChannels", [(2, 3, 12), (2, 3, 16)]), "ConcatChannels of 12 and 16 channels; expected multiples of 8"),
    (one("ConcatChannels", [(2, 3, 16), (2, 3, 4)]), "ConcatChannels of 16 and 4 channels"),
    (one("ConcatChannels", [(3, 3, 16), (2, 3, 16)]), "x and y must have the same axes but the last"),
    (one("ConcatChannels", [(2, 3, 16), (6, 16)]), "x and y must have the same axes but the last"),
    (one("ConcatChannels", [(2, 3, 16), (2, 3, 8), (8,)]), "bias_x must have a number per channel of x"),
    (one("ConcatChannels", [(2, 3, 16), (2, 3, 8), None, (16,)]), "bias_y must have a number per channel of y"),
    (one("SelfAttention", [(2, 3, 143)], num_heads=1), "expected q, k and v of each token behind one another"),
    (
        one("QuantizeRows", [(2, 3, 24)]),
        "QuantizeRows: rows of 24 numbers in 8 bits; expected a multiple of 16, at most",
    ),
    (one("QuantizeRows", [(2, 3, 5136)]), "rows of 5136 numbers in 8 bits"),
    (one("QuantizeRows", [(2, 3, 16)], format=3), "QuantizeRows: format 3; expected 0, 1 or 2"),
    (one("LayerNormRows", [(2, 3, 16), (8,)]), "LayerNormRows: the gamma must have a number per column"),
    (one("SplitGeluRows", [(2, 3, 32), (16,)]), "SplitGeluRows: the bias must have a number per column"),
    (one("SplitGeluRows", [(2, 3, 33)]), "SplitGeluRows: rows of 16 numbers in 8 bits"),
    (one("SumRows", [(2, 3, 16), (2, 3, 1), (8,), None, (2, 3, 16)]), "expected a scale for each row and column"),
    (one("SumRows", [(2, 3, 16), (2, 3, 1), (16,), None, (3, 16)]), "the residual must have the shape of x"),
    (one("SumRows", [(2, 3, 16), (2, 3, 1), (16,), None, (2, 3, 16), None, (16,)]), "a beta needs a gamma"),
    (one("ScaledMatMul", [(2, 3, 16), (2, 3, 1), (32, 16)]), "a scale for each row and column, or none"),
    (one("ScaledMatMul", [(2, 3, 16), None, (32, 16)], gelu=1), "without scales has no bias, residual or gelu"),
    (one("ChannelsLastConv", [(2, 4, 4, 8), (8, 3, 3, 16)]), "must have the same C"),
    (one("ChannelsLastConv", [(2, 2, 4, 8), (8, 3, 3, 8)]), "larger than the padded image of 2 x 4"),
    (one("ChannelsLastConv", [(2, 4, 4, 8), (8, 3, 3, 8), (16,)]), "the bias must have a number per channel"),
    (one("ChannelsLastConv", [(2, 4, 4, 8), (8, 3, 3, 8)], stride=0), "expected a stride of at least 1"),
    (one("UpsampleNearest", [(2, 3, 16)]), "UpsampleNearest of 3 dimensions; expected 4"),
    (one("UpsampleNearest", [(2, 3, 4, 12)]), "UpsampleNearest of 12 channels; expected a multiple of 8"),
]


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=[f"{case.op_type}-{text[:30]}" for case, text in REFUSED])
def test_shapes_are_checked_on_the_host(case: KernelCase, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        results(case)


@pytest.mark.parametrize("shape", [(2, 0, 72), (0, 3, 72)])
def test_attention_without_queries_is_empty(shape: tuple[int, ...]) -> None:
    keys = (shape[0], 5, 72)
    (found,) = results(one("Attention", [shape, keys, keys], num_heads=1))
    assert found.shape == shape


def first_of_32(array: Array, batch: int) -> Array:
    """Return the first images of an array that has 32 along an axis; other arrays are weights."""
    return array.take(range(batch), array.shape.index(32)) if 32 in array.shape else array


@pytest.mark.parametrize("op_type", sorted(OUR_CONTRACTS.keys() - {"SamplerInput", "SamplerStep"}))
def test_batches_of_1_to_32_are_computed_image_by_image(op_type: str) -> None:
    """Launches depend on the size of the batch, results of an image do not."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "LayerNorm": [(32, 5, 64), (64,), (64,)],
        "SkipLayerNorm": [(32, 5, 64), (32, 5, 64), (64,), (64,), (64,), (64,)],
        "BiasSplitGelu": [(32, 5, 64), (64,)],
        "GroupNorm": [(32, 4, 4, 64), (64,), (64,)],
        "MatMul": [(32, 5, 64), (64, 16), (16,)],
        "StackedMatMul": [(32, 5, 64), (3, 64, 16)],
        "Attention": [(32, 5, 72), (32, 6, 72), (32, 6, 72)],
        "SelfAttention": [(3, 32, 5, 72)],
        "ConcatChannels": [(32, 3, 5, 64), (32, 3, 5, 24), (64,)],
        "UpsampleNearest": [(32, 3, 5, 24)],
        "ChannelsLastConv": [(32, 3, 5, 24), (16, 3, 3, 24), (16,)],
        "QuantizeRows": [(32, 5, 64)],
        "LayerNormRows": [(32, 5, 64), (64,), (64,)],
        "SplitGeluRows": [(32, 5, 64), (64,)],
        "SumRows": [(32, 5, 64), (32, 5, 1), (64,), (64,), (32, 5, 64), (64,), (64,)],
        "ScaledMatMul": [(32, 5, 64), (32, 5, 1), (16, 64), (16,), (16,)],
    }
    attributes = {"num_heads": 1} if op_type.endswith("Attention") else {}
    attributes |= {"groups": 8, "activation": 1} if op_type == "GroupNorm" else {}
    outputs = OUTPUTS[op_type] if op_type.endswith("Rows") else 1
    wide = KernelCase(
        op_type, "batch", tuple(shapes[op_type]), attributes, outputs, fills=FILLS.get(op_type, {}), domain="sdonnx"
    )
    model = model_of(wide, "float16")  # with sizes that may change between runs
    feeds = feeds_of(model, rounded(wide.make_inputs(), "float16"))
    opened = open_session(model)
    together = opened.run(None, feeds)[0]
    for batch in (1, 3, 8):
        part = opened.run(None, {name: first_of_32(array, batch) for name, array in feeds.items()})[0]
        expected = first_of_32(together, batch)
        assert output_error(part, expected) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    "sizes", [[2, 8, 10, 16], [2, 6, 11, 16], [2, 6, 8, 16], [1, 6, 10, 16], [2, 6, 10, 8], [6, 10]], ids=str
)
def test_sizes_of_an_upsampled_image_are_checked_on_the_host(sizes: list[int]) -> None:
    case = replace(one("UpsampleNearest", [(2, 3, 5, 16), (4,)]), fills={1: Fill.DOUBLED_SIZES})
    feeds = {"x0": np.zeros((2, 3, 5, 16), np.float16), "x1": np.array(sizes, np.int64)}
    with pytest.raises(Exception, match="UpsampleNearest: sizes must "):
        open_session(model_of(case, "float16")).run(None, feeds)


@pytest.mark.parametrize("fill", [Fill.ODD_SIZES, Fill.ODD_HEIGHT])
def test_nothing_is_written_behind_an_odd_image(fill: str) -> None:
    """Within the result, a pixel too many would be overwritten by the thread to which the place belongs."""
    case = replace(one("UpsampleNearest", [(2, 3, 5, 16), (4,)]), fills={1: fill})
    opened, feeds, _ = session(case)
    (expected,) = opened.run(None, feeds)
    memory = np.full(expected.size + 1024, 7, np.float16)
    binding = opened.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y0", "cpu", 0, np.float16, list(expected.shape), memory.ctypes.data)
    opened.run_with_iobinding(binding)
    assert memory[: expected.size].tobytes() == expected.tobytes()
    assert (memory[expected.size :] == 7).all()
