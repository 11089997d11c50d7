"""The rules of SamplerInput and SamplerStep: replace what a step graph computes around the denoiser.

`sdonnx.compose.step` writes it with some twenty standard operators, each a launch of a few microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant_value, dims, input_of, insert_multi, producer_node, replace
from sdonnx.graph.match import MatchFailure, ancestors, match_failure, producer_of
from sdonnx.models import abi
from sdonnx.operators.contract import TO_NCHW, TO_NHWC
from sdonnx.operators.kernel_case import OUR_DOMAIN
from sdonnx.operators.sdonnx_domain.sampler import check_sampler_input, check_sampler_step
from sdonnx.samplers.plans import HEADER, matrix_start

__all__ = ["SAMPLER_RULES", "use_sampler_kernels"]

SAMPLER_RULES = ("SampleToOwnSamplerInput", "StateToOwnSamplerStep")
"""The names of the replacements, which are made together or not at all."""

_INPUTS = (abi.STATE, abi.NOISE, abi.PARAMETERS, abi.STEP_INDEX, abi.KNOWN_LATENTS, abi.KEEP_MASK)
_END = int(np.iinfo(np.int64).max)


class _DifferentError(Exception):
    """The graph computes something else than `compose_step` writes; the message says what differs."""


@dataclass(frozen=True)
class _Step:
    """The values of a step graph between which the sampler computes.

    Attributes:
        row: the row of parameters.
        sample: the denoiser's input, of one copy.
        prediction: the denoiser's output, before a cast, with all its channels.
        this_index: the index of this call, computed from the row; None if nothing reads it.
    """

    row: ir.Value
    sample: ir.Value
    prediction: ir.Value
    this_index: ir.Value | None


def use_sampler_kernels(model: ir.Model) -> tuple[dict[str, int], list[MatchFailure]]:
    """Replace the nodes around the denoiser in a step graph, in place; other graphs stay as they are.

    Returns:
        How often each of `SAMPLER_RULES` fired, and why they did not.
    """
    inputs = {value.name or "": value for value in model.graph.inputs}
    outputs = {value.name or "": value for value in model.graph.outputs}
    if not inputs.keys() >= set(_INPUTS) or not outputs.keys() >= {abi.NEW_STATE, abi.NEXT_STEP_INDEX}:
        return {}, []
    new_state = outputs[abi.NEW_STATE]
    node = new_state.producer()
    if node is None or node.domain == OUR_DOMAIN:
        return {}, []
    try:
        step = _find(inputs, outputs)
        reason = check_sampler_input(inputs[abi.STATE], inputs[abi.PARAMETERS], inputs[abi.STEP_INDEX])
        reason = reason or check_sampler_step(*_step_inputs(step, step.prediction, inputs, step.row))
    except _DifferentError as error:
        reason = str(error)
    if reason is not None:
        return {}, [match_failure(rule, node, reason) for rule in SAMPLER_RULES]
    _rewrite(step, inputs, outputs)
    return dict.fromkeys(SAMPLER_RULES, 1), []


def _find(inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value]) -> _Step:
    """Return the values around the denoiser.

    Raises:
        _DifferentError: the graph is not as `compose_step` writes it.
    """
    chosen = _read(outputs[abi.NEW_STATE], "Reshape")
    where = producer_of(chosen, "Where")
    if where is None or _read(where.inputs[0], "Reshape") is not inputs[abi.KEEP_MASK]:
        raise _DifferentError("the new state is not chosen by the mask")
    kept, updated = producer_of(where.inputs[1], "MatMul"), producer_of(where.inputs[2], "MatMul")
    if kept is None or _read(kept.inputs[1], "Reshape") is not inputs[abi.KNOWN_LATENTS]:
        raise _DifferentError("the known latents are not weighted")
    rows = None if updated is None else producer_of(updated.inputs[1], "Concat")
    if updated is None or rows is None or len(rows.inputs) != 3:
        raise _DifferentError("the state, the noise and the predictions are not multiplied by a matrix")
    state, noise, predictions = (_read(value, "Reshape") for value in rows.inputs)
    if state is not inputs[abi.STATE] or noise is not inputs[abi.NOISE]:
        raise _DifferentError("the matmul is of other values than the state and the noise")
    row = _columns(_read(kept.inputs[0], "Reshape"), HEADER, matrix_start())
    if _columns(_read(updated.inputs[0], "Reshape"), matrix_start(), _END) is not row:
        raise _DifferentError("the matrix is not in the row of the weights")
    gather = producer_of(row, "Gather")
    if gather is None or list(gather.inputs) != [inputs[abi.PARAMETERS], inputs[abi.STEP_INDEX]]:
        raise _DifferentError("the row is not that of the step index")
    prediction = _read(predictions, "Cast")
    cut = producer_of(prediction, "Slice")
    if cut is not None and [_numbers(value) for value in cut.inputs[1:4:2]] == [[0], [1]]:
        prediction = input_of(cut, 0)
    if prediction is None:
        raise _DifferentError("the prediction is not cast to float32")
    sample = _find_sample(row, inputs[abi.STATE])
    this_index = _find_index(row, outputs[abi.NEXT_STEP_INDEX], prediction)
    if any(use.node is not gather and use.node not in ancestors(prediction)
           for use in inputs[abi.STEP_INDEX].uses()):  # fmt: skip
        raise _DifferentError("the step index is read after the denoiser")
    return _Step(row, sample, prediction, this_index)


def _find_sample(row: ir.Value, state: ir.Value) -> ir.Value:
    """Return the latents times the input scale, in the denoiser's type."""
    for use in state.uses():
        latents = use.node
        if latents.op_type != "Gather" or _numbers(latents.inputs[1]) != 0:
            continue
        scaled = [each.node for each in latents.outputs[0].uses()]
        if len(scaled) != 1 or scaled[0].op_type != "Mul" or scaled[0].inputs[0] is not latents.outputs[0]:
            break
        if _columns(_read(scaled[0].inputs[1], "Reshape"), 2, 3) is not row:
            break
        casts = [each.node for each in scaled[0].outputs[0].uses()]
        if len(casts) == 1 and casts[0].op_type == "Cast" and casts[0].outputs[0].dtype == ir.DataType.FLOAT16:
            return casts[0].outputs[0]
    raise _DifferentError("the denoiser does not read the scaled latents in float16, and nothing else")


