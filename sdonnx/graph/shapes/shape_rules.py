"""Shape rules of the operators that compute with sizes; ONNX infers the shapes of the others.

A rule writes the shapes of a node's outputs into a `SizeTable` and returns False where they are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.graph.shapes.element_rules import MAX_ELEMENTS
from sdonnx.graph.shapes.expressions import is_nonnegative
from sdonnx.graph.shapes.size_table import SizeTable

__all__ = ["SHAPE_RULES"]


def _shape(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 0)
    if shape is None:
        return False
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape))
    chosen = np.array([*shape[start:end], None], object)[:-1]  # an array of objects even when it is empty
    sizes.contents[node.outputs[0]] = chosen
    sizes.shapes[node.outputs[0]] = (sympy.Integer(len(chosen)),)
    return True


def _size(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 0)
    if shape is not None:
        sizes.contents[node.outputs[0]] = np.array(math.prod(shape, start=sympy.Integer(1)), object)
    sizes.shapes[node.outputs[0]] = ()
    return True


def _transpose(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 0)
    if shape is None:
        return False
    perm = node.attributes.get_ints("perm", tuple(reversed(range(len(shape)))))
    sizes.shapes[node.outputs[0]] = tuple(shape[axis] for axis in perm)
    return True


def _reshape(sizes: SizeTable, node: ir.Node) -> bool:
    source, target = sizes.shape_of(node, 0), sizes.content_of(node, 1)
    if target is None:
        return False
    result = list(target)
    if not node.attributes.get_int("allowzero", 0) and any(size == 0 for size in result):
        if source is None:
            return False
        result = [source[axis] if size == 0 else size for axis, size in enumerate(result)]
    if any(size == -1 for size in result):
        if source is None:
            return False
        rest = math.prod((size for size in result if size != -1), start=sympy.Integer(1))
        total = math.prod(source, start=sympy.Integer(1))
        quotient = sympy.expand(total) / sympy.expand(rest) if rest != 0 else None
        if quotient is None:
            return False
        whole = _whole(total / rest) if _whole(quotient) is None else _whole(quotient)
        result = [(sizes.fresh() if whole is None else whole) if size == -1 else size for size in result]
    sizes.shapes[node.outputs[0]] = tuple(result)
    return True


def _whole(quotient: sympy.Expr) -> sympy.Expr | None:
    """Return the quotient where it is an integer for all sizes, None where that is unknown."""
    quotient = sympy.cancel(quotient) if quotient.as_numer_denom()[1] != 1 else quotient
    return quotient if quotient.as_numer_denom()[1] == 1 else None


def _expand(sizes: SizeTable, node: ir.Node) -> bool:
    source, target = sizes.shape_of(node, 0), sizes.content_of(node, 1)
    if source is None or target is None:
        return False
    sizes.shapes[node.outputs[0]] = sizes.joined([source, tuple(target)])
    return True


def _tile(sizes: SizeTable, node: ir.Node) -> bool:
    shape, repeats = sizes.shape_of(node, 0), sizes.content_of(node, 1)
    if shape is None or repeats is None or len(repeats) != len(shape):
        return False
    sizes.shapes[node.outputs[0]] = tuple(size * repeat for size, repeat in zip(shape, repeats, strict=True))
    return True


def _filled(sizes: SizeTable, node: ir.Node) -> bool:
    target = sizes.content_of(node, 0)
    if target is None:
        return False
    sizes.shapes[node.outputs[0]] = tuple(target)
    value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    if len(target) <= 1 and all(size.is_Integer and size <= MAX_ELEMENTS for size in target):
        sizes.set_numbers(node.outputs[0], np.full([int(size) for size in target], value.item()))
    return True


def _concat(sizes: SizeTable, node: ir.Node) -> bool:
    shapes = [sizes.shape_of(node, index) for index in range(len(node.inputs))]
    known = [shape for shape in shapes if shape is not None]
    if len(known) != len(shapes):
        return False
    axis = node.attributes.get_int("axis") % len(known[0])
    sizes.shapes[node.outputs[0]] = tuple(
        sum((shape[index] for shape in known), start=sympy.Integer(0)) if index == axis else sizes.same(column)
        for index, column in enumerate(zip(*known, strict=True))
    )
    return True


def _split(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 0)
    if shape is None:
        return False
    axis, count = node.attributes.get_int("axis", 0) % len(shape), len(node.outputs)
    lengths: Sequence[sympy.Expr] | None = None
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        content = sizes.content_of(node, 1)
        lengths = None if content is None else list(content)
    elif (part := _whole(shape[axis] / count)) is not None:
        lengths = [part] * count
    for index, output in enumerate(node.outputs):
        length = sizes.fresh() if lengths is None else lengths[index]
        sizes.shapes[output] = (*shape[:axis], length, *shape[axis + 1 :])
    return True


def _slice(sizes: SizeTable, node: ir.Node) -> bool:
    shape, starts, ends = sizes.shape_of(node, 0), sizes.content_of(node, 1), sizes.content_of(node, 2)
    if shape is None or starts is None or ends is None:
        return False
    has_axes, has_steps = (len(node.inputs) > index and node.inputs[index] is not None for index in (3, 4))
    axes = sizes.integers_of(node, 3) if has_axes else list(range(len(starts)))
    steps = sizes.integers_of(node, 4) if has_steps else [1] * len(starts)
    if axes is None or steps is None:
        return False
    result = list(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        length = _sliced(shape[axis], start, end, step)
        result[axis] = sizes.fresh() if length is None else length
    sizes.shapes[node.outputs[0]] = tuple(result)
    return True


def _sliced(size: sympy.Expr, start: sympy.Expr, end: sympy.Expr, step: int) -> sympy.Expr | None:
    """Return the length of size[start:end:step]."""
    if size.is_Integer and start.is_Integer and end.is_Integer:
        return sympy.Integer(len(range(int(size))[int(start) : int(end) : step]))
    if step != 1 or not start.is_Integer:
        return None
    first = start if start >= 0 else size + start
    if not is_nonnegative(first):
        return None  # it starts at 0 where the size is smaller
    if end.is_Integer and end >= 2**31 - 1:
        last = size
    elif end.is_Integer and end < 0:
        last = size + end
    elif end.is_positive:
        last = end if sympy.expand(size - end).is_nonnegative else sympy.Min(size, end)
    else:
        return None
    length = sympy.expand(last - first)
    return length if length.is_positive else None


def _unsqueeze(sizes: SizeTable, node: ir.Node) -> bool:
    shape, axes = sizes.shape_of(node, 0), sizes.integers_of(node, 1)
    if shape is None or axes is None:
        return False
    rank = len(shape) + len(axes)
    ones = {axis % rank for axis in axes}
    rest = iter(shape)
    sizes.shapes[node.outputs[0]] = tuple(sympy.Integer(1) if axis in ones else next(rest) for axis in range(rank))
    return True


def _gather(sizes: SizeTable, node: ir.Node) -> bool:
    shape, indices = sizes.shape_of(node, 0), sizes.shape_of(node, 1)
    if shape is None or indices is None:
        return False
    axis = node.attributes.get_int("axis", 0) % len(shape)
    sizes.shapes[node.outputs[0]] = (*shape[:axis], *indices, *shape[axis + 1 :])
    return True


def _gather_elements(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 1)
    if shape is None:
        return False
    sizes.shapes[node.outputs[0]] = shape
    return True


def _top_k(sizes: SizeTable, node: ir.Node) -> bool:
    shape, count = sizes.shape_of(node, 0), sizes.content_of(node, 1)
    if shape is None or count is None:
        return False
    axis = node.attributes.get_int("axis", -1) % len(shape)
    for output in node.outputs:
        sizes.shapes[output] = (*shape[:axis], count.flat[0], *shape[axis + 1 :])
    return True


def _matmul(sizes: SizeTable, node: ir.Node) -> bool:
    a, b = sizes.shape_of(node, 0), sizes.shape_of(node, 1)
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return False
    sizes.shapes[node.outputs[0]] = (*sizes.joined([a[:-2], b[:-2]]), a[-2], b[-1])
    return True


def _conv(sizes: SizeTable, node: ir.Node) -> bool:
    """floor((size + pads - dilation (kernel - 1) - 1) / stride) + 1, the output size of ONNX's Conv."""
    x, weight = sizes.shape_of(node, 0), sizes.shape_of(node, 1)
    if x is None or weight is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return False
    rank = len(x) - 2
    pads = node.attributes.get_ints("pads", (0,) * (2 * rank))
    strides = node.attributes.get_ints("strides", (1,) * rank)
    dilations = node.attributes.get_ints("dilations", (1,) * rank)
    spatial = [
        sympy.floor(
            (
                x[2 + axis]
                + pads[axis]
                + pads[rank + axis]
                - dilations[axis] * (weight[2 + axis] - 1)
                - 1
                + strides[axis]
            )
            / sympy.Integer(strides[axis])
        )
        for axis in range(rank)
    ]
    sizes.shapes[node.outputs[0]] = (x[0], weight[0], *spatial)
    return True


