"""Modules of any class: a backend of `torch.compile` that runs the graphs that Dynamo traces in ONNX Runtime.

Dynamo decides which calls share a program: it guards everything that a trace read, such as attributes, constants and
types, and leaves to Python what it cannot trace (docs/decisions/0206-notice-changes-in-one-way.md). torch computes a
program that has no graph.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from sdonnx.compiler.graph_runs import GraphRuns, graph_runs
from sdonnx.compiler.graph_target import target_on
from sdonnx.compiler.module_graph import first_line, fuse_model, load_model, numbered, widen
from sdonnx.compiler.module_state import TensorVersions
from sdonnx.compiler.result_checks import ResultCheck
from sdonnx.errors import DeviceMemoryError, SdonnxError
from sdonnx.export.decomposition import FLOOR_DIVISION
from sdonnx.export.simplify import simplify
from sdonnx.export.trace import OPSET, quiet_exporter
from sdonnx.graph.edit import required

__all__ = ["MAX_GRAPHS", "DynamoForward", "OrtBackend"]

_LOGGER = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Number of graphs of a program, for sizes and integers that one graph cannot have; torch computes further calls."""

# Of inputs, weights and results. float16 on the CPU and bfloat16 are computed in float32.
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)

# ONNX Runtime generates other random numbers than torch. Dropout that is disabled is removed from the graph.
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)

_REMEMBERED_SHAPES = 256

_Shapes = tuple[tuple[int, ...], ...]


class _NoGraphError(Exception):
    """A program has no graph; the message is a clause without a full stop."""


