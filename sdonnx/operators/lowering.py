"""Lower contrib operators to their reference bodies."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.edit import replace
from sdonnx.operators.operator_table import contract_of

__all__ = ["LowerContribOperators"]


class LowerContribOperators(InPlacePass):
    """com.microsoft operator -> reference body, in standard operators.

    The result runs everywhere, including ONNX Runtime's CPU provider and onnx.reference. This is how graphs that were
    fused for CUDA are checked where there is no GPU.

    Args:
        keep: return whether a node stays as it is. The default keeps no node.
    """

    def __init__(self, keep: Callable[[ir.Node], bool] = lambda _: False) -> None:
        super().__init__()
        self._keep = keep

    def call(self, model: ir.Model) -> PassResult:
        """Replace every contrib operator that has a contract."""
        modified = False
        for node in list(model.graph):
            contract = contract_of(node)
            if contract is None or self._keep(node):
                continue
            for old, new in zip(node.outputs, contract.lower(node), strict=False):
                if new is not None:
                    new.shape, new.type = old.shape, old.type
                    replace(old, new)
            model.graph.remove(node, safe=True)
            modified = True
        return PassResult(model, modified)
