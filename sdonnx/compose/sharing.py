"""Share computations that do not depend on the prompt between the copies of an image.

With guidance, a denoiser reads every image twice, with two prompts. Up to its first attention to the prompt both
copies are equal: in a diffusion transformer the patches and the first block's self-attention, in a UNet the first
residual block and a self-attention of the largest size. Here the copies are made after these layers, not before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.compose.graph_builder import INT64, GraphBuilder, has_subgraph, int64_vector, measured_axes, repeat_rows
from sdonnx.compose.rowwise import RowRules, rank_of
from sdonnx.graph.edit import Dim, dims, input_of, insert, insert_multi
from sdonnx.graph.shapes.expressions import dimension_of, expression_of

__all__ = ["share_images"]

_ATTENTION = frozenset({"Attention", "MultiHeadAttention"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


def share_images(
    step: ir.Model, image: ir.Value, repeated: ir.Value, copies: ir.Value, conditioning: Collection[ir.Value]
) -> bool:
    """Compute values that are equal for all copies of an image once, in a step graph, in place.

    Operators that treat each row of the first axis by itself, or keep the order of all elements, are followed from the
    repeated images on. An operator that reads a prompt, or that is not known to treat rows so, ends the shared part.
    The graph is unchanged if there is no attention before that end: copying the values that the end reads would cost as
    much as it saves.

    Args:
        step: a composed step graph.
        image: (B,...), the denoiser's input for each image.
        repeated: (G*B,...), G copies of it: images 1 to B, then 1 to B again.
        copies: (1,) int64, the number G.
        conditioning: the denoiser's other inputs, except the timestep.

    Returns:
        Whether the graph was changed.
    """
    one, all_of_them = (expression_of((dims(value) or (0,))[0]) for value in (image, repeated))
    if one is None or all_of_them is None or not all_of_them.is_Symbol or one == all_of_them:
        return False  # the batch is a number that the graph was made for, or both sizes have one name
    if any(map(has_subgraph, step.graph)):
        return False
    found = _ImageRows(step.graph, repeated, conditioning, all_of_them)
    shared = found.shared_nodes()
    if not any(node.op_type in _ATTENTION for node in shared):
        return False
    _Rewriter(step, found.rows, shared, image, repeated, copies).rewrite({all_of_them: one})
    return True


class _ImageRows(RowRules):
    """The values of a step graph with G equal copies of one row per image.

    Attributes:
        graph: the graph.
        rows: such a value -> whether it depends on the images; false where it depends only on their number.
    """

    def __init__(
        self, graph: ir.Graph, repeated: ir.Value, conditioning: Collection[ir.Value], batch: sympy.Symbol
    ) -> None:
        self.graph = graph
        self._batch = batch
        super().__init__({repeated: True}, {value for value in conditioning if self._may_have_rows(dims(value))})
        self._sized = set[ir.Value]()  # computed from the number of rows, and maybe other sizes
        after = iter(graph)
        while next(after) is not repeated.producer():
            pass
        for node in after:
            self._follow(node)

    def shared_nodes(self) -> list[ir.Node]:
        """Return the nodes to compute once for an image, in the graph's order."""
        nodes = [node for node in self.graph if node.outputs[0] in self.rows]
        shared = {node for node in nodes[1:] if self.rows[node.outputs[0]]}
        for node in reversed(nodes[1:]):
            users = {use.node for output in node.outputs for use in output.uses()}
            if users and users <= shared:
                shared.add(node)  # depends only on the number of rows, and has no other user
            elif node.op_type in _VIEWS and users.isdisjoint(shared):
                shared.discard(node)  # saves nothing
        return [node for node in nodes if node in shared]

    def _follow(self, node: ir.Node) -> None:
        read = {value for value in node.inputs if value is not None}
        if node.op_type == "Shape":
            self._measured(node)
        elif read & self.other:
            self.other.update(node.outputs)
        elif read & self.rows.keys() or (node.op_type == "Expand" and self._is_by_image(node.outputs[0])):
            outputs = [output for output in node.outputs if output.name]
            if self.keeps_rows(node) and all(map(self._is_by_image, outputs)):
                depends = any(self.rows.get(value, False) for value in read)
                self.rows.update(dict.fromkeys(node.outputs, depends))
            else:
                self.other.update(node.outputs)
        elif read & self._sized:
            grows = any(self._may_have_rows(dims(output)) for output in node.outputs)
            (self.other if grows else self._sized).update(node.outputs)

    def _measured(self, node: ir.Node) -> None:
        value = input_of(node, 0)
        sizes = dims(value)
        measured = None if sizes is None else sizes[slice(*measured_axes(node, len(sizes)))]
        if value in self.rows:
            self._sized.update(node.outputs)
        elif self._may_have_rows(measured):
            self.other.update(node.outputs)

    def _may_have_rows(self, sizes: Sequence[Dim] | None) -> bool:
        return sizes is None or any(self._is_of_batch(size) is not False for size in sizes)

    def _is_of_batch(self, dim: Dim) -> bool | None:
        """Return whether a size depends on the number of copies; None where that is unknown."""
        size = expression_of(dim)
        return None if size is None else self._batch in size.free_symbols

    def _is_by_image(self, value: ir.Value) -> bool:
        """Return whether the first axis of a value, and no other axis, runs over the images."""
        sizes = dims(value)
        return sizes is not None and list(map(self._is_of_batch, sizes)) == [True, *[False] * (len(sizes) - 1)]


