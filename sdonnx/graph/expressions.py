"""Sizes as sympy expressions: how they are written, so that equal ones are equal."""

from __future__ import annotations

from functools import lru_cache

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

__all__ = ["dimension_of", "expression_of", "normal", "parsed"]


@lru_cache(maxsize=4096)
def dimension_of(expression: sympy.Expr) -> int | ir.SymbolicDim:
    """Return an expression as a dimension."""
    return int(expression) if expression.is_Integer else ir.SymbolicDim(expression)


@lru_cache(maxsize=4096)
def parsed(text: str) -> sympy.Expr:
    """Return what a dimension's name says; a name that is no expression is a size of its own."""
    try:
        expression = ir.SymbolicDim(text)._expr
    except ValueError:
        expression = sympy.Symbol(text, integer=True, positive=True)
    return normal(expression)


@lru_cache(maxsize=4096)
def normal(expression: sympy.Expr) -> sympy.Expr:
    """Return the one way in which this size is written."""
    whole = expression.replace(sympy.ceiling, _ceiling).replace(sympy.floor, _floor)
    return sympy.expand(whole)


def _ceiling(argument: sympy.Expr) -> sympy.Expr:
    """ceiling(p/q) = floor((p + q - 1)/q) for whole p and q."""
    above, below = argument.as_numer_denom()
    if not (above.is_integer and below.is_Integer):
        return sympy.ceiling(argument)
    return _floor((above + below - 1) / below)


def _floor(argument: sympy.Expr) -> sympy.Expr:
    """floor(floor(a)/q) = floor(a/q) for whole q > 0; floor(a + n) = floor(a) + n for whole n."""
    argument = sympy.expand(argument)
    scale, rest = argument.as_coeff_Mul()
    if isinstance(rest, sympy.floor) and scale.is_Rational and scale.p == 1:
        argument = sympy.expand(scale * rest.args[0])
    number, _ = argument.as_coeff_Add()
    whole = sympy.floor(number)
    return sympy.floor(argument - whole) + whole


def expression_of(dim: int | ir.SymbolicDim) -> sympy.Expr | None:
    """Return a dimension as an expression, None where it has no name."""
    if isinstance(dim, int):
        return sympy.Integer(dim)
    return None if dim.value is None else parsed(dim.value)
