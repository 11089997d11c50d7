"""Our own kernels on a GPU: every case against the reference body, under CUDA graphs, twice with equal bytes.

Build the library first (`make -C kernels`), and name it or install the wheel:

    SDONNX_KERNELS=kernels/build/libsdonnx_kernels.so python -m pytest -q tests/gpu/test_kernels_gpu.py

`scripts/verify_kernels.py` also runs `test_sanitized` under each tool of compute-sanitizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.operator_tests import lowered_results, model_bytes, quiet_options, sdonnx_operator_test

from sdonnx.__main__ import main
from sdonnx.doctor.kernel_library import usable_library
from sdonnx.metrics import output_error, relative_error
from sdonnx.operators.kernel_case import TOLERANCE, Array, Fill, KernelCase, rounded
from sdonnx.operators.kernel_case_graphs import model_of
from sdonnx.operators.operator_table import OUR_CONTRACTS, OUR_KERNEL_CASES, contract_of_case
from sdonnx.operators.sdonnx_domain.matmul_8bit import EightBits
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import BufferPart, Graph, Run, SessionSettings

FIRST_USE = [case for case in OUR_KERNEL_CASES if case.name in OUR_CONTRACTS[case.op_type].first_use]
REFUSED = [
    case for op_type in OUR_CONTRACTS for case in sdonnx_operator_test(op_type).refused if case.op_type == op_type
]
SCALED_FILLS = {0: Fill.E4M3_BITS, 1: Fill.SCALES, 2: Fill.E4M3_BITS, 3: Fill.SCALES}
ROWS_TOLERANCE = 3e-3  # a sum in another order moves few numbers to their neighbors, an eighth or a quarter away
CAPTURED = [case for case in OUR_KERNEL_CASES if " 0 rows" not in case.name]


@pytest.fixture(scope="module")
def library() -> Path:
    found, reason = usable_library(device_for("cuda").capability())
    if found is None:
        pytest.skip(reason)
    return found.path


def inputs_of(case: KernelCase) -> list[Array | None]:
    return rounded(case.make_inputs(), "float16", sorted(contract_of_case(case).float32_inputs))


def kernel_results(case: KernelCase, inputs: Sequence[Array | None], library: Path) -> list[Array]:
    """Return the outputs of our kernel, without capture; nothing may fall back to the CPU."""
    model = model_of(case, "float16", inputs)
    device_for("cuda")
    options = quiet_options()
    options.register_custom_ops_library(str(library))
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model_bytes(model), options, providers=["CUDAExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        array = inputs[int(value.name[1:])]
        assert array is not None
        feeds[value.name] = array.astype(np.float16) if value.type == "tensor(float16)" else array
    results: list[Array] = session.run(None, feeds)
    return results


def check(found: Sequence[Array], case: KernelCase, inputs: Sequence[Array | None], title: str, note: Any) -> None:
    reference = lowered_results(case, inputs)
    assert [array.shape for array in found] == [array.shape for array in reference]
    pairs = [(a, b) for a, b in zip(found, reference, strict=True) if b.size]
    error = max((output_error(a, b) for a, b in pairs), default=0.0)
    tolerance = TOLERANCE["float16"]
    if reference[0].dtype == np.uint8:  # far below a row's scale, e5m2 has several numbers within the error of a sum
        values = EightBits(case.attributes.get("format", 0)).values()
        ours, theirs = (values[bits] * scales for bits, scales, *_ in (found, reference))
        error, tolerance = relative_error(ours, theirs), ROWS_TOLERANCE
        for ours, theirs in pairs[2:]:
            assert relative_error(ours.astype(np.float32), theirs) < TOLERANCE["float16"]
    note(title, {"operator": case.op_type, "case": case.name, "relative_error": error})
    assert error < tolerance, (str(case), error)


@pytest.mark.parametrize("case", OUR_KERNEL_CASES, ids=str)
def test_kernel_agrees_with_the_reference_body(case: KernelCase, library: Path, note: Any) -> None:
    inputs = inputs_of(case)
    check(kernel_results(case, inputs, library), case, inputs, "own kernels", note)


@pytest.mark.parametrize("case", FIRST_USE, ids=str)
def test_sanitized(case: KernelCase, library: Path) -> None:
    """One run of each form of each kernel, for compute-sanitizer: it slows a kernel down a hundred times."""
    assert all(np.isfinite(array).all() for array in kernel_results(case, inputs_of(case), library))


class Captured:
    """A case on the device, in the sessions of the run-time, captured as a CUDA graph."""

    def __init__(self, case: KernelCase, inputs: Sequence[Array | None], library: Path, folder: Path) -> None:
        if case.op_type == "UpsampleNearest" and len(inputs) > 1 and inputs[1] is not None:
            case = replace(case, weights=(1,))  # sizes are in the memory of the host, and buffers on the device
        model = model_of(case, "float16", inputs)
        ir.save(model, folder / "model.onnx")
        self.device = device_for("cuda")
        self.device.enter()
        self.graph = Graph(folder / "model.onnx", self.device, capture=True, settings=SessionSettings(library=library))
        shapes = {f"y{index}": array.shape for index, array in enumerate(lowered_results(case, inputs))}
        self.feeds = {name: self._typed(name, inputs) for name in self.graph.inputs}
        self.buffers = {name: self.device.upload(array) for name, array in self.feeds.items()}
        self.outputs = {name: self.device.empty(shapes[name], self.graph.dtype(name)) for name in self.graph.outputs}
        self.run: Run = self.graph.bind({**self.buffers, **self.outputs})
        self.run.prepare()
        self.run.capture()

    def _typed(self, name: str, inputs: Sequence[Array | None]) -> Array:
        array = inputs[int(name[1:])]
        assert array is not None
        return array.astype(self.graph.dtype(name))

    def replay(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Write inputs and poison outputs, replay, and return the outputs."""
        for name, array in feeds.items():
            self.buffers[name].update_inplace(np.ascontiguousarray(array))
        for name, value in self.outputs.items():
            dtype = np.dtype(self.graph.dtype(name))
            poison = {"f": np.nan, "u": 255}.get(dtype.kind, -1)
            value.update_inplace(np.full(value.shape(), poison, dtype))
        self.run()
        self.device.synchronize()
        return [value.numpy().copy() for value in self.outputs.values()]


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_captured_kernel_agrees_and_repeats_every_byte(
    case: KernelCase, library: Path, tmp_path: Path, note: Any
) -> None:
    inputs = inputs_of(case)
    captured = Captured(case, inputs, library, tmp_path)
    first = captured.replay(captured.feeds)
    check(first, case, inputs, "own kernels, captured", note)
    second = captured.replay(captured.feeds)
    assert [array.tobytes() for array in first] == [array.tobytes() for array in second]
    # A replay reads its inputs anew.
    changed = [None if array is None else array[..., ::-1].copy() if index == 0 else array
               for index, array in enumerate(inputs)]  # fmt: skip
    check(captured.replay({"x0": captured._typed("x0", changed)}), case, changed, "own kernels, replayed", note)