class DynamoForward:
    """`forward` of a module, which Dynamo traces for `OrtBackend`.

    Args:
        module: The module, which torch computes.
        check: Whether the results of each graph are compared with torch's (`ResultCheck`).
    """

    def __init__(self, module: torch.nn.Module, check: bool) -> None:
        self.backend = OrtBackend(type(module).__name__, check)
        in_class = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return in_class(module, *args, **kwargs)

        # Dynamo limits the number of programs of a code object, which all modules would share.
        own = types.FunctionType(forward.__code__.replace(), globals(), None, None, forward.__closure__)
        self._forward, self._traced = forward, torch.compile(own, backend=self.backend, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call.

        Raises:
            DeviceMemoryError: There is too little memory.
        """
        fast_attention = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its operators have no ONNX
        try:
            # Without the second option, hooks that are added to submodules later are not noticed.
            with torch._dynamo.config.patch(specialize_float=True, skip_nnmodule_hook_guards=False):
                return self._traced(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.backend.log(f"it cannot be traced ({first_line(error)})")
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_attention)
        return self._forward(*args, **kwargs)  # raises the module's own error for wrong arguments


class OrtBackend:
    """A backend of `torch.compile` for one module.

    Args:
        name: Name of the module in the log.
        check: Whether the results of each graph are compared with torch's (`ResultCheck`).

    Attributes:
        programs: The programs that Dynamo traced.
    """

    def __init__(self, name: str, check: bool = False) -> None:
        self.name, self.check = name, check
        self.programs: list[_Program] = []
        self._logged = set[str]()

    def __call__(self, traced: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Return the function that computes a traced program; its graph is exported by the first call."""
        self.programs.append(_Program(self, traced))
        return self.programs[-1]

    def refresh(self) -> None:
        """Have all programs export their graphs again."""
        for each in self.programs:
            each.clear()

    def log(self, reason: str) -> None:
        """Log once why torch computes a call."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOGGER.warning("torch computes a call of %s: %s", self.name, reason)


@dataclass(frozen=True)
class _LoadedGraph:
    """A graph of a program.

    Attributes:
        integers: The integers that are constants of the graph.
        conditions: The sizes of inputs for which the graph is right.
        runs: Runs the graph.
        types: The types of the results.
        check: Compares the first results with torch's.
    """

    integers: tuple[int, ...]
    conditions: _SizeConditions
    runs: GraphRuns
    types: tuple[torch.dtype, ...]
    check: ResultCheck


class _Program:
    """A traced function of weights, inputs and integers."""

    def __init__(self, backend: OrtBackend, traced: torch.fx.GraphModule) -> None:
        self._backend, self._traced = backend, traced
        self.graphs: list[_LoadedGraph] = []
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._state = TensorVersions([])
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        # Dynamo passes parameters, buffers and tensors among a module's attributes to each call.
        statics = [bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")) for node in placeholders]
        values = [node.meta["example_value"] for node in placeholders]
        self._weights = [index for index, is_static in enumerate(statics) if is_static]
        self._inputs = [
            index for index, value in enumerate(values) if isinstance(value, torch.Tensor) and not statics[index]
        ]
        sizes = {
            _expression(size): (position, axis)
            for position, index in enumerate(self._inputs)
            for axis, size in enumerate(values[index].shape)
        }
        others = [index for index, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        # Integers that are sizes of inputs, by the input and the axis; a graph has the other ones as constants.
        self._sizes = {index: sizes[found] for index in others if (found := _expression(values[index])) in sizes}
        self._integers = [index for index in others if index not in self._sizes]

    def clear(self) -> None:
        """Forget the graphs."""
        with self._lock:
            self.graphs.clear()

    def __call__(self, *args: Any) -> Any:
        """Compute a call; the arguments are in the order of the program's placeholders."""
        inputs = [args[index] for index in self._inputs]
        try:
            graph = self._graph_for(args, inputs)
            outputs = _outputs(graph.runs, inputs)
        except _NoGraphError as reason:
            self._backend.log(str(reason))
            return self._traced(*args)
        result = tuple(each.to(dtype) for each, dtype in zip(outputs, graph.types, strict=True))
        return graph.check.checked(result, lambda: tuple(self._traced(*args)), inputs)

    def _graph_for(self, args: Sequence[Any], inputs: Sequence[torch.Tensor]) -> _LoadedGraph:
        """Return the graph of a call, exported if necessary."""
        weights = [args[index] for index in self._weights]
        if not inputs:
            raise _NoGraphError("it has no tensor among its arguments")
        device = _device_of([*inputs, *weights])
        if torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs, *weights)):
            raise _NoGraphError("it requires a gradient, outside torch.no_grad and torch.inference_mode")
        if torch.is_autocast_enabled(device.type):
            raise _NoGraphError("autocast is enabled")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise _NoGraphError("a CUDA graph is being captured")
        shapes = tuple(tuple(each.shape) for each in inputs)
        integers = tuple(args[index] for index in self._integers)
        if not all(isinstance(each, int) for each in integers):
            raise _NoGraphError("it has other arguments than tensors and integers")
        with self._lock:
            if self._refusal is not None:
                raise _NoGraphError(self._refusal)
            if self.graphs and not self._state.is_current(weights):
                _LOGGER.warning("%s changed after it was compiled, and is compiled again", self._backend.name)
                self.graphs.clear()
            for graph in self.graphs:
                if graph.integers == integers and graph.conditions.hold(shapes):
                    if graph.check.failed:
                        raise _NoGraphError("its graph disagrees with torch")
                    return graph
            if len(self.graphs) >= MAX_GRAPHS:
                raise _NoGraphError(f"it has been called with {MAX_GRAPHS} other kinds of arguments")
            self._state = TensorVersions(weights)
            try:
                self.graphs.append(self._loaded(weights, inputs, integers, device))
            except _NoGraphError as reason:
                self._refusal = str(reason)
                raise
            return self.graphs[-1]

    def _loaded(
        self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], integers: tuple[int, ...],
        device: torch.device,
    ) -> _LoadedGraph:  # fmt: skip
        """Export and load a graph.

        Raises:
            _NoGraphError: The program cannot be exported, or the graph would not compute the same.
            DeviceMemoryError: There is too little memory.
        """
        start = time.perf_counter()
        outputs: Any = self._traced.graph.output_node().args[0]
        results = [node.meta["example_value"] for node in outputs]
        if not results or not all(isinstance(each, torch.Tensor) for each in results):
            raise _NoGraphError("it returns something other than tensors")
        types = tuple(each.dtype for each in results)
        if unknown := [each for each in types if each not in _TYPES]:
            raise _NoGraphError(f"it returns a tensor of {unknown[0]}")
        constants = dict(zip(self._integers, integers, strict=True)) | dict(zip(self._weights, weights, strict=True))
        function = _Function(self._traced, constants, self._inputs, self._sizes)
        model, conditions = _exported(function, inputs)
        is_half = any(each.dtype == torch.float16 for each in (*weights, *inputs))
        widened = {ir.DataType.BFLOAT16, *([ir.DataType.FLOAT16] if device.type == "cpu" else [])}
        target = target_on(device, torch.float16 if is_half else torch.float32)
        try:
            widen(model, widened)
            fuse_model(model, self._backend.name, target.device)
            graph = load_model(model, self._backend.name, target)
        except DeviceMemoryError:
            raise
        except Exception as error:  # a graph of any form may reach the rules
            raise _NoGraphError(f"its graph cannot be used ({first_line(error)})") from error
        _LOGGER.debug("compiled a call of %s in %.1f s", self._backend.name, time.perf_counter() - start)
        check = ResultCheck(self._backend.name, self._backend.check, is_half)
        return _LoadedGraph(integers, conditions, graph_runs(graph, target), types, check)


