"""Lower contrib operators to their reference bodies."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from sdonnx.graph.contract import contract_of
from sdonnx.graph.edit import replace

__all__ = ["LowerContribOperators"]


class LowerContribOperators(InPlacePass):
    """com.microsoft operator -> reference body, in standard operators.

    The result runs anywhere, ONNX Runtime's CPU provider and onnx.reference included. It is how a
    graph that was fused for CUDA is checked where there is no GPU.

    Args:
        keep: tells of a node whether it stays as it is. By default none does.
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
