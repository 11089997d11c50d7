"""The corners of what each contract accepts: extreme sizes, odd sizes, every layout and every optional input.

The tests hold them against torch and against the kernels; `sdonnx.doctor` holds the small ones against the kernels of
the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import onnx_ir as ir

from sdonnx.doctor.corner import Corner
from sdonnx.graph.contract import CONTRACTS, LARGEST_GROUP, SPLIT_GELU_WIDTHS

__all__ = ["CORNERS", "DTYPES", "dtypes_of", "norm_attributes"]

DTYPES = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16}


def dtypes_of(corner: Corner) -> list[str]:
    """Return the types that the operator's contract names."""
    return [name for name, dtype in DTYPES.items() if dtype in CONTRACTS[corner.op_type].dtypes]


def norm_attributes(groups: int, activation: int, epsilon: float) -> dict[str, Any]:
    """Return the attributes of GroupNorm and SkipGroupNorm."""
    return {"groups": groups, "epsilon": epsilon, "activation": activation, "channels_last": 1}


def _epsilon(channels: int, groups: int) -> float:
    # The variance of few close numbers is lost in their rounding: kernels take E[x^2] - E[x]^2.
    return 1e-3 if channels // groups < 8 else 1e-5


def _group_norms() -> Iterator[Corner]:
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
            yield Corner(
                "GroupNorm",
                f"C={channels} G={groups} {'x'.join(map(str, image))} activation={activation}",
                ((*image, channels), (channels,), (channels,)),
                norm_attributes(groups, activation, _epsilon(channels, groups)),
            )


def _skip_group_norms() -> Iterator[Corner]:
    corners = [(320, (3, 5, 7), *form) for form in product(("image", "row", "matrix"), (False, True), (1, 2), (0, 1))]
    corners += [(channels, (2, 9, 13), "image", True, 2, 1) for channels in (64, 512, 1280, 1920, 2560, 1024)]
    corners += [(640, image, "row", True, 2, 1) for image in ((1, 1, 1), (3, 1, 1), (3, 1, 7), (1, 64, 64))]
    for channels, image, form, biased, outputs, activation in corners:
        groups = 2 if channels == 1024 else 32
        skip = {"image": (*image, channels), "row": (image[0], 1, 1, channels), "matrix": (image[0], channels)}[form]
        vector = (channels,)
        yield Corner(
            "SkipGroupNorm",
            f"C={channels} G={groups} {'x'.join(map(str, image))} skip={form} bias={biased} outputs={outputs} "
            f"activation={activation}",
            ((*image, channels), vector, vector, skip, *([vector] if biased else [])),
            norm_attributes(groups, activation, _epsilon(channels, groups)),
            outputs,
        )


def _elementwise() -> Iterator[Corner]:
    """BiasSplitGelu and BiasAdd."""
    for width, (batch, length) in product(sorted(SPLIT_GELU_WIDTHS), ((1, 1), (3, 7), (2, 77))):
        yield Corner("BiasSplitGelu", f"D={width} {batch}x{length}", ((batch, length, width), (width,)))
    yield Corner("BiasSplitGelu", "D=2560 1x4096", ((1, 4096, 2560), (2560,)))
    sizes = [*product((1, 8, 63, 320, 321, 640, 1280, 2560), ((1, 1), (3, 7))), *product((320, 1001), ((1, 4096),))]
    for channels, (batch, length) in sizes:
        x = (batch, length, channels)
        yield Corner("BiasAdd", f"C={channels} {batch}x{length}", (x, (channels,), x))


def _layer_norms() -> Iterator[Corner]:
    widths = (8, 63, 64, 65, 320, 384, 640, 768, 1001, 1024, 1280, 2048, 5120, 12288)
    corners = [(width, (3, 7), True, True, 4) for width in widths]
    corners += [(320, (2, 77), *form) for form in product((False, True), (False, True), (1, 4))]
    corners += [(1280, rows, True, True, 4) for rows in ((1, 1), (3, 1), (1, 4096))]
    for width, rows, shifted, biased, outputs in corners:
        x, vector = (*rows, width), (width,)
        yield Corner(
            "SkipLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} beta={shifted} bias={biased} outputs={outputs}",
            (x, x, vector, vector if shifted else None, vector if biased else None),
            {"epsilon": 1e-5},
            outputs,
        )
    for width, outputs in product((320, 1152), (1, 4)):  # positions, the same for every image
        vectors = ((width,),) * 3
        name = f"D={width} 3x7 skip=1x7 beta=True bias=True outputs={outputs}"
        shapes = ((3, 7, width), (1, 7, width), *vectors)
        yield Corner("SkipLayerNormalization", name, shapes, {"epsilon": 1e-5}, outputs)