class _Rewriter:
    """Lets shared nodes compute B rows, and all other nodes read G copies of them."""

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
        outputs = [output for node in self.shared for output in node.outputs]
        old_shapes = [value.shape for value in outputs]
        readers = [
            use.node for value in (self.repeated, *outputs) for use in value.uses() if use.node.op_type == "Shape"
        ]
        for node in self.shared:
            for index, value in enumerate(node.inputs):
                if value is not None and value in self.rows:
                    node.replace_input_with(index, self._single(value, node))
                elif value is not None and index == 1 and node.op_type in ("Expand", "Reshape"):
                    node.replace_input_with(index, self._single_size(value, node))
        for value in [*outputs, *self._singles.values()]:
            if value is not self.image and value.shape is not None:
                value.shape = ir.Shape([_renamed(size, renamed) for size in value.shape.dims])
        for reader in readers:
            self._measure_whole(reader)
        for value, shape in zip(outputs, old_shapes, strict=True):
            self._repeat(value, shape)

    def _single(self, value: ir.Value, user: ir.Node) -> ir.Value:
        """Return the first B rows of a value, sliced before `user` where the value has G*B rows."""
        if value in self._own:
            return value
        if value not in self._singles:
            zero = int64_vector(self.step.graph, 0)
            batch = insert(user, "Shape", [self.image], {"start": 0, "end": 1}, shape=[1], dtype=INT64)
            self._singles[value] = insert(user, "Slice", [value, zero, batch, zero], shape=value.shape)
        return self._singles[value]

    def _single_size(self, value: ir.Value, user: ir.Node) -> ir.Value:
        """Return the result of a computation of sizes for B rows, computed before `user`."""
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
                outputs = node.outputs
                copied = insert_multi(
                    user,
                    node.op_type,
                    inputs,
                    node.attributes,
                    len(outputs),
                    domain=node.domain,
                    shapes=[output.shape for output in outputs],
                    dtype=value.dtype,
                )
                self._sizes.update(zip(outputs, copied, strict=True))
            else:
                self._sizes[value] = value
        return self._sizes[value]

    def _measure_whole(self, reader: ir.Node) -> None:
        """Let a Shape of a value that now has B rows return G*B."""
        measured = input_of(reader, 0)
        if measured is self.repeated:
            measured = self.image
            reader.replace_input_with(0, measured)
        start, end = measured_axes(reader, rank_of(measured))
        output = reader.outputs[0]
        if start > 0 or end == 0 or not output.uses():
            return
        uses = list(output.uses())
        add = GraphBuilder(self.step, after=reader)
        rows = add.op("Mul", add.op("Shape", measured, dtype=INT64, start=0, end=1), self.copies)
        sizes = rows
        if end > 1:
            sizes = add.op("Concat", rows, add.op("Shape", measured, dtype=INT64, start=1, end=end), axis=0)
        sizes.shape = output.shape
        for use in uses:
            use.node.replace_input_with(use.idx, sizes)

    def _repeat(self, value: ir.Value, shape: ir.Shape | None) -> None:
        """Let the nodes that are not shared read G copies of a value."""
        users = [use for use in value.uses() if use.node not in self._is_shared and use.node.op_type != "Shape"]
        skips = [use.node for use in users if self._adds_as_skip(use.node, use.idx)]
        if skips:
            copies = self._copies_for_skips()
            skipped = repeat_rows(GraphBuilder(self.step, after=value.producer()), value, copies)
            for node in skips:
                node.replace_input_with(0, node.inputs[1] if node.inputs[0] is value else node.inputs[0])
                node.replace_input_with(1, skipped)
        users = [use for use in users if use.node not in skips]
        if users:
            whole = repeat_rows(GraphBuilder(self.step, after=value.producer()), value, self.copies)
            whole.shape = shape
            for user in users:
                user.node.replace_input_with(user.idx, whole)

    def _adds_as_skip(self, node: ir.Node, index: int) -> bool:
        """Return whether an input is a term of a SkipLayerNormalization, and the other term has G*B rows."""
        if node.op_type != "SkipLayerNormalization" or index > 1:
            return False
        other, rows = node.inputs[1 - index], (dims(self.repeated) or ())[0]
        sizes = () if other is None else dims(other) or ()
        return other not in self._own and len(sizes) == 3 and expression_of(sizes[0]) == expression_of(rows)

    def _copies_for_skips(self) -> ir.Value:
        """Return the number of copies of a skip that SkipLayerNormalization needs: 1 for a single image."""
        if self._skip_copies is None:
            add = GraphBuilder(self.step, after=self.copies.producer())
            one = add.integers(1)
            several = add.op("Min", add.op("Sub", add.op("Shape", self.image, dtype=INT64, start=0, end=1), one), one)
            self._skip_copies = add.op("Add", add.op("Mul", add.op("Sub", self.copies, one), several), one)
        return self._skip_copies


def _renamed(size: Dim, renamed: Mapping[sympy.Expr, sympy.Expr]) -> Dim:
    expression = expression_of(size)
    return size if expression is None else dimension_of(expression.subs(renamed))