@pytest.mark.parametrize("has_bias", [False, True])
def test_unaligned_convolutions(has_bias: bool, library: Path, tmp_path: Path, note: Any) -> None:
    """Tensors may begin at any element, as parts of a caller's buffer do: the operator copies them for cuDNN."""
    shapes = ((2, 10, 14, 64), (64, 3, 3, 64), (64,) if has_bias else None)
    case = KernelCase("ChannelsLastConv", "unaligned", shapes, {"pad": 1}, fills={1: Fill.UNIT_GAIN}, domain="sdonnx")
    inputs = inputs_of(case)
    ir.save(model_of(case, "float16", inputs), tmp_path / "model.onnx")
    device = device_for("cuda")
    device.enter()
    graph = Graph(tmp_path / "model.onnx", device, settings=SessionSettings(library=library))
    present = [array for array in inputs if array is not None]
    arrays = {name: array.astype(np.float16) for name, array in zip(graph.inputs, present, strict=True)}
    arrays["y0"] = np.zeros((2, 10, 14, 64), np.float16)
    parts = {}
    for name, array in arrays.items():
        padded = np.concatenate([np.zeros(1, np.float16), array.reshape(-1)])
        parts[name] = BufferPart(device.upload(padded), array.shape, 1)
    graph.bind(parts)()
    device.synchronize()
    check([parts["y0"].copied()], case, inputs, "own kernels, unaligned", note)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_kernel_refuses_cases_that_the_contract_refuses(case: KernelCase, library: Path) -> None:
    with pytest.raises(Exception, match=case.op_type):
        kernel_results(case, case.make_inputs(), library)


