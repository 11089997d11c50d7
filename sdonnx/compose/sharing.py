"""What a step computes before it meets a prompt: once for an image, not for each of its prompts.

With guidance, a denoiser is given every image twice, beside two prompts. Up to its first attention to the prompt both
copies are the same: in PixArt the patches and the first block's self-attention, in Stable Diffusion's UNet the first
residual block and a self-attention of the largest size. Here the copies are made behind that instead of before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.compose.composer import INT64, Composer, holds_graph, measured_axes, prune, repeated_rows
from sdonnx.graph.edit import MICROSOFT, Dim, constant, constant_value, dims, insert
from sdonnx.graph.expressions import dimension_of, expression_of

__all__ = ["share_images"]

_ATTENTION = frozenset({"Attention", "MultiHeadAttention"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})

# Each row of the first axis by itself, where what else they read has no such axis or one of size 1.
_ROW_BY_ROW = frozenset(
    {"Abs", "Add", "BiasAdd", "BiasGelu", "BiasSplitGelu", "Cast", "Clip", "Cos", "Div", "Erf", "Exp", "FastGelu",
     "Gelu", "Identity", "Log", "Max", "Min", "Mul", "Neg", "Pow", "QuickGelu", "Reciprocal", "Relu", "Sigmoid", "Sin",
     "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softplus", "Sqrt", "Sub", "Tanh", "Where"}
)  # fmt: skip
# Likewise; only the first input has rows, and the rest are weights.
_OF_FIRST = frozenset({"Conv", "GroupNorm", "GroupNormalization", "InstanceNormalization", "NhwcConv"})
# Likewise, if the axis that the operator works along is not the first one.
_ALONG_AXIS = {
    "Concat": None,
    "Gather": 0,
    "LayerNormalization": -1,
    "LogSoftmax": -1,
    "RMSNormalization": -1,
    "SimplifiedLayerNormalization": -1,
    "Softmax": -1,
    "Split": 0,
}


def share_images(
    step: ir.Model, image: ir.Value, repeated: ir.Value, copies: ir.Value, told: Collection[ir.Value]
) -> bool:
    """Compute what is the same for all copies of an image once, in a step graph, in place.

    Followed are operators that treat each row of the first axis by itself, or keep the order of all elements, from the
    repeated images on; what reads a prompt, or an operator that is not known to do so, ends it. Nothing is changed
    where no attention lies before that end: copying what the end reads would cost as much as it saves.

    Args:
        step: a composed step graph.
        image: (B,...), what the denoiser sees of each image.
        repeated: (G*B,...), the same G times over: images 1 to B, then 1 to B again.
        copies: (1,) int64, the number G.
        told: what else the denoiser is told, beside the timestep.

    Returns:
        Whether the graph was changed.
    """
    one, all_of_them = (expression_of((dims(value) or (0,))[0]) for value in (image, repeated))
    if one is None or all_of_them is None or not all_of_them.is_Symbol or one == all_of_them:
        return False  # the batch is a number that the graph was made for, or both sizes have one name
    if any(map(holds_graph, step.graph)):
        return False
    found = _Followed(step.graph, repeated, told, all_of_them)
    shared = found.shared_nodes()
    if not any(node.op_type in _ATTENTION for node in shared):
        return False
    _Rewriter(step, found.rows, shared, image, repeated, copies).rewrite({all_of_them: one})
    return True


class _Followed:
    """Which values of a step graph are rows of images, G times the same ones, and which of those depend on the images.

    Attributes:
        graph: the graph.
        rows: such a value -> whether it depends on the images, and not on their number alone.
    """

    def __init__(self, graph: ir.Graph, repeated: ir.Value, told: Collection[ir.Value], batch: sympy.Symbol) -> None:
        self.graph = graph
        self.rows = {repeated: True}
        self._batch = batch
        # Different for each prompt, or not known to be rows or the same for all of them.
        self._other = {value for value in told if self._may_have_rows(dims(value))}
        self._sized = set[ir.Value]()  # computed from the number of rows, or from other sizes beside it
        after = iter(graph)
        while next(after) is not repeated.producer():
            pass
        for node in after:
            self._follow(node)

    def shared_nodes(self) -> list[ir.Node]:
        """Return the nodes to be computed once for an image, in the graph's order."""
        nodes = [node for node in self.graph if node.outputs[0] in self.rows]
        shared = {node for node in nodes[1:] if self.rows[node.outputs[0]]}
        for node in reversed(nodes[1:]):
            users = {use.node for output in node.outputs for use in output.uses()}
            if users and users <= shared:
                shared.add(node)  # of their number alone, and read by nothing else
            elif node.op_type in _VIEWS and users.isdisjoint(shared):
                shared.discard(node)  # saves nothing
        return [node for node in nodes if node in shared]

    def _follow(self, node: ir.Node) -> None:
        read = {value for value in node.inputs if value is not None}
        if node.op_type == "Shape":
            self._measured(node)
        elif read & self._other:
            self._other.update(node.outputs)
        elif read & self.rows.keys() or (node.op_type == "Expand" and self._is_by_image(node.outputs[0])):
            outputs = [output for output in node.outputs if output.name]
            if self._keeps_rows(node) and all(map(self._is_by_image, outputs)):
                depends = any(self.rows.get(value, False) for value in read)
                self.rows.update(dict.fromkeys(node.outputs, depends))
            else:
                self._other.update(node.outputs)
        elif read & self._sized:
            grows = any(self._may_have_rows(dims(output)) for output in node.outputs)
            (self._other if grows else self._sized).update(node.outputs)

    def _measured(self, node: ir.Node) -> None:
        value = node.inputs[0]
        assert value is not None
        sizes = dims(value)
        told = None if sizes is None else sizes[slice(*measured_axes(node, len(sizes)))]
        if value in self.rows:
            self._sized.update(node.outputs)
        elif self._may_have_rows(told):
            self._other.update(node.outputs)

    def _may_have_rows(self, sizes: Sequence[Dim] | None) -> bool:
        return sizes is None or any(self._is_of_batch(size) is not False for size in sizes)

    def _is_of_batch(self, dim: Dim) -> bool | None:
        """Tell whether a size depends on the number of copies; None: nobody knows."""
        size = expression_of(dim)
        return None if size is None else self._batch in size.free_symbols

    def _is_by_image(self, value: ir.Value) -> bool:
        """Tell whether a value's first axis, and no other one, is of the images."""
        sizes = dims(value)
        return sizes is not None and list(map(self._is_of_batch, sizes)) == [True, *[False] * (len(sizes) - 1)]

    def _is_weight(self, value: ir.Value | None, rank: int) -> bool:
        """Tell whether every row of a value of that rank meets the same of this one."""
        if value is None:
            return True
        sizes = dims(value)
        free = value not in self.rows and value not in self._other
        return free and sizes is not None and (len(sizes) < rank or (len(sizes) == rank and sizes[0] == 1))

    def _is_free(self, values: Iterable[ir.Value | None]) -> bool:
        return all(value is None or (value not in self.rows and value not in self._other) for value in values)

    def _are_rows(self, values: Iterable[ir.Value | None], rank: int) -> bool:
        return all(value is not None and value in self.rows and _rank(value) == rank for value in values)

    def _keeps_rows(self, node: ir.Node) -> bool:
        """Tell whether G copies of the rows that a node reads make it give G copies of what it gives for one."""
        first, others = node.inputs[0], node.inputs[1:]
        rank = _rank(node.outputs[0])
        assert first is not None
        match node.op_type:
            case kind if kind in _ROW_BY_ROW:
                return all((value in self.rows and _rank(value) == rank) or self._is_weight(value, rank)
                           for value in node.inputs if value is not None)  # fmt: skip
            case kind if kind in _OF_FIRST:
                return first in self.rows and self._is_free(others)
            case "SkipGroupNorm":
                skip = node.inputs[3]
                return first in self.rows and skip in self.rows and self._is_free([*node.inputs[1:3], *node.inputs[4:]])
            case kind if kind in _ALONG_AXIS:
                data = node.inputs if kind == "Concat" else node.inputs[:1]
                axis = node.attributes.get_int("axis", _ALONG_AXIS[kind] or 0)
                return (
                    self._are_rows(data, _rank(first))
                    and self._is_free(node.inputs[len(data) :])
                    and axis % max(_rank(first), 1) != 0
                )
            case "Transpose":
                return next(iter(node.attributes.get_ints("perm", [-1]))) == 0
            case "Slice":
                return first in self.rows and self._is_free(others) and _is_past_first(node, 3, _rank(first))
            case "Squeeze" | "Unsqueeze":
                return first in self.rows and _is_past_first(node, 1, max(rank, _rank(first)))
            case "Reshape":
                return first in self.rows and self._is_free(others)
            case "Expand":
                same = first in self.rows and dims(first) is not None and _rank(first) == rank
                return (same or self._is_weight(first, rank)) and self._is_free(others)
            case "Gemm":
                plain = not node.attributes.get_int("transA", 0)
                weights = self._is_free(node.inputs[1:2])
                added = all(value in self.rows or self._is_weight(value, 2) for value in node.inputs[2:])
                return plain and first in self.rows and weights and added
            case "MatMul" | "FusedMatMul":
                return self._multiplies_rows(node)
            case "MultiHeadAttention":
                given = [value for value in node.inputs[:3] if value is not None]
                rest = (*node.inputs[4:5], *node.inputs[6:])
                bias = node.inputs[5] if len(node.inputs) > 5 else None
                return (
                    all(value in self.rows for value in given)
                    and self._is_free(node.inputs[3:4])
                    and self._is_weight(bias, 4)
                    and all(value is None for value in rest)
                )
            case "Attention" if node.domain != MICROSOFT:
                mask = node.inputs[3] if len(node.inputs) > 3 else None
                return (
                    all(value in self.rows for value in node.inputs[:3])
                    and self._is_weight(mask, 4)
                    and all(value is None for value in node.inputs[4:])
                )
            case _:
                return False

    def _multiplies_rows(self, node: ir.Node) -> bool:
        left, right = node.inputs
        assert left is not None
        assert right is not None
        if any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB")):
            return False
        if left in self.rows and self._is_free([right]):
            return _rank(right) == 2 or (_rank(left) > 2 and self._is_weight(right, _rank(left)))
        return _rank(left) > 2 and self._are_rows([left, right], _rank(left))


