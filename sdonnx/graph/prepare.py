"""Prepare a graph of any exporter for rewriting: one opset, folded constants, known sizes."""

from __future__ import annotations

import logging

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.version_converter
from onnx_ir.passes import common as common_passes

from sdonnx.graph.edit import constant, replace
from sdonnx.graph.passes import FoldWeightTransposes, SimplifyReshapes, tidy
from sdonnx.graph.shapes.inference import Sizes

__all__ = ["OPSET", "prepare"]

OPSET = 23  # the rules are written for its operators

# Weights are larger and stay on disk; values computed from sizes are smaller.
_MAX_FOLDED_BYTES = 1024


def prepare(model: ir.Model) -> None:
    """Bring a graph of any opset from 14 to 23, from any exporter, to the form that rules expect.

    Afterwards, operators belong to opset 23, constants are initializers, and everything but weights that can be
    computed without inputs is folded. Each value, outputs included, has its shape in terms of the inputs' sizes.
    """
    _convert(model)
    # A graph's name "height/2" would be inferred as floor(height/2); two names for one size must not remain.
    for node in model.graph:
        if node.domain in ("", "ai.onnx"):  # the shapes of other operators cannot be inferred again
            for output in node.outputs:
                output.shape = None
    FoldWeightTransposes()(model)
    common_passes.ShapeInferencePass()(model)
    for _ in range(3):
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        sizes = Sizes(model.graph)
        sizes.write(outputs=True)
        if not _write_numbers(model, sizes) and not _fold(model):
            break
    SimplifyReshapes()(model)
    tidy(model)


def _convert(model: ir.Model) -> None:
    """Raise the graph's opset to OPSET."""
    if model.opset_imports.get("", OPSET) == OPSET:
        return
    chatty = logging.getLogger("onnxscript.version_converter")
    level = chatty.level
    chatty.setLevel(logging.ERROR)  # it logs each conversion that it leaves to onnx
    try:
        onnxscript.version_converter.convert_version(model, OPSET, fallback=True)
    finally:
        chatty.setLevel(level)


def _write_numbers(model: ir.Model, sizes: Sizes) -> int:
    """Replace every computed size that is a known number by a constant."""
    written = 0
    for node in list(model.graph):
        if len(node.outputs) != 1 or not node.outputs[0].uses():
            continue
        output = node.outputs[0]
        numbers = sizes.numbers(output)
        if numbers is None or output.dtype is None or output.is_graph_output():
            continue
        name = "sizes_" + "_".join(str(number).replace("-", "m") for number in numbers.flat)
        name += "" if numbers.ndim else "_scalar"
        replace(output, constant(model.graph, numbers, output.dtype.numpy(), name))
        written += 1
    return written


def _fold(model: ir.Model) -> bool:
    # onnxscript treats an input's default as a constant when it decides an If, and drops the unused branch.
    defaults = {value: value.const_value for value in model.graph.inputs if value.is_initializer()}
    for value in defaults:
        value.const_value = None
    try:
        result = onnxscript.optimizer.fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=_MAX_FOLDED_BYTES,
            output_size_limit=_MAX_FOLDED_BYTES,
        )
    finally:
        for value, tensor in defaults.items():
            value.const_value = tensor
            if not value.is_initializer():
                model.graph.register_initializer(value)
    return bool(result.modified)
