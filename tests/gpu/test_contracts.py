"""The contract table against the real kernels: every corner that a contract accepts, in every type that it names.

The reference is the operator's body (compared with torch in tests/test_contract.py, on these very cases),
run in float32 on the CPU on the values that the kernel got.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from graphs import graph

from sdonnx.families import ComponentSpec, Role
from sdonnx.fusions import fuse
from sdonnx.graph.contract import CONTRACTS, LARGEST_GROUP, SPLIT_GELU_WIDTHS
from sdonnx.graph.edit import MICROSOFT
from sdonnx.graph.lowering import LowerContribOperators
from sdonnx.graph.passes import tidy
from sdonnx.parity import relative_error
from sdonnx.precision import ConvertPrecision, PrecisionPolicy
from sdonnx.runtime.device import device_for
from sdonnx.runtime.session import Graph

Array = npt.NDArray[Any]

# A sum of products in float32, rounded once: 2^-11 in fp16, 2^-8 in bfloat16, and some for the order of sums.
TOLERANCE = {"float16": 2e-3, "float32": 2e-5, "bfloat16": 1.6e-2}
_NUMPY = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_IR = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16}

MASK = 5  # MultiHeadAttention's input attention_bias
_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Case:
    """One node of a contrib operator.

    Attributes:
        op_type: the operator.
        name: the corner.
        shapes: of its inputs; None for an absent one.
        attributes: its attributes.
        outputs: how many it has; SkipLayerNormalization's second and third are left out.
        weights: the inputs that are initializers.
    """

    op_type: str
    name: str
    shapes: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op_type}-{self.name}".replace(" ", "_")

    @property
    def dtypes(self) -> list[str]:
        return [name for name, dtype in _IR.items() if dtype in CONTRACTS[self.op_type].dtypes]

    def draw(self) -> list[Array | None]:
        """Normal values, the same for a case wherever it stands; weights of convolutions keep the variance."""
        generator = np.random.default_rng(zlib.crc32(str(self).encode()))
        arrays: list[Array | None] = []
        for index, shape in enumerate(self.shapes):
            array = None if shape is None else generator.standard_normal(shape, np.float32)
            if array is not None and self.op_type == "NhwcConv" and index == 1:
                array /= np.float32(np.sqrt(array[0].size))
            if array is not None and self.op_type == "MultiHeadAttention" and index == MASK:
                array[generator.random(array.shape) < 0.1] = -10000
                array[..., 0] = 0  # no row is masked as a whole
            arrays.append(array)
        return arrays


# --- the corners ------------------------------------------------------------------------------------------------------


def _norm_attributes(groups: int, activation: int, epsilon: float) -> dict[str, Any]:
    return {"groups": groups, "epsilon": epsilon, "activation": activation, "channels_last": 1}


def _epsilon(channels: int, groups: int) -> float:
    # The variance of few close numbers is lost in their rounding: kernels take E[x^2] - E[x]^2.
    return 1e-3 if channels // groups < 8 else 1e-5


def group_norms() -> Iterator[Case]:
    # Channels a group: 2, 4, 6, 10 ... 80 of 32 groups; and what fills, or all but fills, half a block or a block.
    sizes = [(channels, 32) for channels in (64, 128, 192, 256, 320, 512, 640, 960, 1280, 1920, 2048, 2560)]
    sizes += [(2, 1), (8, 4), (320, 16), (508, 2), (512, 2), (516, 2), (2 * LARGEST_GROUP, 2), (LARGEST_GROUP, 1)]
    images = {
        (1280, 32): [(1, 1, 1), (3, 1, 1), (3, 1, 7), (1, 7, 1), (1, 77, 1), (3, 33, 31)],
        (320, 32): [(1, 64, 64)],
    }
    images[64, 32] = [(1, 1, 1), (3, 1, 7), (1, 1, 4096)]
    for (channels, groups), activation in product(sizes, (0, 1)):
        for image in [(2, 9, 13), *(images.get((channels, groups), []) if activation else [])]:
            yield Case(
                "GroupNorm",
                f"C={channels} G={groups} {'x'.join(map(str, image))} activation={activation}",
                ((*image, channels), (channels,), (channels,)),
                _norm_attributes(groups, activation, _epsilon(channels, groups)),
            )


def skip_group_norms() -> Iterator[Case]:
    corners = [(320, (3, 5, 7), *form) for form in product(("image", "row", "matrix"), (False, True), (1, 2), (0, 1))]
    corners += [(channels, (2, 9, 13), "image", True, 2, 1) for channels in (64, 512, 1280, 1920, 2560, 1024)]
    corners += [(640, image, "row", True, 2, 1) for image in ((1, 1, 1), (3, 1, 1), (3, 1, 7), (1, 64, 64))]
    for channels, image, form, biased, outputs, activation in corners:
        groups = 2 if channels == 1024 else 32
        skip = {"image": (*image, channels), "row": (image[0], 1, 1, channels), "matrix": (image[0], channels)}[form]
        vector = (channels,)
        yield Case(
            "SkipGroupNorm",
            f"C={channels} G={groups} {'x'.join(map(str, image))} skip={form} bias={biased} outputs={outputs} "
            f"activation={activation}",
            ((*image, channels), vector, vector, skip, *([vector] if biased else [])),
            _norm_attributes(groups, activation, _epsilon(channels, groups)),
            outputs,
        )


def elementwise() -> Iterator[Case]:
    """BiasSplitGelu and BiasAdd."""
    for width, (batch, length) in product(sorted(SPLIT_GELU_WIDTHS), ((1, 1), (3, 7), (2, 77))):
        yield Case("BiasSplitGelu", f"D={width} {batch}x{length}", ((batch, length, width), (width,)))
    yield Case("BiasSplitGelu", "D=2560 1x4096", ((1, 4096, 2560), (2560,)))
    sizes = [*product((1, 8, 63, 320, 321, 640, 1280, 2560), ((1, 1), (3, 7))), *product((320, 1001), ((1, 4096),))]
    for channels, (batch, length) in sizes:
        x = (batch, length, channels)
        yield Case("BiasAdd", f"C={channels} {batch}x{length}", (x, (channels,), x))


def layer_norms() -> Iterator[Case]:
    widths = (8, 63, 64, 65, 320, 384, 640, 768, 1001, 1024, 1280, 2048, 5120, 12288)
    corners = [(width, (3, 7), True, True, 4) for width in widths]
    corners += [(320, (2, 77), *form) for form in product((False, True), (False, True), (1, 4))]
    corners += [(1280, rows, True, True, 4) for rows in ((1, 1), (3, 1), (1, 4096))]
    for width, rows, shifted, biased, outputs in corners:
        x, vector = (*rows, width), (width,)
        yield Case(
            "SkipLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} beta={shifted} bias={biased} outputs={outputs}",
            (x, x, vector, vector if shifted else None, vector if biased else None),
            {"epsilon": 1e-5},
            outputs,
        )


def rms_norms() -> Iterator[Case]:
    corners = [(width, (3, 7), True, 4) for width in (8, 63, 64, 65, 288, 768, 1024, 2048, 4096, 5120)]
    corners += [(4096, (2, 304), *form) for form in product((False, True), (1, 4))]
    corners += [(1152, rows, False, 4) for rows in ((1, 1), (1, 4096))]
    for width, rows, biased, outputs in corners:
        x, vector = (*rows, width), (width,)
        yield Case(
            "SkipSimplifiedLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} bias={biased} outputs={outputs}",
            (x, x, vector, vector if biased else None),
            {"epsilon": 1e-6},
            outputs,
        )


def transformer_parts() -> Iterator[Case]:
    """FastGelu and FusedMatMul."""
    for width, rows, biased in product((8, 62, 1152, 4608, 10240), ((1, 1), (3, 7), (2, 304)), (False, True)):
        yield Case(
            "FastGelu", f"D={width} {rows[0]}x{rows[1]} bias={biased}", ((*rows, width), (width,) if biased else None)
        )
    for inner, outer, rows in product((64, 4096), (64, 1152), ((1, 1), (3, 7), (2, 304))):
        shapes = ((*rows, inner), (inner, outer))
        name = f"{rows[0]}x{rows[1]} {inner}x{outer}"
        yield Case("FusedMatMul", name, shapes, {"alpha": 2.0**-6}, weights=(1,))


_CONVOLUTIONS = {  # channels in and out, kernel, strides, pads, dilations, groups
    "first": (4, 320, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "last": (320, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "wide": (640, 640, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "halving": (320, 320, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "halving unpadded": (128, 128, (3, 3), (2, 2), (0, 0), (1, 1), 1),
    "1x1": (8, 8, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 strided": (32, 64, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "5x5": (32, 64, (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "1x3": (32, 64, (1, 3), (1, 1), (0, 1), (1, 1), 1),
    "stride of 3": (32, 64, (3, 3), (3, 3), (1, 1), (1, 1), 1),
    "oblong stride": (32, 64, (3, 3), (1, 2), (1, 1), (1, 1), 1),
    "dilated": (32, 64, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    "grouped": (32, 64, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise": (32, 32, (3, 3), (1, 1), (1, 1), (1, 1), 32),
    "odd channels": (3, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
}


def convolutions() -> Iterator[Case]:
    corners = list(product(_CONVOLUTIONS, ((2, 10, 14),), (False, True)))
    corners += [*product(("5x5", "halving"), ((1, 7, 7), (3, 1, 9), (1, 1, 1)), (True,)), ("first", (1, 64, 64), True)]
    for name, image, biased in corners:
        channels, out, kernel, strides, pads, dilations, group = _CONVOLUTIONS[name]
        attributes = {
            "kernel_shape": list(kernel),
            "strides": list(strides),
            "pads": [*pads, *pads],
            "dilations": list(dilations),
            "group": group,
        }
        yield Case(
            "NhwcConv",
            f"{name} {'x'.join(map(str, image))} bias={biased}",
            ((*image, channels), (out, *kernel, channels // group), *([(out,)] if biased else [])),
            attributes,
            weights=(1, 2),
        )


def _attention(
    name: str,
    head_size: int,
    sizes: tuple[int, int, int],
    heads: int = 2,
    mask: tuple[int, int] | None = None,
    layout: str = "unpacked",
    **attributes: Any,
) -> Case:
    batch, queries, keys = sizes
    q, k = (batch, queries, heads * head_size), (batch, keys, heads * head_size)
    shapes: tuple[tuple[int, ...] | None, ...] = {
        "unpacked": (q, k, k),
        "packed_kv": (q, (batch, keys, heads, 2, head_size)),
        "packed_qkv": ((batch, queries, heads, 3, head_size),),
    }[layout]
    if mask is not None:
        shapes = (*shapes, None, None, (*mask, queries, keys))
    corner = f"{name} H={head_size} N={heads} {batch}x{queries}x{keys}"
    return Case("MultiHeadAttention", corner, shapes, {"num_heads": heads} | attributes)


def attentions() -> Iterator[Case]:
    """Head size 160 is where another kernel of ONNX Runtime, flash attention, is silently wrong on sm_90."""
    lengths = [(1, 1, 1), (3, 1, 77), (3, 7, 5), (1, 77, 77), (2, 64, 80), (1, 256, 256)]
    for head_size, sizes in product((8, 40, 64, 72, 80, 128, 160, 256, 512), lengths):
        yield _attention("plain", head_size, sizes, 1 if head_size == 512 else 2)
    for head_size in (40, 160):
        yield _attention("plain", head_size, (1, 4096, 77))
    yield _attention("plain", 40, (1, 4096, 4096), 1)
    for head_size, length in product((40, 64, 160, 512), (1, 7, 77, 1024)):
        yield _attention("causal", head_size, (2, length, length), 1 if head_size == 512 else 4, unidirectional=1)
    for head_size, scale in product((40, 160), (0.05, 1.0)):
        yield _attention(f"scale={scale}", head_size, (2, 77, 80), scale=scale)
    masks = product((40, 64, 160), ((77, 77), (64, 80), (5, 7)), ((1, 1), (3, 1), (1, 4), (3, 4)))
    for head_size, (queries, keys), mask in masks:
        yield _attention(f"mask={mask[0]}x{mask[1]}", head_size, (3, queries, keys), 4, mask)
    yield _attention("mask=1x1 causal scale", 64, (2, 77, 77), 4, (1, 1), unidirectional=1, scale=0.2)
    for head_size, layout in product((40, 64, 160), ("packed_kv", "packed_qkv")):
        yield _attention(layout, head_size, (2, 80, 80), 4, layout=layout)
        yield _attention(f"{layout} scale", head_size, (3, 7, 7), 2, layout=layout, scale=0.3)
    yield _attention("packed_kv", 64, (2, 80, 77), 4, layout="packed_kv")
    yield _attention("packed_qkv causal", 64, (2, 77, 77), 4, layout="packed_qkv", unidirectional=1)


CASES = [
    *group_norms(),
    *skip_group_norms(),
    *elementwise(),
    *layer_norms(),
    *rms_norms(),
    *transformer_parts(),
    *convolutions(),
    *attentions(),
]


# --- a case as a graph ------------------------------------------------------------------------------------------------


def model_of(
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any],
    outputs: int,
    weights: Sequence[int],
    dtype: str,
) -> ir.Model:
    """Return a graph of one contrib operator; the inputs at `weights` become initializers.

    Python has no way to pass bfloat16 to ONNX Runtime: for it, inputs and outputs are float32, cast inside.
    """
    contract, inner = CONTRACTS[op_type], _IR[dtype]
    outer = ir.DataType.FLOAT if dtype == "bfloat16" else inner
    nodes, inputs_of_graph, initializers, given = [], [], [], []
    for index, array in enumerate(inputs):
        if array is None:
            given.append(None)
            continue
        kind = ir.DataType.FLOAT if index in contract.float32_inputs else outer
        value = ir.Value(name=f"x{index}", type=ir.TensorType(kind), shape=ir.Shape(array.shape))
        if index in weights:
            value.const_value = ir.Tensor(array.astype(kind.numpy()), name=f"x{index}")
            initializers.append(value)
        else:
            inputs_of_graph.append(value)
        given.append(value)
        if inner != outer and index not in contract.float32_inputs:
            nodes.append(_cast(value, inner))
            given[-1] = nodes[-1].outputs[0]
    node = ir.node(op_type, given, dict(attributes), domain=MICROSOFT, num_outputs=outputs)
    nodes.append(node)
    results = []
    rank = 3 if op_type == "MultiHeadAttention" else next(len(array.shape) for array in inputs if array is not None)
    for index, output in enumerate(node.outputs):
        # Outputs 1 and 2 of the norms, mean and deviation, are not asked for.
        if op_type in _NORMS and index in (1, 2):
            output.name, output.type = "", None
            continue
        output.name, output.type, output.shape = f"y{index}", ir.TensorType(inner), ir.Shape([None] * rank)
        if inner != outer:
            nodes.append(_cast(output, outer))
        results.append(nodes[-1].outputs[0] if inner != outer else output)
    imports = {"": 23, MICROSOFT: 1}
    made = ir.Graph(inputs_of_graph, results, nodes=nodes, initializers=initializers, opset_imports=imports, name="one")
    return ir.Model(made, ir_version=10)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": dtype})
    output = node.outputs[0]
    output.name, output.type, output.shape = f"{value.name}_cast", ir.TensorType(dtype), value.shape
    return node


def rounded(op_type: str, inputs: Sequence[Array | None], dtype: str) -> list[Array | None]:
    """Return the inputs with the values that the kernel gets, as float32."""
    always_wide = CONTRACTS[op_type].float32_inputs
    return [
        array if array is None or index in always_wide else array.astype(_NUMPY[dtype]).astype(np.float32)
        for index, array in enumerate(inputs)
    ]


def feeds_of(model: ir.Model, inputs: Sequence[Array | None]) -> dict[str, Array]:
    feeds = {}
    for value in model.graph.inputs:
        assert value.name is not None
        assert value.dtype is not None
        array = inputs[int(value.name[1:])]
        assert array is not None
        feeds[value.name] = array.astype(value.dtype.numpy())
    return feeds


def lowered_results(case: Case, inputs: Sequence[Array | None]) -> list[Array]:
    """Return what the reference body gives in float32, on the CPU."""
    body = model_of(case.op_type, inputs, case.attributes, case.outputs, case.weights, "float32")
    LowerContribOperators()(body)
    options = _options()
    # As the body stands: ONNX Runtime 1.31 crashes as it fuses an Add into a LayerNormalization without B.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(_bytes(body), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, feeds_of(body, inputs))
    return results


def kernel_results(case: Case, inputs: Sequence[Array | None], dtype: str) -> list[Array]:
    """Return what the CUDA provider's kernel gives; nothing may fall to the CPU."""
    model = model_of(case.op_type, inputs, case.attributes, case.outputs, case.weights, dtype)
    device_for("cuda")
    options = _options()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = ("CUDAExecutionProvider", {"use_tf32": "0"})
    session = onnxruntime.InferenceSession(_bytes(model), options, providers=[provider])
    results: list[Array] = session.run(None, feeds_of(model, inputs))
    return results


