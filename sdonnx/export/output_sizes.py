"""Spell the symbolic sizes of a graph's outputs so that other runtimes can evaluate them.

With IO binding, optimum-onnx computes the sizes of outputs before a run: it splits a size at spaces, replaces the
parts that are names of input axes by their values, and evaluates the rest as Python
(`ORTSessionMixin._dynamic_axis_inference` of optimum-onnx 0.1.0). torch's exporter writes `8*height_latent` and
`(height//8)`, where the names are not parts of their own.
"""

from __future__ import annotations

import ast
import io
import tokenize

import onnx_ir as ir

__all__ = ["space_output_sizes", "spaced"]

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load, ast.Constant)


def spaced(size: str) -> str:
    """Return a size with spaces between all its parts and no needless parentheses.

    `(height//8)` becomes `height // 8`, and `((height - 1)//2) + 1` becomes `( height - 1 ) // 2 + 1`. A size that is
    not arithmetic of names and integers is returned unchanged.
    """
    try:
        tree = ast.parse(size, mode="eval")
    except SyntaxError:
        return size
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
        return size
    tokens = tokenize.generate_tokens(io.StringIO(ast.unparse(tree)).readline)
    return " ".join(token.string for token in tokens if token.string.strip())


def space_output_sizes(model: ir.Model) -> None:
    """Apply `spaced` to every symbolic size of the outputs of `model`."""
    for output in model.graph.outputs:
        if output.shape is None:
            continue
        output.shape = ir.Shape(
            ir.SymbolicDim(spaced(size.value)) if isinstance(size, ir.SymbolicDim) and size.value else size
            for size in output.shape
        )
