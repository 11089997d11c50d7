"""Spelled-out activations and halves -> Sigmoid, Gelu and Split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.graph.contract import fast_gelu_refusal
from sdonnx.graph.edit import MICROSOFT, constant_value, dims, insert, insert_multi, replace, static_dim
from sdonnx.graph.match import Idiom, Rule, biased, producer_of, same_shape, scalar, sole_user

__all__ = [
    "ErfToGelu",
    "ExponentialToSigmoid",
    "GeluToFastGelu",
    "QuotientToSilu",
    "SizesToEqualSplit",
    "SlicesToSplit",
    "SwishToSilu",
    "TanhToGelu",
]

# How far a rounded constant may be off: fp16 holds sqrt(2) to 4e-4.
_TOLERANCES = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}


def _is(value: ir.Value | None, number: float) -> bool:
    found = scalar(value)
    if value is None or found is None or value.dtype is None:
        return False
    return math.isclose(found, number, rel_tol=_TOLERANCES.get(value.dtype, 1e-5))


class _Gelu(Idiom):
    """A product of x, 0.5 and 1 + f(x), in any order."""

    roots = frozenset({"Mul"})
    approximate = ""

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        """Return x where value = 1 + f(x)."""
        raise NotImplementedError

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite the product that has all three factors."""
        factors = _factors(node)
        for gate in factors:
            x = self.inside(gate)
            rest = [factor for factor in factors if factor is not gate]
            if x is None or x not in rest:
                continue
            rest.remove(x)
            half = next((factor for factor in rest if scalar(factor) == 0.5), None)
            if half is None:
                continue  # it comes with a later factor
            rest.remove(half)
            if len(dims(node.outputs[0]) or ()) != max(len(dims(factor) or ()) for factor in (x, *rest)):
                return "a constant adds dimensions"
            gelu = insert(node, "Gelu", [x], {"approximate": self.approximate}, shape=x.shape)
            for factor in rest:
                gelu = insert(node, "Mul", [factor, gelu], shape=node.outputs[0].shape)
            replace(node.outputs[0], gelu)
            return None
        return ""


class ErfToGelu(_Gelu):
    """x * 0.5 * (1 + Erf(x / sqrt(2))) -> Gelu(x), in any order of the factors.

    Shapes: any. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    """

    approximate = "none"

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        """Return x where value = 1 + Erf(x / sqrt(2))."""
        return _inside_erf(value)


class TanhToGelu(_Gelu):
    """x * 0.5 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) -> Gelu(x), approximated by tanh.

    Shapes: any. Hendrycks and Gimpel 2016, section 2; transformers' gelu_new.
    """

    approximate = "tanh"

    @staticmethod
    def inside(value: ir.Value) -> ir.Value | None:
        """Return x where value = 1 + Tanh(...)."""
        return _inside_tanh(value)


def _factors(node: ir.Node) -> list[ir.Value]:
    """Return the factors of a product; inner products are opened where nothing else uses them."""
    factors: list[ir.Value] = []
    for operand in node.inputs:
        assert operand is not None
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
            return first if _is(second, math.sqrt(2)) else None
        for x, number in ((first, second), (second, first)):
            if _is(number, math.sqrt(0.5)):
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
    """Return the operand of a sum or product whose other operand is that number."""
    if node is None:
        return None
    first, second = node.inputs
    return first if _is(second, number) else second if _is(first, number) else None