def _bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def compare(case: Case, arrays: Sequence[Array | None], dtype: str, note: Any) -> None:
    """Run the kernel in a type and compare it with the body on the same values."""
    inputs = rounded(case.op_type, arrays, dtype)
    found, reference = kernel_results(case, inputs, dtype), lowered_results(case, inputs)
    errors = [relative_error(a, b) for a, b in zip(found, reference, strict=True)]
    row = {"operator": case.op_type, "case": case.name, "dtype": dtype, "relative_error": max(errors)}
    note("contracts", row)
    assert max(errors) < TOLERANCE[dtype], (str(case), dtype, errors)


def check(
    _folder: Path,
    note: Any,
    case: str,
    op_type: str,
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any] = _NOTHING,
    outputs: int = 1,
    weights: Sequence[int] = (),
) -> None:
    """Compare a corner given by its values, in every type of its contract."""
    shapes = tuple(None if array is None else array.shape for array in inputs)
    corner = Case(op_type, case, shapes, attributes, outputs, tuple(weights))
    for dtype in corner.dtypes:
        compare(corner, inputs, dtype, note)


# --- on the GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in CASES for dtype in case.dtypes]
)
def test_kernel_agrees_with_the_body(case: Case, dtype: str, note: Any) -> None:
    compare(case, case.draw(), dtype, note)


