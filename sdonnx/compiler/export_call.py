"""Export a call of any module that torch.export can trace."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from sdonnx.compiler.call_structure import FlatCall, FlatModule, ResultStructure, UnsupportedCallError
from sdonnx.compiler.module_state import ModuleState
from sdonnx.export.decomposition import FLOOR_DIVISION
from sdonnx.export.simplify import simplify
from sdonnx.export.trace import OPSET, quiet_exporter
from sdonnx.graph.edit import required

__all__ = ["ExportedCall", "SizeConditions", "export_call", "first_line"]

# ONNX Runtime generates other random numbers than torch. Dropout that is disabled is removed from the graph.
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
_MAX_CHARACTERS = 200  # of an error of torch in the log
_REMEMBERED_SHAPES = 256

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExportedCall:
    """A call as a graph.

    Attributes:
        model: The graph, with inputs `input_0`, `input_1` and so on, and outputs `output_0` and so on.
        result: The structure of the result.
        conditions: The sizes of inputs for which the graph is right.
    """

    model: ir.Model
    result: ResultStructure
    conditions: SizeConditions


class SizeConditions:
    """The sizes of inputs for which a graph computes the same as its module.

    They are the sizes that torch.export fixed, the ranges of those that it left open, and the decisions on sizes that
    the module took while it was traced, such as a branch for an even height.

    Args:
        inputs: The inputs as torch.export traced them, with symbols for sizes.
        ranges: The smallest and largest value of each symbol.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], ranges: dict[sympy.Symbol, Any]) -> None:
        self._ranks = [tensor.ndim for tensor in inputs]
        self._sizes = [_expression(size) for tensor in inputs for size in tensor.shape]
        self._ranges = ranges
        self._guards = {env.replace(guard.expr) for env in _shape_envs(inputs) for guard in env.guards}
        self.hold = functools.lru_cache(_REMEMBERED_SHAPES)(self._hold)

    def _hold(self, shapes: _Shapes) -> bool:
        """Return whether the graph is right for inputs of these shapes."""
        if self._ranks != [len(shape) for shape in shapes]:
            return False
        given = [sympy.Integer(size) for shape in shapes for size in shape]
        pairs = list(zip(self._sizes, given, strict=True))
        values = {size: number for size, number in pairs if isinstance(size, sympy.Symbol)}
        return (
            all(size.xreplace(values) == number for size, number in pairs)
            and all(
                symbol not in values or bool(bounds.lower <= values[symbol] <= bounds.upper)
                for symbol, bounds in self._ranges.items()
            )
            # A condition with other symbols stays an expression, and does not hold.
            and all(guard.xreplace(values) == sympy.true for guard in self._guards)
        )


def export_call(module: torch.nn.Module, call: FlatCall) -> ExportedCall:
    """Export a call, with dynamic sizes where torch.export accepts them, and otherwise with the sizes of the call.

    Weights of the graph are the tensors of the module, not copies. The module itself is not called.

    Raises:
        UnsupportedCallError: The call cannot be exported, or the graph would not compute the same as the module.
    """
    try:
        return _exported(module, call, dynamic=True)
    except UnsupportedCallError:
        return _exported(module, call, dynamic=False)


def _exported(module: torch.nn.Module, call: FlatCall, dynamic: bool) -> ExportedCall:
    flat: FlatModule | None = None
    try:
        # The copy shares parameters and buffers. torch.export does not change them, but it does change other tensors.
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        flat = FlatModule(copy.deepcopy(module, shared), call).eval()
        before = ModuleState(flat.model)
        captured = _captured(flat, call, dynamic)
        if not before.is_current(flat.model):
            raise UnsupportedCallError("it changes a tensor among its attributes")
        with quiet_exporter():
            program = required(
                torch.onnx.export(
                    captured,
                    custom_translation_table=FLOOR_DIVISION,
                    dynamo=True,
                    opset_version=OPSET,
                    optimize=False,
                    input_names=[f"input_{index}" for index in range(len(call.tensors))],
                    output_names=[f"output_{index}" for index in range(len(captured.graph_signature.user_outputs))],
                    verbose=False,
                ),
                "exported program",
            )
        _require_function(required(program.exported_program, "exported program"))
        model = program.model
        simplify(model)
    except UnsupportedCallError:
        raise
    except Exception as error:  # exceptions of torch.export and of the copied module have no common base class
        refusal = None if flat is None else flat.traced.refusal
        raise UnsupportedCallError(refusal or f"torch.export failed ({first_line(error)})") from error
    if random := sorted({node.op_type for node in model.graph.all_nodes()} & _RANDOM):
        raise UnsupportedCallError(f"it generates random numbers ({random[0]})")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = _numbered(required(value.shape, f"shape of {value.name}"))
    model.graph.name = type(module).__name__
    conditions = SizeConditions(_inputs(captured), dict(captured.range_constraints))
    if not conditions.hold(call.shapes):
        raise UnsupportedCallError("its conditions on sizes cannot be evaluated")
    return ExportedCall(model, required(flat.traced.structure, "structure of the result"), conditions)


def _captured(flat: FlatModule, call: FlatCall, dynamic: bool) -> torch.export.ExportedProgram:
    # Tensors of inference mode cannot be traced. The values are not read.
    with torch.inference_mode(False), torch.no_grad(), quiet_exporter():
        examples = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in call.tensors)
        axes = tuple(dict.fromkeys(range(tensor.ndim), torch.export.Dim.AUTO) for tensor in examples)
        return torch.export.export(flat, examples, dynamic_shapes=(axes,) if dynamic else None, strict=False)


def _require_function(captured: torch.export.ExportedProgram) -> None:
    """Raise unless a traced module, with changes in place as outputs, is a function of its inputs only."""
    signature = captured.graph_signature
    if changed := [*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()]:
        raise UnsupportedCallError(f"it changes {changed[0].removeprefix('model.')}")
    if signature.user_inputs_to_mutate:
        raise UnsupportedCallError("it changes its arguments in place")
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(
            value
        ):
            raise UnsupportedCallError("its sizes or its branches depend on the values of tensors")


def _inputs(captured: torch.export.ExportedProgram) -> list[torch.Tensor]:
    values = {node.name: node.meta.get("val") for node in captured.graph.nodes if node.op == "placeholder"}
    return [values[name] for name in captured.graph_signature.user_inputs]


def _shape_envs(inputs: Sequence[Any]) -> list[ShapeEnv]:
    """Return the records of sizes of fake tensors; one unless they were traced apart."""
    envs = [each.fake_mode.shape_env for each in inputs]
    return list({id(env): env for env in envs if env is not None}.values())


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _numbered(shape: ir.Shape) -> ir.Shape:
    """Return a shape with numbers instead of names that are numbers; the exporter writes some fixed sizes so."""
    return ir.Shape(
        int(size.value) if isinstance(size, ir.SymbolicDim) and size.value and size.value.isdecimal() else size
        for size in shape
    )


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error, or of the one that torch's exporter wrapped, shortened."""
    while isinstance(error, torch.onnx.OnnxExporterError) and error.__cause__ is not None:
        error = error.__cause__
    lines = itertools.chain(str(error).strip().splitlines(), [""])
    return f"{type(error).__name__}: {next(lines)}"[:_MAX_CHARACTERS]