def _resize(sizes: SizeTable, node: ir.Node) -> bool:
    shape = sizes.shape_of(node, 0)
    if shape is None or "axes" in node.attributes:
        return False
    wanted, scales = sizes.content_of(node, 3), sizes.content_of(node, 2)
    if wanted is not None and len(wanted) == len(shape):
        sizes.shapes[node.outputs[0]] = tuple(wanted)
    elif scales is not None and len(scales) == len(shape):
        sizes.shapes[node.outputs[0]] = tuple(
            sympy.floor(size * scale) for size, scale in zip(shape, scales, strict=True)
        )
    else:
        return False
    return True


def _pad(sizes: SizeTable, node: ir.Node) -> bool:
    shape, pads = sizes.shape_of(node, 0), sizes.integers_of(node, 1)
    if shape is None or pads is None or len(pads) != 2 * len(shape):
        return False
    sizes.shapes[node.outputs[0]] = tuple(
        size + pads[axis] + pads[len(shape) + axis] for axis, size in enumerate(shape)
    )
    return True


def _range(sizes: SizeTable, node: ir.Node) -> bool:
    start, limit, step = (sizes.content_of(node, index) for index in range(3))
    if start is None or limit is None or step is None:
        return False
    length = sympy.ceiling((limit.item() - start.item()) / step.item())
    if not length.is_positive:
        return False
    sizes.shapes[node.outputs[0]] = (length,)
    if length.is_Integer and length <= MAX_ELEMENTS:
        sizes.contents[node.outputs[0]] = np.array([start.item() + step.item() * i for i in range(length)], object)
    return True


def _attention(sizes: SizeTable, node: ir.Node) -> bool:
    query, value = sizes.shape_of(node, 0), sizes.shape_of(node, 2)
    if query is None or value is None or len(query) != 4 or len(node.outputs) != 1:
        return False
    sizes.shapes[node.outputs[0]] = (*query[:3], value[3])
    return True


SHAPE_RULES: dict[str, Callable[[SizeTable, ir.Node], bool]] = {
    "Attention": _attention,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Conv": _conv,
    "Expand": _expand,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "MatMul": _matmul,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
