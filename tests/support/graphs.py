"""Build small graphs from text, run them with ONNX Runtime's CPU provider, and compare them before and after."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import torch

from sdonnx.fusions.channels_last import convert_to_channels_last
from sdonnx.fusions.fusion_table import FUSIONS
from sdonnx.graph.match import PassOutcome, Rule, WalkRule, apply_rules, apply_walk_rules
from sdonnx.graph.passes import infer_shapes, tidy
from sdonnx.operators.operator_table import LowerContribOperators

Array = npt.NDArray[Any]

OPSET = 23
# Sizes of the dynamic dimensions of test graphs. All differ, so that mistaken axes are noticed.
SIZES = {"B": 2, "S": 6, "L": 5, "C": 8, "H": 4, "W": 7}
IMAGE_SIZES = {"B": 2, "H": 6, "W": 8, "P": 3, "Q": 4}


def graph(inputs: str, outputs: str, body: str, known: str = "", /, **weights: Array) -> ir.Model:
    """Return a graph in ONNX's textual syntax, with its shapes inferred and `weights` as initializers.

    ONNX infers no shape of a group norm's output; `known` declares those that are needed.
    """
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {OPSET}, "com.microsoft" : 1]>\n'
        f"small ({inputs}) => ({outputs}) {f'<{known}>' if known else ''} {{ {body} }}"
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def used(text: str, known: Mapping[str, Array], given: str = "") -> dict[str, Array]:
    """Return the known weights that a graph's text reads and that are not among the inputs `given`."""
    names = set(re.findall(r"\w+", text)) - set(re.findall(r"\w+", given))
    return {name: array for name, array in known.items() if name in names}


def exported(net: torch.nn.Module, *examples: torch.Tensor, dynamic: Sequence[Mapping[int, str]] = ()) -> ir.Model:
    """Return the net as torch exports it, with its shapes inferred.

    Args:
        net: the net; its arguments are tensors.
        examples: its arguments.
        dynamic: for each argument its dynamic axes, by name.
    """
    # The exporter warns of its own internals, and warnings are errors in the tests.
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    registration.setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad(), unmeasured():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            net.eval(), examples, dynamo=True, opset_version=OPSET, verbose=False, dynamic_shapes=tuple(dynamic) or None
        )
    assert program is not None
    program.model.graph.opset_imports["com.microsoft"] = 1
    infer_shapes(program.model)
    return program.model


def torchscript(
    net: torch.nn.Module, *examples: torch.Tensor, dynamic: Sequence[Mapping[int, str]] = (), opset: int = 17
) -> ir.Model:
    """Return the net as torch's older exporter writes it, at an older opset; see `exported`.

    Inputs are named x0, x1... Its shapes are not inferred: `prepare` does that.
    """
    names = [f"x{index}" for index in range(len(examples))]
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad(), unmeasured():
        warnings.simplefilter("ignore")  # about the exporter's own internals and its deprecation
        torch.onnx.export(
            net.eval(),
            examples,
            cast(Any, file),  # torch accepts a stream also, though it declares only paths
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes=dict(zip(names, map(dict, dynamic), strict=False)),
        )
    return ir.from_proto(onnx.load_from_string(file.getvalue()))


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Pause the measurement of coverage while a library works, which takes twice as long with it."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


def copied(model: ir.Model) -> ir.Model:
    """Return an independent copy, through the file format."""
    return ir.from_proto(ir.to_proto(model))


def text_of(model: ir.Model) -> str:
    """Return the graph's structure as text, to find out whether a pass changed anything."""
    return str(ir.to_proto(model).graph)


def operators(model: ir.Model, *names: str) -> dict[str, int]:
    """Return the number of nodes of each operator; only of `names`, if given."""
    counts = dict.fromkeys(names, 0)
    for node in model.graph:
        if not names or node.op_type in names:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def interface(model: ir.Model) -> list[tuple[str | None, str, str]]:
    """Return name, type and shape of each input and output."""
    values = [*model.graph.inputs, *model.graph.outputs]
    return [(value.name, str(value.dtype), str(value.shape)) for value in values]