def _rms_norms() -> Iterator[Corner]:
    corners = [(width, (3, 7), True, 4) for width in (8, 63, 64, 65, 288, 768, 1024, 2048, 4096, 5120)]
    corners += [(4096, (2, 304), *form) for form in product((False, True), (1, 4))]
    corners += [(1152, rows, False, 4) for rows in ((1, 1), (1, 4096))]
    for width, rows, biased, outputs in corners:
        x, vector = (*rows, width), (width,)
        yield Corner(
            "SkipSimplifiedLayerNormalization",
            f"D={width} {rows[0]}x{rows[1]} bias={biased} outputs={outputs}",
            (x, x, vector, vector if biased else None),
            {"epsilon": 1e-6},
            outputs,
        )
    for outputs in (1, 4):
        name, vectors = f"D=768 3x7 skip=1x7 bias=True outputs={outputs}", ((768,),) * 2
        shapes = ((3, 7, 768), (1, 7, 768), *vectors)
        yield Corner("SkipSimplifiedLayerNormalization", name, shapes, {"epsilon": 1e-6}, outputs)


def _transformer_parts() -> Iterator[Corner]:
    """FastGelu and FusedMatMul."""
    for width, rows, biased in product((8, 62, 1152, 4608, 10240), ((1, 1), (3, 7), (2, 304)), (False, True)):
        yield Corner(
            "FastGelu", f"D={width} {rows[0]}x{rows[1]} bias={biased}", ((*rows, width), (width,) if biased else None)
        )
    for inner, outer, rows in product((64, 4096), (64, 1152), ((1, 1), (3, 7), (2, 304))):
        shapes = ((*rows, inner), (inner, outer))
        name = f"{rows[0]}x{rows[1]} {inner}x{outer}"
        yield Corner("FusedMatMul", name, shapes, {"alpha": 2.0**-6}, weights=(1,))


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


def _convolutions() -> Iterator[Corner]:
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
        yield Corner(
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
    lengths: bool = False,
    **attributes: Any,
) -> Corner:
    batch, queries, keys = sizes
    q, k = (batch, queries, heads * head_size), (batch, keys, heads * head_size)
    shapes: tuple[tuple[int, ...] | None, ...] = {
        "unpacked": (q, k, k),
        "packed_kv": (q, (batch, keys, heads, 2, head_size)),
        "packed_qkv": ((batch, queries, heads, 3, head_size),),
    }[layout]
    if mask is not None:
        shapes = (*shapes, None, None, (*mask, queries, keys))
    if lengths:
        shapes = (*shapes, None, (batch,))
    corner = f"{name} H={head_size} N={heads} {batch}x{queries}x{keys}"
    return Corner("MultiHeadAttention", corner, shapes, {"num_heads": heads} | attributes)


def _attentions() -> Iterator[Corner]:
    """Head size 160 is where another kernel of ONNX Runtime, flash attention, is silently wrong on sm_90.

    With as many queries as keys TensorRT's kernel, which GPUs below sm_90 have, takes numbers of keys for those of
    queries as well: the queries behind them see the padding alone.
    """
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
    for head_size in (40, 64, 72, 80, 160):
        for sizes in ((3, 64, 80), (3, 77, 120), (3, 5, 7), (2, 64, 304), (3, 77, 77)):
            yield _attention("lengths", head_size, sizes, lengths=True)
        yield _attention("lengths scale=0.2", head_size, (3, 77, 120), lengths=True, scale=0.2)
    yield _attention("lengths", 72, (1, 4096, 120), lengths=True)


CORNERS = [
    *_group_norms(),
    *_skip_group_norms(),
    *_elementwise(),
    *_layer_norms(),
    *_rms_norms(),
    *_transformer_parts(),
    *_convolutions(),
    *_attentions(),
]
