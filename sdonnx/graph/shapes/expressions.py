"""Sizes as sympy expressions in a normal form, so that equal sizes compare equal."""

from __future__ import annotations

from functools import lru_cache

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

__all__ = ["dimension_of", "expression_of", "halved", "is_nonnegative", "normal", "parsed", "truncated"]


@lru_cache(maxsize=4096)
def dimension_of(expression: sympy.Expr) -> int | ir.SymbolicDim:
    """Return an expression as a dimension."""
    return int(expression) if expression.is_Integer else ir.SymbolicDim(expression)


@lru_cache(maxsize=4096)
def parsed(text: str) -> sympy.Expr:
    """Return the expression that a dimension's name spells; any other name is a symbol."""
    try:
        expression = ir.SymbolicDim(text)._expr
    except ValueError:
        expression = sympy.Symbol(text, integer=True, positive=True)
    return normal(expression)


@lru_cache(maxsize=4096)
def normal(expression: sympy.Expr) -> sympy.Expr:
    """Return the normal form of a size."""
    whole = expression.replace(sympy.ceiling, _ceiling).replace(sympy.floor, _floor)
    return sympy.expand(whole)


def _ceiling(argument: sympy.Expr) -> sympy.Expr:
    """ceiling(p/q) = floor((p + q - 1)/q) for whole p and q."""
    above, below = argument.as_numer_denom()
    if not (above.is_integer and below.is_Integer):
        return sympy.ceiling(argument)
    return _floor((above + below - 1) / below)


def _floor(argument: sympy.Expr) -> sympy.Expr:
    """floor((floor(a) + n)/q) = floor((a + n)/q) for whole n and q > 0; floor(a + n) = floor(a) + n for whole n."""
    above, below = sympy.expand(argument).as_numer_denom()
    for inner in above.atoms(sympy.floor):
        rest = sympy.expand(above - inner)
        if below.is_Integer and rest.is_integer and not rest.has(inner):
            above = inner.args[0] + rest
            break
    argument = sympy.expand(above / below)
    number, _ = argument.as_coeff_Add()
    whole = sympy.floor(number)
    return sympy.floor(argument - whole) + whole


def expression_of(dim: int | ir.SymbolicDim) -> sympy.Expr | None:
    """Return a dimension as an expression, None where it has no name."""
    if isinstance(dim, int):
        return sympy.Integer(dim)
    return None if dim.value is None else parsed(dim.value)


@lru_cache(maxsize=4096)
def is_nonnegative(expression: sympy.Expr) -> bool:
    """Return whether an expression is known to be at least 0 for all sizes, which are at least 1."""
    shifted = {
        symbol: 1 + sympy.Symbol(symbol.name, integer=True, nonnegative=True)
        for symbol in expression.free_symbols
        if symbol.is_positive
    }
    return bool(normal(expression.xreplace(shifted)).is_nonnegative)


def truncated(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """Return above / below, rounded toward 0.

    Raises:
        ValueError: The quotient may be negative and no integer, where it has no expression.
    """
    quotient = sympy.cancel(above / below)
    if quotient.is_integer:
        return quotient
    if quotient.is_number:
        return sympy.Integer(int(quotient))
    if is_nonnegative(above) and below.is_positive:
        return sympy.floor(quotient)
    raise ValueError(f"{quotient} may be negative")


def halved(size: sympy.Expr) -> sympy.Expr:
    """Return the normal form of ceiling(size / 2), as a convolution with a stride of 2 halves a size."""
    return normal(sympy.floor((size + 1) / 2))