def feeds_for(model: ir.Model, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> dict[str, Array]:
    """Return random values for the graph's inputs: normal ones, or integers from 0 to 9."""
    generator = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        assert value.name is not None
        shape = [dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in value.shape.dims]
        dtype = value.dtype.numpy()
        if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
            feeds[value.name] = generator.integers(0, 10, shape).astype(dtype)
        else:
            feeds[value.name] = generator.standard_normal(shape).astype(dtype)
    return feeds


def lowered(model: ir.Model, keep: Callable[[ir.Node], bool] = lambda _: False) -> onnx.ModelProto:
    """Return the graph in standard operators, checked by ONNX's own checker."""
    onnx.checker.check_model(ir.to_proto(model))
    plain = copied(model)
    LowerContribOperators(keep)(plain)
    plain.graph.sort()
    proto = ir.to_proto(plain)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(
    model: ir.Model, feeds: Mapping[str, Array], keep: Callable[[ir.Node], bool] = lambda _: False
) -> dict[str, Array]:
    """Run the graph, lowered to standard operators, without ONNX Runtime's own fusions."""
    session = lowered_session(model, keep)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def lowered_session(model: ir.Model, keep: Callable[[ir.Node], bool] = lambda _: False) -> onnxruntime.InferenceSession:
    """Load the graph, lowered to standard operators, without ONNX Runtime's own fusions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    proto = lowered(model, keep)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def relative_error(found: Array, expected: Array) -> float:
    """Return the largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    wide, reference = found.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(wide).all()
    return float(np.abs(wide - reference).max(initial=0.0) / max(float(np.abs(reference).max(initial=0.0)), 1e-30))


def assert_same_function(
    model: ir.Model, original: ir.Model, tolerance: float = 1e-5, seed: int = 0, sizes: Mapping[str, int] = SIZES
) -> None:
    """Check that two graphs have one interface and, on random inputs, one result."""
    assert interface(model) == interface(original)
    feeds = feeds_for(original, seed, sizes)
    found, expected = run(model, feeds), run(original, feeds)
    for name, values in expected.items():
        assert relative_error(found[name], values) < tolerance, name


def _assert_settles(
    model: ir.Model,
    apply: Callable[[ir.Model], object],
    first: object,
    second: object,
    tolerance: float = 1e-5,
    sizes: Mapping[str, int] = SIZES,
) -> ir.Model:
    """Rewrite a graph twice; check what `apply` returns, that the function stays, and that nothing changes then."""
    rewritten = copied(model)
    assert apply(rewritten) == first
    tidy(rewritten)
    infer_shapes(rewritten)
    assert_same_function(rewritten, model, tolerance, sizes=sizes)
    again = copied(rewritten)
    assert apply(again) == second
    tidy(again)
    infer_shapes(again)
    assert text_of(again) == text_of(copied(rewritten))
    return rewritten


def _assert_reason(failures: Sequence[Any], rule: type[Rule] | type[WalkRule], reason: str | None) -> None:
    """Check that a rule refused for this reason; None: the graph is not a candidate."""
    if reason is None:
        assert failures == []
    else:
        assert any(reason in failure.reason for failure in failures), failures
        assert {failure.rule for failure in failures} == {rule.__name__}


def assert_fires(
    model: ir.Model,
    rule: type[Rule],
    times: int,
    commute: bool = False,
    tolerance: float = 1e-5,
    sizes: Mapping[str, int] = SIZES,
) -> ir.Model:
    """Check that a rule fires so many times, and the properties of every rule; return the rewritten graph."""
    return _assert_settles(model, lambda each: apply_rules(each, [rule], commute)[0], times, 0, tolerance, sizes)


def assert_refuses(model: ir.Model, rule: type[Rule], reason: str | None, commute: bool = False) -> None:
    """Check that the rule refuses the graph for this reason, unchanged; None: the graph is not a candidate."""
    before = text_of(model)
    fired, failures = apply_rules(model, [rule], commute)
    assert fired == 0
    assert text_of(model) == before
    _assert_reason(failures, rule, reason)


def assert_walk_rule_fires(
    model: ir.Model, rule: type[WalkRule], times: int = 1, tolerance: float = 1e-5, sizes: Mapping[str, int] = SIZES
) -> ir.Model:
    """Check that a rule fires so many times, and the properties of every rule; return the rewritten graph."""
    first, second = {rule.__name__: times}, {rule.__name__: 0}
    return _assert_settles(model, lambda each: apply_walk_rules(each, [rule])[0], first, second, tolerance, sizes)


def assert_pass_fires(
    model: ir.Model, run: Callable[[ir.Model], PassOutcome], fired: dict[str, int], done: dict[str, int]
) -> ir.Model:
    """Run a pass; check its result, that the function stays, and that a second run returns `done`, for no change."""
    return _assert_settles(model, run, PassOutcome(fired), PassOutcome(done))


def assert_walk_rule_refuses(model: ir.Model, rule: type[WalkRule], reason: str | None = None) -> None:
    """Check that the rule refuses the graph for this reason, unchanged; None: the graph is not a candidate."""
    left = copied(model)
    tidy(left)
    before = text_of(left)
    fired, failures = apply_walk_rules(left, [rule])
    tidy(left)  # nodes that were inserted before the refusal are unused
    assert fired == {rule.__name__: 0}
    assert text_of(left) == before
    _assert_reason(failures, rule, reason)


CONVERTERS = dict(fusion.converts for fusion in FUSIONS if fusion.converts is not None)


def channels_last(model: ir.Model, tolerance: float = 1e-4) -> tuple[ir.Model, PassOutcome]:
    """Apply the channels-last pass; check that the function stays and that a second run changes nothing."""
    rewritten = copied(model)
    outcome = convert_to_channels_last(rewritten, CONVERTERS)
    tidy(rewritten)
    infer_shapes(rewritten)
    assert_same_function(rewritten, model, tolerance, sizes=IMAGE_SIZES)
    again = copied(rewritten)
    assert convert_to_channels_last(again, CONVERTERS).fired == {}
    tidy(again)
    infer_shapes(again)
    assert text_of(again) == text_of(copied(rewritten))
    return rewritten, outcome


def node_of(model: ir.Model, op_type: str) -> ir.Node:
    """Return the graph's only node of an operator."""
    (node,) = (node for node in model.graph if node.op_type == op_type)
    return node


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Return normal float32 values."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def int64(values: Sequence[int] | int) -> Array:
    """Return an int64 tensor."""
    return np.array(values, np.int64)