@pytest.mark.parametrize("op_type", sorted(OUR_CONTRACTS.keys() - {"SamplerInput", "SamplerStep"}))
@pytest.mark.parametrize("batch", [1, 2, 3, 16, 32])
def test_batches(op_type: str, batch: int, library: Path, note: Any) -> None:
    """Sizes of Stable Diffusion 1.5 at 512x512, at its innermost blocks, with odd heights; attention as in PixArt."""
    shapes: dict[str, tuple[tuple[int, ...] | None, ...]] = {
        "LayerNorm": ((batch, 63, 1280), (1280,), (1280,)),
        "SkipLayerNorm": ((batch, 63, 1280), (batch, 63, 1280), *[(1280,)] * 4),
        "BiasSplitGelu": ((batch, 63, 10240), (10240,)),
        "GroupNorm": ((batch, 7, 9, 1280), (1280,), (1280,), (batch, 7, 9, 1280), (1280,)),
        "MatMul": ((batch, 63, 1280), (1280, 1280), (1280,), (batch, 63, 1280)),
        "StackedMatMul": ((batch, 63, 1280), (3, 1280, 1280)),
        "Attention": ((batch, 143, 1152), (batch, 143, 1152), (batch, 143, 1152)),
        "SelfAttention": ((3, batch, 143, 1024),),
        "ConcatChannels": ((batch, 7, 9, 1280), (batch, 7, 9, 640), (1280,)),
        "UpsampleNearest": ((batch, 7, 9, 1280),),
        "ChannelsLastConv": ((batch, 7, 9, 1280), (1280, 3, 3, 1280), (1280,)),
        "QuantizeRows": ((batch, 63, 1280),),
        "LayerNormRows": ((batch, 63, 1280), (1280,), (1280,)),
        "SplitGeluRows": ((batch, 63, 10240), (10240,)),
        "SumRows": ((batch, 63, 1280), (batch, 63, 1), (1280,), (1280,), (batch, 63, 1280), (1280,), (1280,)),
        "ScaledMatMul": ((batch, 63, 1280), (batch, 63, 1), (1280, 1280), (1280,), (1280,), (batch, 63, 1280)),
    }
    groups: dict[str, Any] = {"groups": 32, "activation": 1, "epsilon": 1e-5}
    heads = {"num_heads": 16}
    chosen = {"GroupNorm": groups, "Attention": heads, "SelfAttention": heads, "ChannelsLastConv": {"pad": 1}}
    attributes = chosen.get(op_type, {})
    outputs = 3 if op_type == "SumRows" else 2 if op_type in ("GroupNorm", "SkipLayerNorm") or "Rows" in op_type else 1
    filled = {
        "ScaledMatMul": SCALED_FILLS,
        "SumRows": {1: Fill.SCALES, 2: Fill.SCALES},
        "ChannelsLastConv": {1: Fill.UNIT_GAIN},
    }
    fills = filled.get(op_type, {})
    case = KernelCase(op_type, f"batch {batch}", shapes[op_type], attributes, outputs, fills=fills, domain="sdonnx")
    inputs = inputs_of(case)
    if op_type in ("MatMul", "StackedMatMul") and inputs[1] is not None:
        inputs[1] = (inputs[1] / 36).astype(np.float16).astype(np.float32)
    check(kernel_results(case, inputs, library), case, inputs, "own kernels, batches", note)


@pytest.mark.parametrize("op_type", ["ConcatChannels", "UpsampleNearest"])
def test_more_than_two_to_the_31_elements(op_type: str, library: Path) -> None:
    """A batch of 17 images of 1024x1024 in a decoder, with values that differ from row to row."""
    rows = np.arange(17 * 512, dtype=np.float16).reshape(17, 512, 1, 1)
    x = np.broadcast_to(rows, (17, 512, 512, 128)).copy()
    width = x.shape[-1]
    if op_type == "ConcatChannels":
        wide = np.broadcast_to(-rows, (17, 512, 512, 384)).copy()
        case = KernelCase(op_type, "large", (x.shape, wide.shape, (width,)), domain="sdonnx")
        (found,) = kernel_results(case, [x, wide, np.ones(width, np.float16)], library)
        assert found.size > 2**31
        assert (found[..., :width] == x[:, :, :1, :1] + np.float16(1)).all()
        assert (found[..., width:] == wide[:, :, :1, :1]).all()
    else:
        (found,) = kernel_results(KernelCase(op_type, "large", (x.shape,), domain="sdonnx"), [x], library)
        assert found.size > 2**31
        assert (found == np.repeat(x[:, :, :1, :1], 2, axis=1)).all()


def test_whole_check(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Any) -> None:
    """All cases of `sdonnx doctor` on this GPU; the record earns it a row in `sdonnx.doctor.kernel_library`."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sdonnx.cli.doctor.KERNEL_CASES_FILE", tmp_path / "none.json")  # only our own
    (tmp_path / "none.json").write_text('{"kernel_cases": [], "graphs": {}, "flags": {}}')
    status = main(["doctor", "--provider", "cuda", "--json", str(tmp_path / "report.json")])
    found = json.loads((tmp_path / "report.json").read_text())["own_kernels"]
    note("own kernels, whole check", {"own_kernels": found})
    assert (status, found["faults"]) == (0, [])
