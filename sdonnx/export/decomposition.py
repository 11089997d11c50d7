"""Programs of torch.export that torch.onnx can translate without a decomposition.

torch.onnx.export decomposes every program first, which traces the module two more times: 40 s for the UNet of Stable
Diffusion XL on two cores. Programs of UNets, autoencoders and CLIP consist of operators that it translates as they are.
torch.onnx has no option for it, so the program's `run_decompositions` is replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset23 as op

__all__ = ["FLOOR_DIVISION", "TRANSLATIONS", "divides_negatives", "skip_decomposition"]

_ATEN = torch.ops.aten

# Operators without effects on their inputs, each with a function of onnxscript's torchlib or one below. Their
# decomposition is themselves, or another form of the same nodes.
_TRANSLATED = frozenset(
    {
        _ATEN._assert_tensor_metadata.default,  # removed
        _ATEN.add.Tensor,
        _ATEN.arange.default,
        _ATEN.arange.start,
        _ATEN.argmax.default,
        _ATEN.cat.default,
        _ATEN.chunk.default,
        _ATEN.clamp.default,
        _ATEN.concat.default,
        _ATEN.contiguous.default,
        _ATEN.conv2d.default,
        _ATEN.cos.default,
        _ATEN.div.Tensor,
        _ATEN.dropout.default,
        _ATEN.embedding.default,
        _ATEN.eq.Scalar,
        _ATEN.exp.default,
        _ATEN.expand.default,
        _ATEN.flatten.using_ints,
        _ATEN.gelu.default,
        _ATEN.group_norm.default,
        _ATEN.index.Tensor,
        _ATEN.index_select.default,
        _ATEN.layer_norm.default,
        _ATEN.le.Tensor,
        _ATEN.linear.default,
        _ATEN.mul.Tensor,
        _ATEN.pad.default,
        _ATEN.permute.default,
        _ATEN.reshape.default,
        _ATEN.scaled_dot_product_attention.default,
        _ATEN.select.int,
        _ATEN.sigmoid.default,
        _ATEN.silu.default,
        _ATEN.sin.default,
        _ATEN.slice.Tensor,
        _ATEN.sym_size.int,
        _ATEN.to.device,
        _ATEN.to.dtype,
        _ATEN.transpose.int,
        _ATEN.unbind.int,
        _ATEN.unsqueeze.default,
        _ATEN.upsample_nearest2d.vec,
        _ATEN.view.default,
    }
)


def _to_dtype(self: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = "") -> Any:
    """Translate `aten.to.dtype`, which torchlib has only in its decomposed form."""
    return op.Cast(self, to=dtype)


def _to_device(
    self: Any, device: str, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = ""
) -> Any:
    """Translate `aten.to.device`; a graph has no devices."""
    return op.Cast(self, to=dtype)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.to.device: _to_device,
    _ATEN.to.dtype: _to_dtype,
}
"""Translations for `torch.onnx.export(custom_translation_table=...)` of programs that are not decomposed."""


def _floor_divide(self: Any, other: Any) -> Any:
    """Translate `//` of sizes. torchlib writes a Div, which rounds a negative quotient up; Mod is Python's `%`."""
    return op.Div(op.Sub(self, op.Mod(self, other)), other)


FLOOR_DIVISION: dict[Callable[..., Any], Callable[..., Any]] = {operator.floordiv: _floor_divide}
"""Translation of a floor division of sizes for programs with one that `divides_negatives`."""


def divides_negatives(program: torch.export.ExportedProgram) -> bool:
    """Return whether a program rounds a quotient of sizes down that may be negative, such as `(64 - height) // 2`."""
    return any(
        _lower_bound(size) < 0 for node in program.graph.nodes if node.target is operator.floordiv for size in node.args
    )


def _lower_bound(size: Any) -> Any:
    value = size.meta["val"] if isinstance(size, torch.fx.Node) else size
    return value if isinstance(value, int) else value.node.shape_env.bound_sympy(value.node.expr).lower


def skip_decomposition(program: torch.export.ExportedProgram) -> bool:
    """Let torch.onnx.export translate a program as it is, if it can, and return whether it will.

    Args:
        program: The program; its method `run_decompositions` then returns itself.
    """
    operators = {
        node.target
        for node in program.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OperatorBase)
    }
    if not operators <= _TRANSLATED:
        return False
    program.run_decompositions = lambda *_, **__: program
    return True