class GeluToFastGelu(Idiom):
    """Gelu(x + bias), approximated by tanh -> FastGelu(x, bias), and likewise without a bias.

    Shapes: x (..., D), bias (D,).
    """

    roots = frozenset({"Gelu"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite from the sum on, where there is one."""
        x = node.inputs[0]
        if x is None or node.attributes.get_string("approximate", "none") != "tanh":
            return ""
        if (reason := fast_gelu_refusal(x)) is not None:
            return reason
        inputs = biased(x) if sole_user(x, "Gelu") is node else None
        replace(node.outputs[0], insert(node, "FastGelu", inputs or [x], domain=MICROSOFT, shape=x.shape))
        return None


class ExponentialToSigmoid(Idiom):
    """1 / (1 + Exp(-x)), Reciprocal(1 + Exp(-x)) -> Sigmoid(x)."""

    roots = frozenset({"Div", "Reciprocal"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite where the divisor is of that form."""
        if node.op_type == "Div" and scalar(node.inputs[0]) != 1.0:
            return ""
        x = _inside_exponential(node.inputs[-1])
        if x is None or not same_shape(x, node.outputs[0]):
            return ""
        replace(node.outputs[0], insert(node, "Sigmoid", [x], shape=x.shape))
        return None


class QuotientToSilu(Idiom):
    """x / (1 + Exp(-x)) -> x * Sigmoid(x)."""

    roots = frozenset({"Div"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite where dividend and exponent are one value."""
        x = _inside_exponential(node.inputs[1])
        if x is None or x is not node.inputs[0] or not same_shape(x, node.outputs[0]):
            return ""
        gate = insert(node, "Sigmoid", [x], shape=x.shape)
        replace(node.outputs[0], insert(node, "Mul", [x, gate], shape=x.shape))
        return None


def _inside_exponential(value: ir.Value | None) -> ir.Value | None:
    """Return x where value = 1 + Exp(-x)."""
    total = producer_of(value, "Add")
    if total is None:
        return None
    for power_value, one in (total.inputs, reversed(total.inputs)):
        power = producer_of(power_value, "Exp")
        negated = producer_of(power.inputs[0], "Neg") if power is not None else None
        if negated is not None and scalar(one) == 1.0:
            return negated.inputs[0]
    return None


class SwishToSilu(Rule):
    """Swish(x, alpha) -> x * Sigmoid(alpha * x). Opset 24 has the operator, older kernels do not."""

    def pattern(self, op: Any, x: Any) -> Any:
        """The operator."""
        return op.Swish(x, _allow_other_attributes=True, _outputs=["swish"])

    def rewrite(self, op: Any, x: ir.Value, swish: ir.Value) -> Any:
        """Spell it out."""
        node = swish.producer()
        assert node is not None
        assert x.dtype is not None
        alpha = node.attributes.get_float("alpha", 1.0)
        scaled = x if alpha == 1.0 else op.Mul(x, op.Constant(value=ir.tensor(np.array(alpha, x.dtype.numpy()))))
        return op.Mul(x, op.Sigmoid(scaled))


class SlicesToSplit(Idiom):
    """x[..., :D], x[..., D:] -> Split(x, num_outputs=2).

    Shapes: x has 2 D elements along the axis. TorchScript writes chunk(2) so, its bounds computed.
    """

    roots = frozenset({"Slice"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Rewrite the first half; its other half is looked for among the users of x."""
        x = node.inputs[0]
        first = _bounds(node)
        if x is None or first is None:
            return ""
        axis, start, end, size = first
        if start != 0 or 2 * end != size:
            return ""
        others = [use.node for use in x.uses() if use.node is not node]
        second = [user for user in others if user.op_type == "Slice" and _bounds(user) == (axis, end, size, size)]
        if not second:
            return ""
        halves = insert_multi(
            node, "Split", [x], {"axis": axis, "num_outputs": 2}, 2, shapes=[node.outputs[0].shape] * 2
        )
        replace(node.outputs[0], halves[0])
        for user in second:
            replace(user.outputs[0], halves[1])
        return None


def _bounds(node: ir.Node) -> tuple[int, int, int, int] | None:
    """Return (axis, start, end, size) of a slice along one axis with constant bounds and step 1."""
    x = node.inputs[0]
    values = [constant_value(value) for value in node.inputs[1:]]
    if x is None or x.shape is None or any(value is None or value.size != 1 for value in values):
        return None
    numbers = [int(value.item()) for value in values if value is not None]
    axis = numbers[2] if len(numbers) > 2 else 0
    axis %= x.shape.rank()
    size = static_dim(x, axis)
    if size is None or (len(numbers) > 3 and numbers[3] != 1):
        return None
    start, end, _ = slice(numbers[0], numbers[1]).indices(size)
    return axis, start, end, size


class SizesToEqualSplit(Idiom):
    """Split(x, [D, D]) -> Split(x, num_outputs=2), and likewise for more parts."""

    roots = frozenset({"Split"})

    def rewrite(self, node: ir.Node) -> str | None:
        """Leave the sizes out where they are equal."""
        sizes = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
        if sizes is None or len(set(sizes.tolist())) != 1:
            return ""
        attributes = {"axis": node.attributes.get_int("axis", 0), "num_outputs": len(node.outputs)}
        shapes = [output.shape for output in node.outputs]
        parts = insert_multi(node, "Split", [node.inputs[0]], attributes, len(node.outputs), shapes=shapes)
        for old, new in zip(node.outputs, parts, strict=True):
            replace(old, new)
        return None