REFUSED = [
    Case("GroupNorm", "96 in 32 groups", ((1, 8, 8, 96), (96,), (96,)), _norm_attributes(32, 0, 1e-5)),
    Case("GroupNorm", "514 a group", ((1, 8, 8, 1028), (1028,), (1028,)), _norm_attributes(2, 0, 1e-5)),
    Case("BiasSplitGelu", "2048", ((1, 8, 2048), (2048,))),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_kernel_refuses_what_the_contract_refuses(case: Case) -> None:
    with pytest.raises(Exception, match=case.op_type):
        kernel_results(case, case.draw(), "float16")


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
    draw = np.random.default_rng(head_size)
    lengths = {"q": queries, "k": keys, "v": keys}
    return {x: draw.standard_normal((2, length, heads * head_size), np.float32) for x, length in lengths.items()}


# Sizes of heads and of images of Stable Diffusion 1.5's innermost blocks: 160 is where ONNX Runtime's
# kernel for ONNX's own operator is silently wrong in fp16 on sm_90 (flash attention; relative error 1.3).
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (256, 256), (256, 77)])
@pytest.mark.parametrize("disabled", [(), ("attention",)], ids=["fused", "unfused"])
def test_attention_of_head_size_160_is_right_as_it_is_run(
    disabled: tuple[str, ...], queries: int, keys: int, dtype: str, tmp_path: Path, note: Any
) -> None:
    """With the runtime's own session and options."""
    model = attention_graph(160, 8, dtype)
    fuse(model, "cuda", disabled=disabled)
    ir.save(model, tmp_path / "model.onnx")
    feeds = {name: values.astype(_NUMPY[dtype]) for name, values in attention_feeds(160, 8, queries, keys).items()}
    session = Graph(tmp_path / "model.onnx", device_for("cuda")).session
    found = session.run(None, feeds)[0]
    plain = _bytes(attention_graph(160, 8, "float32"))
    reference = onnxruntime.InferenceSession(plain, _options(), providers=["CPUExecutionProvider"])
    wide = {name: values.astype(np.float32) for name, values in feeds.items()}
    error = relative_error(found.astype(np.float32), reference.run(None, wide)[0])
    row = {"dtype": dtype, "queries": queries, "keys": keys, "disabled": list(disabled), "relative_error": error}
    note("head size 160", row)
    assert error < TOLERANCE[dtype]


