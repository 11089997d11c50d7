"""x * Sigmoid(1.702 x) -> QuickGelu, the activation of OpenAI's CLIP."""

from __future__ import annotations

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, insert, replace
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    is_number,
    producer_of,
    same_shape,
    scalar,
    sole_user,
)
from sdonnx.operators.contrib_elementwise import QUICK_GELU, QUICK_GELU_ALPHA

__all__ = ["SigmoidToQuickGelu"]


class SigmoidToQuickGelu(WalkRule):
    """x * Sigmoid(1.702 x) -> QuickGelu(x, alpha=1.702), for every order of the factors.

    Shapes: any. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2; transformers' quick_gelu.
    """

    roots = frozenset({"Sigmoid"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        scaled = producer_of(node.inputs[0], "Mul")
        found = None if scaled is None else _number_and_value(scaled)
        if found is None:
            return NOT_A_CANDIDATE
        number, x = found
        product = sole_user(node.outputs[0], "Mul")
        if product is None:
            return Refused("the sigmoid is not read by one product only")
        if not any(factor is x for factor in product.inputs):
            return Refused("the sigmoid is multiplied by another value than its argument")
        if not is_number(number, QUICK_GELU_ALPHA):
            return Refused(f"the factor {scalar(number):g} inside the sigmoid is not {QUICK_GELU_ALPHA}")
        if not same_shape(x, product.outputs[0]):
            return Refused("a constant adds dimensions")
        if (reason := QUICK_GELU.check_dtype(x)) is not None:
            return Refused(reason)
        attributes = {"alpha": QUICK_GELU_ALPHA}
        replace(product.outputs[0], insert(product, "QuickGelu", [x], attributes, domain=MICROSOFT, shape=x.shape))
        return REWRITTEN


def _number_and_value(product: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return (number, x) of a product of a number and a value."""
    for number, x in (product.inputs, reversed(product.inputs)):
        if number is not None and x is not None and scalar(number) is not None and scalar(x) is None:
            return number, x
    return None
