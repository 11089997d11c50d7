"""SamplerInput and SamplerStep of the domain sdonnx.

SamplerInput(state (R,B,C,H,W), parameters (calls,P), step_index (1,)) -> sample, row (1,P).

row = parameters[step_index], and sample = state[0] * row[2], the denoiser's input in fp16: (B,C,H,W), or (B,H,W,C) with
the attribute channels_last. `sdonnx.samplers.plans` describes a row. State, parameters and row are float32. The
product is rounded to float32, then to fp16, as by Mul and Cast. The kernel is kernels/src/sampler.cuh.

SamplerStep(prediction, state, noise, row, known_latents, keep_mask) -> new_state, next_index (1,).

new_state (R,B,C,H,W) = where(keep_mask, weights @ known_latents, matrix @ [state, noise, predictions]): the linear
update of `sdonnx.samplers` with guidance and the mask. `row` (1,P) holds next_index, the weights (R,2) and the matrix
(R,R+1+G) as `sdonnx.samplers.plans` describes. The prediction (G*B,D,H,W), or (G*B,H,W,D) with the attribute
channels_last, is fp16 with D >= C channels, of which the first C are read. The state and the mask are (R,B,C,H,W),
noise is (B,C,H,W), and known_latents is (2,B,C,H,W); all are float32 but the mask.

Products are added in float32 in the order of the columns, each with one rounding, as ONNX Runtime's matmul on the CPU
does. The kernel is kernels/src/sampler.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, static_dim
from sdonnx.operators.contract import TO_NCHW, TO_NHWC, SdonnxContract, on_inputs, sdonnx_case
from sdonnx.operators.kernel_case import Fill, KernelCase
from sdonnx.samplers.plans import HEADER, STATE_ROWS, matrix_start, row_size

__all__ = ["SAMPLER_INPUT", "SAMPLER_STEP", "check_sampler_input", "check_sampler_step"]

_INPUT_SCALE = 2  # the place of the input scale in a row


def check_sampler_input(state: ir.Value, parameters: ir.Value, step_index: ir.Value) -> str | None:
    """Return why the kernel does not accept a state (R,B,C,H,W), parameters (calls,P) and an index (1,), else None."""
    if len(dims(state) or ()) != 5 or static_dim(state, 0) not in (None, STATE_ROWS):
        return f"the state is not known to be ({STATE_ROWS},B,C,H,W)"
    if {state.dtype, parameters.dtype} != {ir.DataType.FLOAT} or step_index.dtype != ir.DataType.INT64:
        return "the state and the parameters are not FLOAT, or the index is not INT64"
    return None


def _lower_sampler_input(node: ir.Node) -> list[ir.Value | None]:
    state, parameters, step_index = (input_of(node, index) for index in range(3))
    graph, kind = graph_of(node), node.outputs[0].dtype
    row = insert(node, "Gather", [parameters, step_index], {"axis": 0})
    first = constant(graph, 0, np.int64, "index_0")
    bounds = (constant(graph, [at], np.int64, f"integers_{at}") for at in (_INPUT_SCALE, _INPUT_SCALE + 1, 1))
    scale = insert(node, "Slice", [row, *bounds])
    scale = insert(node, "Reshape", [scale, constant(graph, [1], np.int64, "integers_1")])
    sample = insert(node, "Mul", [insert(node, "Gather", [state, first], {"axis": 0}), scale])
    sample = insert(node, "Cast", [sample], {"to": kind}, dtype=kind)
    if node.attributes.get_int("channels_last", 0):
        sample = insert(node, "Transpose", [sample], {"perm": TO_NHWC})
    return [sample, row]


def _sampler_input_cases() -> Iterator[KernelCase]:
    # Less than a block, whole and partial blocks, one pixel, no image, a row longer than a block.
    sizes = ((1, 4, 8, 8), (2, 4, 9, 13), (3, 4, 1, 1), (2, 16, 5, 7), (0, 4, 8, 8))
    cases = [*product(sizes, (0, 1), (row_size(2),)), ((1, 4, 3, 5), 1, row_size(1)), ((1, 4, 64, 64), 1, 300)]
    for latents, channels_last, columns in cases:
        empty = " 0 rows" if 0 in latents else ""
        yield sdonnx_case(
            "SamplerInput",
            f"{'x'.join(map(str, latents))} P={columns} channels_last={channels_last}{empty}",
            ((STATE_ROWS, *latents), (5, columns), (1,)),
            {"channels_last": channels_last},
            2,
            fills={2: Fill.ROW_INDEX},
        )


SAMPLER_INPUT = SdonnxContract(
    "SamplerInput",
    _lower_sampler_input,
    _sampler_input_cases,
    first_use=(f"2x4x9x13 P={row_size(2)} channels_last=0", f"2x4x9x13 P={row_size(2)} channels_last=1"),
    limits=on_inputs(check_sampler_input, 0, 1, 2),
    float32_inputs=frozenset({0, 1}),
    output_rank=4,
    other_outputs={1: (ir.DataType.FLOAT, 2)},
)


_INPUTS = 6
_PREDICTION, _STATE, _NOISE, _ROW, _KNOWN, _MASK = range(_INPUTS)
_FLOATS = (_STATE, _NOISE, _ROW, _KNOWN)


def check_sampler_step(*inputs: ir.Value) -> str | None:
    """Return why the kernel does not accept prediction, state, noise, row, known latents and mask; else None."""
    state, prediction = inputs[_STATE], inputs[_PREDICTION]
    if len(dims(state) or ()) != 5 or static_dim(state, 0) not in (None, STATE_ROWS):
        return f"the state is not known to be ({STATE_ROWS},B,C,H,W)"
    if len(dims(prediction) or ()) != 4:
        return "the prediction is not known to have four axes"
    if {inputs[index].dtype for index in _FLOATS} != {ir.DataType.FLOAT} or inputs[_MASK].dtype != ir.DataType.BOOL:
        return "the state, the noise, the parameters or the known latents are not FLOAT, or the mask is not BOOL"
    return SAMPLER_STEP.check_dtype(prediction)


def _lower_sampler_step(node: ir.Node) -> list[ir.Value | None]:
    prediction, state, noise, row, known, mask = (input_of(node, index) for index in range(_INPUTS))
    graph = graph_of(node)

    def integers(*values: int) -> ir.Value:
        return constant(graph, values, np.int64, "integers_" + "_".join(map(str, values)).replace("-", "m"))

    def flat(value: ir.Value, *sizes: int) -> ir.Value:
        return insert(node, "Reshape", [value, integers(*sizes)])

    def columns(start: int, end: int) -> ir.Value:
        return insert(node, "Slice", [row, integers(start), integers(end), integers(1)])

    if node.attributes.get_int("channels_last", 0):
        prediction = insert(node, "Transpose", [prediction], {"perm": TO_NCHW})
    channels = insert(node, "Shape", [state], {"start": 2, "end": 3}, dtype=ir.DataType.INT64)
    prediction = insert(node, "Slice", [prediction, integers(0), channels, integers(1)])
    prediction = insert(node, "Cast", [prediction], {"to": ir.DataType.FLOAT}, dtype=ir.DataType.FLOAT)
    batch, of_prediction = (
        insert(node, "Shape", [value], {"start": axis, "end": axis + 1}, dtype=ir.DataType.INT64)
        for value, axis in ((state, 1), (prediction, 0))
    )
    copies = insert(node, "Div", [of_prediction, batch])
    sizes = insert(node, "Concat", [copies, integers(-1)], {"axis": 0})
    rows = [flat(state, STATE_ROWS, -1), flat(noise, 1, -1), insert(node, "Reshape", [prediction, sizes])]
    matrix = flat(columns(matrix_start(), np.iinfo(np.int64).max), STATE_ROWS, -1)
    updated = insert(node, "MatMul", [matrix, insert(node, "Concat", rows, {"axis": 0})])
    kept = insert(node, "MatMul", [flat(columns(HEADER, matrix_start()), STATE_ROWS, 2), flat(known, 2, -1)])
    chosen = insert(node, "Where", [flat(mask, STATE_ROWS, -1), kept, updated], dtype=ir.DataType.FLOAT)
    shape = insert(node, "Shape", [state], dtype=ir.DataType.INT64)
    following = insert(node, "Cast", [flat(columns(0, 1), 1)], {"to": ir.DataType.INT64}, dtype=ir.DataType.INT64)
    return [insert(node, "Reshape", [chosen, shape]), following]


def _sampler_step_cases() -> Iterator[KernelCase]:
    # Less than a block, whole and partial blocks, one pixel, a learned variance, no guidance.
    sizes = ((1, 4, 8, 8), (2, 4, 9, 13), (3, 4, 1, 1), (2, 16, 5, 7))
    cases = [(latents, 2, latents[1], last) for latents, last in product(sizes, (0, 1))]
    cases += [((2, 4, 5, 7), 2, 8, last) for last in (0, 1)]
    cases += [((2, 4, 5, 7), 1, of, last) for of, last in product((4, 8), (0, 1))]
    cases += [((1, 4, 64, 64), 2, 4, 1)]
    for latents, copies, of_prediction, channels_last in cases:
        batch, _, *size = latents
        images = copies * batch
        prediction = (images, *size, of_prediction) if channels_last else (images, of_prediction, *size)
        state = (STATE_ROWS, *latents)
        yield sdonnx_case(
            "SamplerStep",
            f"{'x'.join(map(str, latents))} G={copies} D={of_prediction} channels_last={channels_last}",
            (prediction, state, latents, (1, row_size(copies)), (2, *latents), state),
            {"channels_last": channels_last},
            2,
            fills={_MASK: Fill.KEEP_MASK},
        )


SAMPLER_STEP = SdonnxContract(
    "SamplerStep",
    _lower_sampler_step,
    _sampler_step_cases,
    first_use=(
        "2x4x9x13 G=2 D=4 channels_last=1",
        "2x4x5x7 G=2 D=8 channels_last=0",
        "2x4x5x7 G=1 D=4 channels_last=1",
    ),
    limits=on_inputs(check_sampler_step, *range(_INPUTS)),
    float32_inputs=frozenset(_FLOATS),
    other_outputs={0: (ir.DataType.FLOAT, 5), 1: (ir.DataType.INT64, 1)},
)