FALLING_BACK = ("MatMul", "MultiHeadAttention", "SkipLayerNormalization", "GroupNorm")


def block_in_bfloat16() -> tuple[ir.Model, ir.Model]:
    """A transformer block in float32, and in fp16 with bfloat16 for what can overflow, where kernels exist."""
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((64, 64), np.float32) / 8 for name in ("wq", "wk", "wv", "wo")}
    vectors = {name: draw.standard_normal(64, np.float32) for name in ("g", "b")}
    norm = "com.microsoft.GroupNorm<groups=32, epsilon=0.001, channels_last=1, activation=0>"
    model = graph(
        "float[B,H,W,64] image",
        "float[B,S,64] y",
        f"""n = {norm}(image, g, b) x = Reshape(n, flat)
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
        a = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) o = MatMul(a, wo)
        l, , , s = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(o, x, g, b) t = Tanh(l) y = Add(t, s)""",
        known="float[B,H,W,64] n, float[B,S,64] a, float[B,S,64] l, float[B,S,64] s",
        flat=np.array([0, -1, 64], np.int64),
        **weights,
        **vectors,
    )
    narrow = ir.from_proto(ir.to_proto(model))
    spec = ComponentSpec("unet", "unet", Role.DENOISER, (), ())
    ConvertPrecision(PrecisionPolicy(float32=FALLING_BACK, fallback=ir.DataType.BFLOAT16), spec)(narrow)
    tidy(narrow)
    return model, narrow


def test_bfloat16_in_place_of_float32_runs(tmp_path: Path, note: Any) -> None:
    model, narrow = block_in_bfloat16()
    ir.save(narrow, tmp_path / "model.onnx")
    image = np.random.default_rng(1).standard_normal((2, 6, 10, 64)).astype(np.float16)
    found = Graph(tmp_path / "model.onnx", device_for("cuda")).session.run(None, {"image": image})[0]
    LowerContribOperators()(model)
    reference = onnxruntime.InferenceSession(_bytes(model), _options(), providers=["CPUExecutionProvider"])
    error = relative_error(found.astype(np.float32), reference.run(None, {"image": image.astype(np.float32)})[0])
    note("bfloat16 fallback", {"relative_error": error})
    assert error < TOLERANCE["bfloat16"]
