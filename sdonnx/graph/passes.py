"""Passes that every layer of rewriting uses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.tensors import lazy, read

__all__ = ["FoldWeightTransposes"]


class FoldWeightTransposes(InPlacePass):
    """Transpose(weight) -> weight, transposed when it is read.

    onnxscript's constant folding would do it in memory, all weights at once.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Fold every Transpose (or Identity) of an initializer."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Transpose" or node.domain or node.inputs[0] is None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            if not source.is_initializer() or source.const_value is None or output.is_graph_output():
                continue
            tensor = source.const_value
            rank = len(tensor.shape)
            perm = tuple(node.attributes.get_ints("perm", tuple(reversed(range(rank)))))
            shape = tuple(int(tensor.shape[axis]) for axis in perm)
            name = f"{source.name}.T" if perm == (1, 0) else f"{source.name}.{''.join(map(str, perm))}"
            folded = model.graph.initializers.get(name)
            if folded is None:
                folded = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype))
                folded.const_value = lazy(
                    lambda tensor=tensor, perm=perm: np.ascontiguousarray(read(tensor).transpose(perm)),  # type: ignore[misc]
                    tensor.dtype,
                    shape,
                    name,
                )
                model.graph.register_initializer(folded)
            output.replace_all_uses_with(folded)
            model.graph.remove(node, safe=True)
            if not source.uses():
                model.graph.initializers.pop(source.name or "")
            modified = True
        return PassResult(model, modified)