def _find_index(row: ir.Value, next_index: ir.Value, prediction: ir.Value) -> ir.Value | None:
    """Return the index of this call, which is computed from the next one and only the denoiser reads."""
    if _columns(_read(_read(next_index, "Cast"), "Reshape"), 0, 1) is not row:
        raise _DifferentError("the next index is not in the row")
    users = [use.node for use in next_index.uses()]
    if not users:
        return None
    if len(users) > 1 or users[0].op_type != "Sub" or _numbers(users[0].inputs[1]) != [1]:
        raise _DifferentError("the next index is read by more than the index of this call")
    this_index = users[0].outputs[0]
    before = ancestors(prediction)
    if any(use.node not in before for use in this_index.uses()):
        raise _DifferentError("the index of this call is read after the denoiser")
    return this_index


def _rewrite(step: _Step, inputs: Mapping[str, ir.Value], outputs: Mapping[str, ir.Value]) -> None:
    sample, anchor = step.sample, producer_node(step.row)
    transposes = [use.node for use in sample.uses()]
    channels_last = bool(transposes) and all(map(_is_to_nhwc, transposes)) and not sample.is_graph_output()
    shape = transposes[0].outputs[0].shape if channels_last else sample.shape
    new_sample, new_row = insert_multi(
        anchor,
        "SamplerInput",
        [inputs[abi.STATE], inputs[abi.PARAMETERS], inputs[abi.STEP_INDEX]],
        {"channels_last": int(channels_last)},
        2,
        domain=OUR_DOMAIN,
        shapes=[shape, [1, *(dims(inputs[abi.PARAMETERS]) or ())[1:]]],
    )
    new_sample.type = sample.type
    for old in [transpose.outputs[0] for transpose in transposes] if channels_last else [sample]:
        replace(old, new_sample)
    replace(step.row, new_row)
    if step.this_index is not None:
        replace(step.this_index, inputs[abi.STEP_INDEX])
    prediction, is_last = step.prediction, False
    transpose = producer_of(prediction, "Transpose")
    if transpose is not None and list(transpose.attributes.get_ints("perm", ())) == TO_NCHW:
        prediction, is_last = input_of(transpose, 0), True
    new_state, next_index = outputs[abi.NEW_STATE], outputs[abi.NEXT_STEP_INDEX]
    results = insert_multi(
        producer_node(new_state),
        "SamplerStep",
        _step_inputs(step, prediction, inputs, new_row),
        {"channels_last": int(is_last)},
        2,
        domain=OUR_DOMAIN,
        shapes=[new_state.shape, next_index.shape],
    )
    results[0].type, results[1].type = new_state.type, next_index.type
    replace(new_state, results[0])
    replace(next_index, results[1])


def _step_inputs(
    step: _Step, prediction: ir.Value, inputs: Mapping[str, ir.Value], row: ir.Value
) -> tuple[ir.Value, ...]:
    """Return the inputs of SamplerStep."""
    return prediction, inputs[abi.STATE], inputs[abi.NOISE], row, inputs[abi.KNOWN_LATENTS], inputs[abi.KEEP_MASK]


def _is_to_nhwc(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes.get_ints("perm", ())) == TO_NHWC


def _read(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Return the first input of the operator that computes a value."""
    node = producer_of(value, op_type)
    return None if node is None else node.inputs[0]


def _numbers(value: ir.Value | None) -> object:
    """Return the numbers that a constant holds, as Python values; None for other values."""
    found = constant_value(value)
    return None if found is None else found.tolist()


def _columns(value: ir.Value | None, start: int, end: int) -> ir.Value:
    """Return the matrix of which a value is the columns [start, end).

    Raises:
        _DifferentError: it is something else.
    """
    node = producer_of(value, "Slice")
    if node is None or [_numbers(each) for each in node.inputs[1:]] != [[start], [end], [1]]:
        raise _DifferentError(f"the columns {start} to {end} of the parameters are not read")
    return input_of(node, 0)
