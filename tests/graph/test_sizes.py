"""Symbolic sizes: their normal form, and computations of sizes."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from sdonnx.graph.shapes.expressions import expression_of, normal

# Sizes in the form that exporters write: sums and multiples of others.
LINEAR = st.recursive(
    st.sampled_from(["h", "w", "1", "2"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.sampled_from("234"), inner).map(lambda parts: f"{parts[0]}*({parts[1]})"),
    ),
    max_leaves=5,
)


def written(*forms: str) -> list[object]:
    """Return the normal form of these sizes."""
    return [expression_of(ir.SymbolicDim(form)) for form in forms]


def test_a_ceiling_is_a_floor() -> None:
    height = sympy.Symbol("h", integer=True, positive=True)
    assert normal(sympy.ceiling(height / 2)) == normal(sympy.floor((height + 1) / 2))
    assert normal(sympy.ceiling(height / 8)) == normal(sympy.floor((height + 7) / 8))


@given(expression=LINEAR)
@settings(max_examples=40, deadline=None)
def test_equal_sizes_have_one_normal_form(expression: str) -> None:
    """A size, its expanded form and its factored form become one; a different one does not."""
    size = sympy.sympify(expression)
    *same, other = written(
        expression,
        str(sympy.expand(size)),
        str(sympy.factor(size)),
        f"(1 + {expression}) - 1",
        f"{expression} + 1",
    )
    assert all(shape == same[0] for shape in same[1:])
    assert other != same[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("floor(h/2 + 1/2)", "floor(h/2 - 1/2) + 1"),
        ("floor(floor(h/2)/2)", "floor(h/4)"),
        ("h*w", "w*h"),
        ("(2*h)*(2*w)", "4*h*w"),
        ("(h//2)*(w//2)", "((w//2))*((h//2))"),
        ("1 + (h - 1)//2", "(((h - 1)//2)) + 1"),
        ("(h//8)*(w//8)", "((((w))//8))*(h//8)"),
        ("floor((h + 3)/2)", "floor((h + 1)/2) + 1"),
        ("2*(((h - 1)//2) + 1)", "(((h - 1)//2) + 1) + (((h - 1)//2) + 1)"),
    ],
)
def test_sizes_of_images_have_one_normal_form(one: str, other: str) -> None:
    first, second = written(one, other)
    assert first == second
