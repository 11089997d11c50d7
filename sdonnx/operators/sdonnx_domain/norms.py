"""LayerNorm, SkipLayerNorm and GroupNorm of the domain sdonnx.

LayerNorm(x (...,C), gamma (C,), beta (C,)) -> (x - mean) / sqrt(variance + epsilon) * gamma + beta.

Ba et al. 2016. The kernel is kernels/src/layer_norm.cuh.

SkipLayerNorm(x, skip (...,C), gamma, beta, bias, gate (C,)): s = x * gate + skip + bias -> LayerNorm(s), s.

The first axis of the skip divides x's: the skip is added to each copy. beta, bias and gate are optional, and so
is the second output. ONNX Runtime's SkipLayerNormalization has no gate. Adaptive norms (adaLN-single: arXiv:2310.00426,
section 2.3) compute one at each step. The kernel is kernels/src/layer_norm.cuh.

GroupNorm(x (B,H,W,C), gamma, beta, skip, bias, index): s = x + skip + bias -> GroupNorm(s), s.

SiLU follows if `activation`. Wu and He 2018. skip is (B,H,W,C), (B,1,1,C) or (B,C); skip and bias are optional. With an
index (1,), int64, skip is a table (rows, width): the C numbers of that row from the attribute `offset` on are added to
every image. It serves GroupNorm and SkipGroupNorm of ONNX Runtime. The kernels are in kernels/src/group_norm.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, optional_input, static_dim
from sdonnx.operators.contract import SdonnxContract, copied_rows, on_inputs, sdonnx_case
from sdonnx.operators.contrib_norms import normalized_groups, stable_epsilon, sum_with_skip
from sdonnx.operators.kernel_case import Fill, KernelCase

__all__ = [
    "GROUP_NORM",
    "LAYER_NORM",
    "MAX_GROUPS",
    "MAX_GROUP_NORM_CHANNELS",
    "MAX_LAYER_NORM_CHANNELS",
    "MIN_GROUP_SIZE",
    "SKIP_LAYER_NORM",
    "check_group_norm",
    "check_layer_norm",
    "check_skip_layer_norm",
    "check_table_row",
]

# layer_norm.cuh: a warp holds a row in registers, eight vectors of eight numbers in each lane.
MAX_LAYER_NORM_CHANNELS = 2048


def check_layer_norm(x: ir.Value, gamma: ir.Value, beta: ir.Value | None) -> str | None:
    """Return why the kernel does not accept a norm over the last axis of x (...,C), None if it does."""
    channels = static_dim(gamma, 0)
    if channels is None or gamma.shape is None or gamma.shape.rank() != 1:
        return "gamma is not a vector of a known size"
    if channels % 8 or channels > MAX_LAYER_NORM_CHANNELS:
        return f"{channels} channels: the kernel accepts multiples of 8 up to {MAX_LAYER_NORM_CHANNELS}"
    if beta is not None and beta.shape != gamma.shape:
        return "beta does not have the shape of gamma"
    return LAYER_NORM.check_dtypes(x, gamma, beta)


def _lower_layer_norm(node: ir.Node) -> list[ir.Value | None]:
    x, gamma = node.inputs[:2]
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    return [insert(node, "LayerNormalization", [x, gamma, optional_input(node, 2)], attributes)]


def _layer_norm_cases() -> Iterator[KernelCase]:
    # Every number of vectors in a lane: full lanes, one lane more, and one lane less than full.
    widths = [8, 256, 264, 320, 512, 640, 760, 768, 1024, 1152, 1280, 1536, 1544, 1784, 1792, 2040, 2048]
    cases: list[tuple[int, tuple[int, ...], bool]] = [(width, (3, 7), True) for width in widths]
    cases += [(width, (2, 77), False) for width in (320, 1280)]
    cases += [(640, rows, True) for rows in ((1, 1), (1, 4), (3, 1), (1, 1024), (32, 5), (2, 3, 5, 2))]
    for width, rows, has_beta in cases:
        name = f"C={width} {'x'.join(map(str, rows))} beta={has_beta}"
        shapes = ((*rows, width), (width,), (width,) if has_beta else None)
        yield sdonnx_case("LayerNorm", name, shapes, {"epsilon": 1e-5})
    yield sdonnx_case("LayerNorm", "C=320 0 rows", ((2, 0, 320), (320,), (320,)), {"epsilon": 1e-5})


LAYER_NORM = SdonnxContract(
    "LayerNorm",
    _lower_layer_norm,
    _layer_norm_cases,
    first_use=("C=320 3x7 beta=True", "C=1280 3x7 beta=True"),
    limits=on_inputs(check_layer_norm, 0, 1, 2),
)


def check_skip_layer_norm(
    x: ir.Value, gamma: ir.Value, beta: ir.Value | None, bias: ir.Value | None, gate: ir.Value | None
) -> str | None:
    """Return why the kernel does not accept a norm of x (...,C), None if it does."""
    if (reason := check_layer_norm(x, gamma, beta)) is not None:
        return reason
    for name, row in (("bias", bias), ("gate", gate)):
        if row is None:
            continue
        if row.shape != gamma.shape:
            return f"{name} does not have the shape of gamma"
        if (reason := SKIP_LAYER_NORM.check_dtype(row)) is not None:
            return reason
    return None


def _lower_skip_layer_norm(node: ir.Node) -> list[ir.Value | None]:
    x, skip, gamma = (input_of(node, index) for index in range(3))
    beta, bias, gate = (optional_input(node, index) for index in (3, 4, 5))
    if gate is not None:
        x = insert(node, "Mul", [x, gate], shape=x.shape)
    total = sum_with_skip(node, x, copied_rows(node, skip, input_of(node, 0)), bias)
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    return [insert(node, "LayerNormalization", [total, gamma, beta], attributes), total]


def _skip_layer_norm_cases() -> Iterator[KernelCase]:
    # Every number of vectors in a lane, as of LayerNorm, which has the same kernel.
    widths = [8, 256, 264, 320, 512, 640, 760, 768, 1024, 1152, 1280, 1536, 1544, 1784, 1792, 2040, 2048]
    cases: list[tuple[int, tuple[int, ...], bool, bool, bool, int]] = [
        (width, (3, 7), True, True, True, 2) for width in widths
    ]
    flags = (False, True)
    cases += [(320, (2, 77), *form) for form in product(flags, flags, flags, (1, 2))]
    cases += [(1152, rows, True, True, True, 2) for rows in ((1, 1), (1, 5), (3, 1), (1, 1024), (32, 5), (2, 3, 5, 2))]
    cases += [(320, (2, 0), True, True, True, 2)]
    copied = [(*case, images) for images, case in ((1, cases[3]), (1, cases[0]))]
    copied += [(320, (6, 7), True, True, has_gate, 2, images) for has_gate in (False, True) for images in (2, 3)]
    for width, rows, has_beta, has_bias, has_gate, outputs, images in [*((*case, 0) for case in cases), *copied]:
        x, vector = (*rows, width), (width,)
        skip = (images or rows[0], *rows[1:], width)
        shapes = (x, skip, vector, *(vector if present else None for present in (has_beta, has_bias, has_gate)))
        size = "0 rows" if 0 in rows else "x".join(map(str, rows))
        name = f"C={width} {size} beta={has_beta} bias={has_bias} gate={has_gate} outputs={outputs}"
        name += f" A={images}" if images else ""
        yield sdonnx_case("SkipLayerNorm", name, shapes, {"epsilon": 1e-5}, outputs)


SKIP_LAYER_NORM = SdonnxContract(
    "SkipLayerNorm",
    _lower_skip_layer_norm,
    _skip_layer_norm_cases,
    first_use=(
        "C=1152 3x7 beta=True bias=True gate=True outputs=2",
        "C=320 2x77 beta=False bias=False gate=False outputs=1",
        "C=320 6x7 beta=True bias=True gate=False outputs=2 A=2",
    ),
    limits=on_inputs(check_skip_layer_norm, 0, 2, 3, 4, 5),
)


_INDEX = 5  # the index of the input `index`

# group_norm.cuh: a thread works on eight channels, which belong to at most two groups, and a block of
# kGroupNormThreads = 512 threads reads all channels; kMaxGroups.
MIN_GROUP_SIZE = 4
MAX_GROUP_NORM_CHANNELS = 8 * 512
MAX_GROUPS = 128


def check_group_norm(x: ir.Value, gamma: ir.Value, groups: int) -> str | None:
    """Return why the kernel does not accept x (B,H,W,C) in groups, None if it does."""
    sizes, channels = dims(x), static_dim(gamma, 0)
    if sizes is not None and len(sizes) != 4:
        return f"the input has {len(sizes)} dimensions, the kernel accepts 4"
    if channels is None:
        return "the number of channels is not known"
    if channels % 8 or channels > MAX_GROUP_NORM_CHANNELS:
        return f"{channels} channels: the kernel accepts multiples of 8 up to {MAX_GROUP_NORM_CHANNELS}"
    size = channels // groups if channels % groups == 0 else 0
    if size < MIN_GROUP_SIZE or size % 2 or groups > MAX_GROUPS:
        return (
            f"{channels} channels in {groups} groups: the kernel accepts up to {MAX_GROUPS} groups of an even number "
            f"of at least {MIN_GROUP_SIZE} channels"
        )
    if gamma.dtype not in (None, ir.DataType.FLOAT):
        return f"gamma is {gamma.dtype}, the kernel accepts FLOAT"
    return GROUP_NORM.check_dtype(x)


def check_table_row(table: ir.Value, index: ir.Value, offset: int, channels: int) -> str | None:
    """Return why the kernel does not add numbers of a row of a table (rows, width), None if it does."""
    width = static_dim(table, 1)
    if len(dims(table) or ()) != 2 or width is None or not 0 <= offset <= width - channels:
        return "the table is not known to have a number per channel in each row"
    if width % 8 or offset % 8:
        return f"the channels begin at {offset} in rows of {width} numbers: the kernel accepts multiples of 8"
    if index.dtype != ir.DataType.INT64 or dims(index) not in ((1,), None):
        return "the index is not one INT64"
    return GROUP_NORM.check_dtype(table)


def _group_norm_limits(node: ir.Node) -> str | None:
    gamma, index = input_of(node, 1), optional_input(node, _INDEX)
    reason = check_group_norm(input_of(node, 0), gamma, node.attributes.get_int("groups"))
    if reason is None and index is not None:
        offset, channels = node.attributes.get_int("offset", 0), static_dim(gamma, 0)
        return check_table_row(input_of(node, 3), index, offset, channels or 0)
    return reason


def _lower_group_norm(node: ir.Node) -> list[ir.Value | None]:
    total, skip, bias = input_of(node, 0), optional_input(node, 3), optional_input(node, 4)
    shape = total.shape
    if skip is not None:
        if (index := optional_input(node, _INDEX)) is not None:
            start = node.attributes.get_int("offset", 0)
            places = np.arange(start, start + (static_dim(input_of(node, 1), 0) or 0))
            row = insert(node, "Gather", [skip, index], {"axis": 0})
            columns = constant(graph_of(node), places, np.int64, f"columns_{start}_{start + len(places)}")
            skip = insert(node, "Gather", [row, columns], {"axis": 1}, shape=[1, len(places)])
        if skip.shape is not None and skip.shape.rank() == 2:
            skip = insert(node, "Unsqueeze", [skip, constant(graph_of(node), [1, 2], np.int64, "axes_1_2")])
        total = insert(node, "Add", [total, skip], shape=shape)
    if bias is not None:
        total = insert(node, "Add", [total, bias], shape=shape)
    if total is node.inputs[0]:
        total = insert(node, "Identity", [total], shape=shape)
    return [normalized_groups(node, total), total]


def _group_norm_cases() -> Iterator[KernelCase]:
    """Yield cases of both forms of the kernel, and of both numbers of rows that a thread holds in registers.

    The form depends on the size and the GPU (group_norm_plan in group_norm.cuh). Channels that no slab divides take two
    launches.
    """
    forms = [*product(("image", "row", "matrix"), (False, True), (1, 2)), (None, True, 2), (None, False, 1)]
    cases = [(320, 32, (3, 5, 7), *form, 1) for form in forms]
    cases += [(320, 32, (2, 9, 13), None, False, 1, 0), (320, 32, (2, 9, 13), "image", True, 2, 0)]
    # Groups of 4, 6, 8, 10, 12, 16, 20, 30, 40, 60 and 80 channels, then other numbers of groups.
    sizes = [(channels, 32) for channels in (128, 192, 256, 384, 512, 640, 960, 1280, 1920, 2560)]
    sizes += [(8, 1), (8, 2), (512, 2), (4096, 32), (1024, 128), (1280, 16)]
    cases += [(*size, (2, 8, 8), "image", True, 2, 1) for size in sizes]
    cases += [(1280, 32, image, "row", True, 1, 1) for image in ((1, 1, 1), (3, 1, 1), (1, 1, 7), (32, 2, 2))]
    cases += [(640, 32, image, None, False, 1, 1) for image in ((1, 32, 32), (2, 31, 33))]
    # Two launches: no slab of 488 channels in one group, 1016 in two, 2048 in four. The last: several batches.
    cases += [(488, 1, (2, 5, 7), "image", True, 1, 1)]
    cases += [(1016, 2, (2, 9, 13), "row", False, outputs, 1) for outputs in (1, 2)]
    cases += [(488, 1, (2, 31, 33), None, False, 1, 1), (2048, 4, (16, 22, 15), "row", True, 1, 1)]
    # Clusters with threads that hold more rows than fit in registers.
    cases += [(320, 1, (2, 28, 28), *form, 1) for form in ((None, False, 1), ("image", True, 2))]
    cases += [(320, 32, (1, 64, 64), *form, 1) for form in ((None, False, 1), ("row", True, 2))]
    cases += [(640, 32, (2, 64, 64), *form, 1) for form in ((None, False, 1), ("image", True, 2))]
    # Rows of a table: its first, its middle and its last channels; one launch and two.
    tables = [(320, 32, (3, 5, 7), f"table {offset}", True, 2, 1) for offset in (0, 64, 320)]
    tables += [(640, 32, (2, 9, 13), "table 640", False, 1, 1), (1016, 2, (2, 9, 13), "table 8", True, 1, 1)]
    for channels, groups, image, form, has_bias, outputs, activation in [*cases, *tables]:
        skips = {"image": (*image, channels), "row": (image[0], 1, 1, channels), "matrix": (image[0], channels)}
        vector = (channels,)
        place = int(form.removeprefix("table ")) if form is not None and form.startswith("table") else None
        skip = (4, 2 * channels) if place is not None else None if form is None else skips[form]
        yield sdonnx_case(
            "GroupNorm",
            f"C={channels} G={groups} {'x'.join(map(str, image))} skip={form} bias={has_bias} outputs={outputs} "
            f"activation={activation}",
            (
                (*image, channels),
                vector,
                vector,
                skip,
                vector if has_bias else None,
                *([] if place is None else [(1,)]),
            ),
            {"groups": groups, "activation": activation, "epsilon": stable_epsilon(channels, groups)}
            | ({} if place is None else {"offset": place}),
            outputs,
            fills={} if place is None else {_INDEX: Fill.ROW_INDEX},
            static_axes={} if place is None else {1: (0,), 3: (1,)},
        )


GROUP_NORM = SdonnxContract(
    "GroupNorm",
    _lower_group_norm,
    _group_norm_cases,
    first_use=(
        "C=320 G=32 3x5x7 skip=image bias=True outputs=2 activation=1",
        "C=1280 G=32 2x8x8 skip=image bias=True outputs=2 activation=1",
        "C=320 G=1 2x28x28 skip=image bias=True outputs=2 activation=1",
        "C=1016 G=2 2x9x13 skip=row bias=False outputs=1 activation=1",
        "C=320 G=32 3x5x7 skip=table 64 bias=True outputs=2 activation=1",
    ),
    limits=_group_norm_limits,
    float32_inputs=frozenset({1, 2}),
    row_inputs=frozenset({0, 3}),
)