class _SizeConditions:
    """The sizes of inputs for which a graph computes the same as its program.

    They are the sizes that torch.export fixed, the ranges of those that it left open, and its decisions on sizes.

    Args:
        inputs: The inputs as torch.export traced them, with symbols for sizes.
        ranges: The smallest and largest value of each symbol.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], ranges: dict[sympy.Symbol, Any]) -> None:
        self._ranks = [tensor.ndim for tensor in inputs]
        self._sizes = [_expression(size) for tensor in inputs for size in tensor.shape]
        self._ranges = ranges
        records: Any = inputs[0]
        env = records.fake_mode.shape_env
        self._guards = {env.replace(guard.expr) for guard in env.guards}
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


class _Function(torch.nn.Module):
    """A program as a function of its inputs.

    Args:
        traced: The program.
        constants: The weights and integers, by the index of the argument.
        inputs: The indexes of the inputs.
        sizes: Arguments that are sizes: the position of an input, and its axis.
    """

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        constants: Mapping[int, Any],
        inputs: Sequence[int],
        sizes: Mapping[int, tuple[int, int]],
    ) -> None:
        super().__init__()
        self.traced = traced
        self._numbers = {index: value for index, value in constants.items() if isinstance(value, int)}
        self._buffer_names = {index: f"weight_{index}" for index in constants.keys() - self._numbers.keys()}
        self._places, self._sizes = list(inputs), dict(sizes)
        for index, name in self._buffer_names.items():
            self.register_buffer(name, constants[index].detach())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program."""
        arguments: dict[int, Any] = {**self._numbers, **dict(zip(self._places, tensors, strict=True))}
        arguments |= {index: getattr(self, name) for index, name in self._buffer_names.items()}
        arguments |= {index: tensors[position].shape[axis] for index, (position, axis) in self._sizes.items()}
        return tuple(self.traced(*(arguments[index] for index in range(len(arguments)))))


def _exported(function: _Function, inputs: Sequence[torch.Tensor]) -> tuple[ir.Model, _SizeConditions]:
    """Export a function, with open sizes if possible.

    Returns:
        The graph, with inputs `input_0` and so on, and the sizes for which it is right.

    Raises:
        _NoGraphError: It cannot be exported, or the graph would not compute the same.
    """
    failure = _NoGraphError()
    for size in (torch.export.Dim.AUTO, torch.export.Dim.STATIC):
        try:
            return _export(function, inputs, size)
        except _NoGraphError as error:
            failure = error
        except Exception as error:  # exceptions of torch.export have no common base class
            failure = _NoGraphError(f"torch.export failed ({first_line(error)})")
            failure.__cause__ = error
    raise failure


def _export(function: _Function, inputs: Sequence[torch.Tensor], size: Any) -> tuple[ir.Model, _SizeConditions]:
    # Tensors of inference mode cannot be traced. The values are not read.
    with torch.inference_mode(False), torch.no_grad(), quiet_exporter():
        examples = tuple(torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in inputs)
        axes = tuple(dict.fromkeys(range(each.ndim), size) for each in examples)
        captured = torch.export.export(function.eval(), examples, dynamic_shapes=(axes,), strict=False)
        program = required(
            torch.onnx.export(
                captured,
                custom_translation_table=FLOOR_DIVISION,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                input_names=[f"input_{index}" for index in range(len(inputs))],
                verbose=False,
            ),
            "exported program",
        )
    _require_function(required(program.exported_program, "exported program"))
    model = program.model
    simplify(model)
    if random := sorted({node.op_type for node in model.graph.all_nodes()} & _RANDOM):
        raise _NoGraphError(f"it generates random numbers ({random[0]})")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = numbered(required(value.shape, f"shape of {value.name}"))
    values = {node.name: node.meta.get("val") for node in captured.graph.nodes if node.op == "placeholder"}
    traced = [values[name] for name in captured.graph_signature.user_inputs]
    conditions = _SizeConditions(traced, dict(captured.range_constraints))
    if not conditions.hold(tuple(tuple(each.shape) for each in inputs)):
        raise _NoGraphError("its conditions on sizes cannot be evaluated")
    return model, conditions


def _require_function(captured: torch.export.ExportedProgram) -> None:
    """Raise unless a program, with changes in place as outputs, is a function of its inputs only."""
    signature = captured.graph_signature
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise _NoGraphError("it changes its buffers")
    if signature.user_inputs_to_mutate:
        raise _NoGraphError("it changes its arguments in place")
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(
            value
        ):
            raise _NoGraphError("its sizes or its branches depend on the values of tensors")


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all tensors of a call.

    Raises:
        _NoGraphError: They are on several devices, or a graph cannot read one of them.
    """
    for each in tensors:
        # A subclass, such as a fake tensor of torch.compile, may have no memory.
        if type(each) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or each.layout is not torch.strided:
            raise _NoGraphError("it has a tensor that is not dense")
        if each.device.type not in ("cpu", "cuda") or each.device != tensors[0].device:
            raise _NoGraphError(f"it has tensors on {each.device} and {tensors[0].device}")
        if each.dtype not in _TYPES:
            raise _NoGraphError(f"it has a tensor of {each.dtype}")
        if not each.numel():
            raise _NoGraphError(f"it has a tensor of shape {tuple(each.shape)}")
    return tensors[0].device


def _outputs(runs: GraphRuns, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph.

    Raises:
        _NoGraphError: ONNX Runtime fails.
    """
    plain = [each.detach().resolve_neg() for each in inputs]
    halves = (torch.float16, torch.bfloat16)  # on a GPU, they are converted when they are copied
    fed = [each.float() if each.dtype in halves and not each.is_cuda else each for each in plain]
    try:
        return runs({f"input_{index}": each for index, each in enumerate(fed)})
    except SdonnxError:
        raise
    except Exception as error:  # exceptions of onnxruntime have no common base class
        raise _NoGraphError(f"its graph failed ({first_line(error)})") from error


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr
