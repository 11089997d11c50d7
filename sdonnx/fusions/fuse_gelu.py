"""Spelled-out GELU -> Gelu; approximated by tanh -> FastGelu; x * Sigmoid(1.702 x) of OpenAI's CLIP -> QuickGelu."""

from __future__ import annotations

import math

import onnx_ir as ir

from sdonnx.graph.edit import MICROSOFT, dims, insert, replace, required
from sdonnx.graph.match import (
    NOT_A_CANDIDATE,
    REWRITTEN,
    Refused,
    WalkResult,
    WalkRule,
    biased,
    is_number,
    producer_of,
    same_shape,
    scalar,
    sole_user,
)
from sdonnx.operators.contrib_elementwise import QUICK_GELU, QUICK_GELU_ALPHA, check_fast_gelu

__all__ = ["ErfToGelu", "GeluToFastGelu", "SigmoidToQuickGelu", "TanhToGelu"]


class _Gelu(WalkRule):
    """A product of x, 0.5 and 1 + f(x), in any order."""

    roots = frozenset({"Mul"})
    approximate = ""

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        """Return x where value = 1 + f(x)."""
        raise NotImplementedError

    def rewrite(self, node: ir.Node) -> WalkResult:
        factors = _factors(node)
        for gate in factors:
            x = self.inside(gate)
            rest = [factor for factor in factors if factor is not gate]
            if x is None or x not in rest:
                continue
            rest.remove(x)
            half = next((factor for factor in rest if scalar(factor) == 0.5), None)
            if half is None:
                continue  # the product with the constant follows
            rest.remove(half)
            if len(dims(node.outputs[0]) or ()) != max(len(dims(factor) or ()) for factor in (x, *rest)):
                return Refused("a constant adds dimensions")
            gelu = insert(node, "Gelu", [x], {"approximate": self.approximate}, shape=x.shape)
            for factor in rest:
                gelu = insert(node, "Mul", [factor, gelu], shape=node.outputs[0].shape)
            replace(node.outputs[0], gelu)
            return REWRITTEN
        return NOT_A_CANDIDATE


class ErfToGelu(_Gelu):
    """x * 0.5 * (1 + Erf(x / sqrt(2))) -> Gelu(x), in any order of the factors.

    Shapes: any. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    """

    approximate = "none"

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        return _inside_erf(value)


class TanhToGelu(_Gelu):
    """x * 0.5 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) -> Gelu(x), approximated by tanh.

    Shapes: any. Hendrycks and Gimpel 2016, section 2; transformers' gelu_new.
    """

    approximate = "tanh"

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        return _inside_tanh(value)


def _factors(node: ir.Node) -> list[ir.Value]:
    """Return the factors of a product; inner products are opened where nothing else uses them."""
    factors: list[ir.Value] = []
    for operand in (required(operand) for operand in node.inputs):
        inner = producer_of(operand, "Mul")
        if inner is not None and len(operand.uses()) == 1 and not operand.is_graph_output():
            factors.extend(_factors(inner))
        else:
            factors.append(operand)
    return factors


def _inside_erf(value: ir.Value) -> ir.Value | None:
    """Return x where value = 1 + Erf(x / sqrt(2))."""
    total = producer_of(value, "Add")
    if total is None:
        return None
    for erf_value, one in (total.inputs, reversed(total.inputs)):
        erf = producer_of(erf_value, "Erf")
        scaled = producer_of(erf.inputs[0], "Mul", "Div") if erf is not None and scalar(one) == 1.0 else None
        if scaled is None:
            continue
        first, second = scaled.inputs
        if scaled.op_type == "Div":
            return first if is_number(second, math.sqrt(2)) else None
        for x, number in ((first, second), (second, first)):
            if is_number(number, math.sqrt(0.5)):
                return x
    return None


def _inside_tanh(value: ir.Value) -> ir.Value | None:
    """Return x where value = 1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))."""
    curve = producer_of(_other(producer_of(value, "Add"), 1.0), "Tanh")
    inner = producer_of(
        _other(producer_of(None if curve is None else curve.inputs[0], "Mul"), math.sqrt(2 / math.pi)), "Add"
    )
    if inner is None:
        return None
    for x, cubic in (inner.inputs, reversed(inner.inputs)):
        power = producer_of(_other(producer_of(cubic, "Mul"), 0.044715), "Pow")
        if power is not None and power.inputs[0] is x and scalar(power.inputs[1]) == 3.0:
            return x
    return None


def _other(node: ir.Node | None, number: float) -> ir.Value | None:
    """Return one operand of a sum or product if the other operand is `number`; None otherwise."""
    if node is None:
        return None
    first, second = node.inputs
    return first if is_number(second, number) else second if is_number(first, number) else None


class GeluToFastGelu(WalkRule):
    """Gelu(x + bias), approximated by tanh -> FastGelu(x, bias), with or without a bias.

    Shapes: x (..., D), bias (D,).
    """

    roots = frozenset({"Gelu"})

    def rewrite(self, node: ir.Node) -> WalkResult:
        x = node.inputs[0]
        if x is None or node.attributes.get_string("approximate", "none") != "tanh":
            return NOT_A_CANDIDATE
        if (reason := check_fast_gelu(x)) is not None:
            return Refused(reason)
        inputs = biased(x) if sole_user(x, "Gelu") is node else None
        replace(node.outputs[0], insert(node, "FastGelu", inputs or [x], domain=MICROSOFT, shape=x.shape))
        return REWRITTEN


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