class _Rewriter:
    """Lets shared nodes compute B rows, and gives G copies of them to all others."""

    def __init__(
        self,
        step: ir.Model,
        rows: Collection[ir.Value],
        shared: Sequence[ir.Node],
        image: ir.Value,
        repeated: ir.Value,
        copies: ir.Value,
    ) -> None:
        self.step = step
        self.rows = rows
        self.shared = shared
        self.image, self.repeated, self.copies = image, repeated, copies
        self._own = {output for node in shared for output in node.outputs}
        self._singles: dict[ir.Value, ir.Value] = {repeated: image}
        self._sizes: dict[ir.Value, ir.Value] = {}
        self._is_shared = set(shared)
        self._skip_copies: ir.Value | None = None

    def rewrite(self, renamed: Mapping[sympy.Expr, sympy.Expr]) -> None:
        """Rewrite the graph.

        Args:
            renamed: the size G*B -> the size B.
        """
        given = [output for node in self.shared for output in node.outputs]
        whole = [value.shape for value in given]
        readers = [use.node for value in (self.repeated, *given) for use in value.uses() if use.node.op_type == "Shape"]
        for node in self.shared:
            for index, value in enumerate(node.inputs):
                if value is not None and value in self.rows:
                    node.replace_input_with(index, self._single(value, node))
                elif value is not None and index == 1 and node.op_type in ("Expand", "Reshape"):
                    node.replace_input_with(index, self._single_size(value, node))
        for value in [*given, *self._singles.values()]:
            if value is not self.image and value.shape is not None:
                value.shape = ir.Shape([_renamed(size, renamed) for size in value.shape.dims])
        for reader in readers:
            self._measure_whole(reader)
        for value, shape in zip(given, whole, strict=True):
            self._repeat(value, shape)
        prune(self.step.graph)

    def _single(self, value: ir.Value, user: ir.Node) -> ir.Value:
        """Return the first B rows of a value, cut off before `user` where they are not computed alone."""
        if value in self._own:
            return value
        if value not in self._singles:
            zero = constant(self.step.graph, [0], np.int64, "integers_0")
            batch = insert(user, "Shape", [self.image], {"start": 0, "end": 1}, shape=[1], dtype=INT64)
            self._singles[value] = insert(user, "Slice", [value, zero, batch, zero], shape=value.shape)
        return self._singles[value]

    def _single_size(self, value: ir.Value, user: ir.Node) -> ir.Value:
        """Return what a computation of sizes gives where there are B rows, computed before `user`."""
        node = value.producer()
        if node is None:
            return value
        if value not in self._sizes:
            inputs: list[ir.Value | None] = []
            for read in node.inputs:
                if read is not None and read in self.rows:
                    inputs.append(self._single(read, user))
                elif read is not None and node.op_type != "Shape":
                    inputs.append(self._single_size(read, user))
                else:
                    inputs.append(read)
            own = node.op_type == "Shape" and node.inputs[0] in self._own
            if own or inputs != list(node.inputs):
                self._sizes[value] = insert(
                    user,
                    node.op_type,
                    inputs,
                    node.attributes,
                    domain=node.domain,
                    shape=value.shape,
                    dtype=value.dtype,
                )
            else:
                self._sizes[value] = value
        return self._sizes[value]

    def _measure_whole(self, reader: ir.Node) -> None:
        """Let a Shape of what has B rows now tell G*B."""
        measured = reader.inputs[0]
        assert measured is not None
        if measured is self.repeated:
            measured = self.image
            reader.replace_input_with(0, measured)
        start, end = measured_axes(reader, _rank(measured))
        output = reader.outputs[0]
        if start > 0 or end == 0 or not output.uses():
            return
        uses = list(output.uses())
        add = Composer(self.step, after=reader)
        rows = add.op("Mul", add.op("Shape", measured, dtype=INT64, start=0, end=1), self.copies)
        sizes = rows
        if end > 1:
            sizes = add.op("Concat", rows, add.op("Shape", measured, dtype=INT64, start=1, end=end), axis=0)
        sizes.shape = output.shape
        for use in uses:
            use.node.replace_input_with(use.idx, sizes)

    def _repeat(self, value: ir.Value, shape: ir.Shape | None) -> None:
        """Give G copies of a value to the nodes that are not shared."""
        users = [use for use in value.uses() if use.node not in self._is_shared and use.node.op_type != "Shape"]
        skips = [use.node for use in users if self._adds_as_skip(use.node, use.idx)]
        if skips:
            copies = self._copies_for_skips()
            skipped = repeated_rows(Composer(self.step, after=value.producer()), value, copies)
            for node in skips:
                node.replace_input_with(0, node.inputs[1] if node.inputs[0] is value else node.inputs[0])
                node.replace_input_with(1, skipped)
        users = [use for use in users if use.node not in skips]
        if users:
            whole = repeated_rows(Composer(self.step, after=value.producer()), value, self.copies)
            whole.shape = shape
            for user in users:
                user.node.replace_input_with(user.idx, whole)

    def _adds_as_skip(self, node: ir.Node, index: int) -> bool:
        """Tell whether an input is one of two that SkipLayerNormalization adds, the other one of all rows."""
        if node.op_type != "SkipLayerNormalization" or index > 1:
            return False
        other = node.inputs[1 - index]
        return other is not None and other not in self._own and _rank(other) == 3

    def _copies_for_skips(self) -> ir.Value:
        """Return how many copies of its skip SkipLayerNormalization needs: one of a single image, for all its rows."""
        if self._skip_copies is None:
            add = Composer(self.step, after=self.copies.producer())
            one = add.integers(1)
            several = add.op("Min", add.op("Sub", add.op("Shape", self.image, dtype=INT64, start=0, end=1), one), one)
            self._skip_copies = add.op("Add", add.op("Mul", add.op("Sub", self.copies, one), several), one)
        return self._skip_copies


def _rank(value: ir.Value) -> int:
    return len(dims(value) or ())


def _is_past_first(node: ir.Node, index: int, rank: int) -> bool:
    """Tell whether the constant axes that a node reads are all known, and none of them the first."""
    axes = constant_value(node.inputs[index]) if len(node.inputs) > index else None
    return axes is not None and all(int(axis) % max(rank, 1) != 0 for axis in axes.reshape(-1))


def _renamed(size: Dim, renamed: Mapping[sympy.Expr, sympy.Expr]) -> Dim:
    expression = expression_of(size)
    return size if expression is None else dimension_of(expression.subs(renamed))
