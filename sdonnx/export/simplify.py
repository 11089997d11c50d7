"""Simplify a graph that torch's exporter wrote, by onnxscript's constant folding and rewrite rules.

`onnxscript.optimizer.optimize` does the same with all of its rules. It tries each of 46 rules at each node, and one of
them, which replaces two Slice nodes by a Split, compares each Slice with all other nodes: 72 s of the 196 s in which
the UNet of Stable Diffusion XL was exported on two cores. Here only rules are tried whose operator the graph has, 5 s.
The rule for Split is left out: models split by `chunk`, so it never replaced anything in the samples.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.optimizer
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common

from sdonnx.errors import cause_of
from sdonnx.graph.modules import keep_module_paths
from sdonnx.graph.passes import FoldWeightTransposes

__all__ = ["WRAPPED", "simplify", "space_output_sizes", "spaced"]

WRAPPED = "model."
"""Prefix of the names of the parameters of a traced module, which is the attribute `model` of the exported one."""

_ROUNDS = 2  # as in onnxscript.optimizer.optimize

# The default rules of onnxscript by the operator that they replace, without those for integers and `slice_split_rule`.
_RULES: Mapping[str, Sequence[RewriteRule]] = {
    "Add": common.add_0_rule.commute(),
    "BatchNormalization": (
        common.fuse_batchnorm_into_conv_rule,
        common.fuse_batchnorm_into_conv_transpose_rule,
        common.fuse_batchnorm_into_gemm_rule,
    ),
    "Cast": (
        common.cast_constant_of_shape_rule,
        common.cast_constant_of_shape_without_value_rule,
        common.cast_cast_rule,
        common.no_op_cast_rule,
    ),
    "Clip": (common.successive_clip_relu_rule, common.successive_clip_rule),
    "Conv": (
        common.normalize_pad_format_conv_rule,
        common.fuse_pad_into_conv_rule,
        common.remove_optional_bias_from_conv_rule,
    ),
    "ConvTranspose": (common.remove_optional_bias_from_conv_transpose_rule,),
    "Div": (common.div_by_1_rule,),
    "Dropout": (common.dropout_zero_rule, common.dropout_inference_rule),
    "Expand": (common.no_op_expand_rule,),
    "Flatten": (common.flatten_to_reshape_rule,),
    "Gemm": (common.remove_optional_bias_from_gemm_rule,),
    "Max": (common.max_max_rule, common.min_max_rule),
    "Min": (common.min_min_rule, common.max_min_rule),
    "Mul": common.mul_by_1_rule.commute(),
    "Relu": (common.successive_relu_clip_rule, common.successive_relu_rule),
    "Reshape": (
        common.two_reshapes_matmul_reshape_rule,
        common.one_reshape_matmul_reshape_rule,
        common.materialize_reshape_shape_rule,
        common.reshape_reshape_rule,
        common.squeeze_reshape_1d_rule,
    ),
    "ScatterND": (common.no_op_dynamic_scatter_nd_rule, common.no_op_static_scatter_nd_rule),
    "Slice": (common.collapse_slice_rule, common.collapse_slice2_rule),
    "Sub": (common.sub_0_rule,),
    "Transpose": (common.no_op_transpose_rule, common.transpose_transpose_rule),
    "Unsqueeze": (common.unsqueeze_unsqueeze_rule,),
}


def simplify(model: ir.Model) -> None:
    """Fold constants of a graph that torch's exporter wrote, and keep only the module of the metadata of its nodes.

    Args:
        model: The graph of a module that stores the traced one as its attribute `model`.
    """
    keep_module_paths(model, WRAPPED)
    try:
        FoldWeightTransposes()(model)
        _rewrite(model)
        FoldWeightTransposes()(model)
    except ir.passes.PassError as error:
        raise cause_of(error) from error  # small weights are read here, and may exceed float16
    space_output_sizes(model)


def _rewrite(model: ir.Model) -> None:
    common_passes.InlinePass()(model)
    unused = ir.passes.Sequential(common_passes.RemoveUnusedNodesPass(), common_passes.RemoveUnusedOpsetsPass())
    for _ in range(_ROUNDS):
        modified = onnxscript.optimizer.fold_constants(model).modified
        present = {node.op_type for node in model.graph.all_nodes()}
        rules = [rule for operator, group in _RULES.items() if operator in present for rule in group]
        modified |= bool(rules) and RewriteRuleSet(rules).apply_to_model(model) > 0
        modified |= unused(model).modified
        if not modified:
            break
    ir.passes.Sequential(
        common_passes.RemoveUnusedNodesPass(),
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common_passes.LiftSubgraphInitializersToMainGraphPass(),
        common_passes.DeduplicateInitializersPass(),
        common_passes.CommonSubexpressionEliminationPass(),
        common_passes.OutputFixPass(),
        common_passes.NameFixPass(),
    )(model)


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
