"""Passes that every stage of rewriting uses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes import common as common_passes

from sdonnx.graph.edit import MICROSOFT, arranged_initializer, constant, insert, replace, tensor_of
from sdonnx.graph.shapes.inference import Sizes
from sdonnx.graph.tensors import transposed

__all__ = ["FoldWeightTransposes", "SimplifyReshapes", "constant_target", "infer_shapes", "tidy"]


class FoldWeightTransposes(InPlacePass):
    """Transpose(weight) -> weight, transposed when it is read.

    onnxscript's constant folding would hold all weights in memory at once.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Fold every Transpose of an initializer."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Transpose" or node.domain or node.inputs[0] is None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            if not source.is_initializer() or source.is_graph_input() or output.is_graph_output():
                continue
            tensor = tensor_of(source)
            perm = tuple(node.attributes.get_ints("perm", tuple(reversed(range(len(tensor.shape))))))
            folded = arranged_initializer(
                model.graph,
                f"{source.name}.T" if perm == (1, 0) else f"{source.name}.{''.join(map(str, perm))}",
                tensor,
                lambda values, perm=perm: transposed(values, perm),  # type: ignore[misc]
                tuple(tensor.shape.numpy()[axis] for axis in perm),
            )
            output.replace_all_uses_with(folded)
            model.graph.remove(node, safe=True)
            if not source.uses() and not source.is_graph_output():
                model.graph.initializers.pop(source.name or "")
            modified = True
        return PassResult(model, modified)


class SimplifyReshapes(InPlacePass):
    """Reshape(x, computed sizes) -> Reshape(x, constant) where at most one dynamic size is new.

    A size that the input has at the same axis becomes 0, one other dynamic size -1. The
    nodes that computed the sizes, which run on the CPU, are then unused.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Make the target shapes constant."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Reshape" or node.domain:
                continue
            source, output = node.inputs[0], node.outputs[0]
            if source is None or source.shape is None or output.shape is None:
                continue
            target = constant_target(source.shape, output.shape)
            if target is None or (node.inputs[1] is not None and node.inputs[1].is_initializer()):
                continue
            name = "shape_" + "_".join(str(size).replace("-", "m") for size in target)
            reshaped = insert(
                node, "Reshape", [source, constant(model.graph, target, np.int64, name)], shape=output.shape
            )
            replace(output, reshaped)
            model.graph.remove(node, safe=True)
            modified = True
        return PassResult(model, modified)


def constant_target(source: ir.Shape, output: ir.Shape) -> list[int] | None:
    """Return the target that reshapes `source` to `output` for all sizes, None where there is none.

    0 is the size at the same axis of the source, -1 one other dynamic size.
    """
    target: list[int] = []
    for axis, size in enumerate(output.dims):
        if isinstance(size, int):
            target.append(size)
        elif axis < source.rank() and size.value is not None and source[axis] == size:
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else None


def infer_shapes(model: ir.Model, outputs: bool = False) -> None:
    """Set the type and shape of every value, with sizes in terms of the inputs' sizes.

    Graph outputs keep the names of axes that they declare, unless `outputs`.
    """
    common_passes.ShapeInferencePass()(model)
    Sizes(model.graph).write(outputs)


def tidy(model: ir.Model) -> None:
    """Remove unused nodes, merge equal computations and sort the nodes."""
    common_passes.RemoveUnusedNodesPass()(model)
    # A new initializer may have the name of a node's output.
    common_passes.NameFixPass()(model)
    # Large attributes and weights are not compared: that would read them all.
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    _unname_unused_outputs(model)


def _unname_unused_outputs(model: ir.Model) -> None:
    """Leave out unused optional outputs: kernels then do not write them.

    onnx_ir does the same for the operators that have a schema in the onnx package.
    """
    for node in model.graph:
        if node.domain != MICROSOFT:
            continue
        for output in node.outputs[1:]:
            if not output.uses() and not output.is_graph_output():
                output.name, output.type = "", None
