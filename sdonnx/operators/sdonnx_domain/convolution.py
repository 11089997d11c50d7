"""sdonnx::ChannelsLastConv(x (B,H,W,C), w (M,kH,kW,C), bias (M,)) -> (B,H',W',M): a convolution with channels last.

The attribute `stride` is the stride of both axes, and all four sides are padded by `pad` zeros. There are no groups and
no dilations. The bias is optional. The kernel is cuDNN's, by kernels/src/channels_last_conv.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from sdonnx.graph.edit import dims, input_of, optional_input, static_dim
from sdonnx.operators.contract import SdonnxContract, channels_last_conv, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = ["CHANNELS_LAST_CONV", "check_channels_last_conv"]


def check_channels_last_conv(x: ir.Value, weight: ir.Value, bias: ir.Value | None) -> str | None:
    """Return why the kernel does not accept x (B,H,W,C), a weight (M,kH,kW,C) and a bias (M,), None if it does."""
    if any(len(dims(value) or ()) != 4 for value in (x, weight)):
        return "the image and the weights are not known to have four axes"
    channels = static_dim(x, 3)
    if channels is None or channels != static_dim(weight, 3):
        return "the channels of the image are not known to be those of the weights"
    if any(static_dim(weight, axis) is None for axis in range(3)):
        return "the sizes of the weights are not known"
    if bias is not None and (len(dims(bias) or ()) != 1 or static_dim(bias, 0) != static_dim(weight, 0)):
        return "the bias is not a vector with a number for each channel"
    return CHANNELS_LAST_CONV.check_dtypes(x, weight, bias)


def _limits(node: ir.Node) -> str | None:
    if node.attributes.get_int("stride", 1) < 1 or node.attributes.get_int("pad", 0) < 0:
        return "the stride is less than 1, or the pad less than 0"
    return check_channels_last_conv(input_of(node, 0), input_of(node, 1), optional_input(node, 2))


def _lower(node: ir.Node) -> list[ir.Value | None]:
    stride, pad = node.attributes.get_int("stride", 1), node.attributes.get_int("pad", 0)
    return [channels_last_conv(node, {"strides": [stride] * 2, "pads": [pad] * 4})]


def _kernel_cases() -> Iterator[KernelCase]:
    """The layers of the networks, and sizes at the edges: one pixel, one row, odd channels and large kernels."""
    image = (2, 10, 14)
    layers = ((4, 320, 3, 1, 1), (320, 4, 3, 1, 1), (640, 640, 3, 1, 1), (320, 320, 3, 2, 1), (128, 128, 3, 2, 0))
    cases = [*product(layers, (image,), (False, True))]
    cases += [((8, 8, 1, 1, 0), image, True), ((32, 64, 1, 2, 0), image, True), ((32, 64, 5, 1, 2), image, True)]
    cases += [((32, 64, 3, 3, 1), image, True), ((32, 64, 2, 2, 0), image, False), ((3, 5, 3, 1, 1), image, True)]
    cases += [((32, 64, 3, 2, 1), sizes, True) for sizes in ((1, 7, 7), (3, 1, 9), (1, 1, 1))]
    cases += [((4, 320, 3, 1, 1), (1, 64, 64), True), ((64, 64, 3, 1, 1), (0, 4, 4), True)]
    for (channels, out, kernel, stride, pad), sizes, has_bias in cases:
        form = f"{channels}->{out} {kernel}x{kernel} stride={stride} pad={pad}"
        yield sdonnx_case(
            "ChannelsLastConv",
            f"{form} {'x'.join(map(str, sizes))} bias={has_bias}" + (" 0 rows" if 0 in sizes else ""),
            ((*sizes, channels), (out, kernel, kernel, channels), (out,) if has_bias else None),
            {"stride": stride, "pad": pad},
            fills={1: Fill.UNIT_GAIN},
        )


CHANNELS_LAST_CONV = SdonnxContract(
    "ChannelsLastConv",
    _lower,
    _kernel_cases,
    first_use=(
        "320->320 3x3 stride=2 pad=1 2x10x14 bias=True",
        "320->320 3x3 stride=2 pad=1 2x10x14 bias=False",
        "4->320 3x3 stride=1 pad=1 2x10x14 bias=True",
        "320->4 3x3 stride=1 pad=1 2x10x14 bias=True",
    ),
    limits=_limits,
    row_inputs=frozenset({0}),
    expensive=True,
)
