"""sdonnx::SamplerInput(state (R,B,C,H,W), parameters (calls,P), step_index (1,)) -> sample, row (1,P).

row = parameters[step_index], and sample = state[0] * row[2], the denoiser's input in fp16: (B,C,H,W), or (B,H,W,C) with
the attribute channels_last. `sdonnx.samplers.parameters` describes a row. State, parameters and row are float32. The
product is rounded to float32, then to fp16, as by Mul and Cast. The kernel is kernels/src/sampler.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx_ir as ir

from sdonnx.graph.edit import constant, dims, graph_of, input_of, insert, static_dim
from sdonnx.operators.contract import Contract
from sdonnx.operators.kernel_case import OWN_DOMAIN, Fill, KernelCase
from sdonnx.operators.reference_body import TO_NHWC
from sdonnx.samplers.parameters import row_size
from sdonnx.samplers.plans import STATE_ROWS

__all__ = ["OWN_SAMPLER_INPUT", "check_own_sampler_input"]

_INPUT_SCALE = 2  # the place of the input scale in a row


def check_own_sampler_input(state: ir.Value, parameters: ir.Value, step_index: ir.Value) -> str | None:
    """Return why the kernel does not accept a state (R,B,C,H,W), parameters (calls,P) and an index (1,), else None."""
    if len(dims(state) or ()) != 5 or static_dim(state, 0) not in (None, STATE_ROWS):
        return f"the state is not known to be ({STATE_ROWS},B,C,H,W)"
    if {state.dtype, parameters.dtype} != {ir.DataType.FLOAT} or step_index.dtype != ir.DataType.INT64:
        return "the state and the parameters are not FLOAT, or the index is not INT64"
    return None


def _limits(node: ir.Node) -> str | None:
    return check_own_sampler_input(*(input_of(node, index) for index in range(3)))


def _lower(node: ir.Node) -> list[ir.Value | None]:
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


def _kernel_cases() -> Iterator[KernelCase]:
    # Less than a block, whole and partial blocks, one pixel, no image, a row longer than a block.
    sizes = ((1, 4, 8, 8), (2, 4, 9, 13), (3, 4, 1, 1), (2, 16, 5, 7), (0, 4, 8, 8))
    cases = [*product(sizes, (0, 1), (row_size(2),)), ((1, 4, 3, 5), 1, row_size(1)), ((1, 4, 64, 64), 1, 300)]
    for latents, channels_last, columns in cases:
        empty = " 0 rows" if 0 in latents else ""
        yield KernelCase(
            "SamplerInput",
            f"{'x'.join(map(str, latents))} P={columns} channels_last={channels_last}{empty}",
            ((STATE_ROWS, *latents), (5, columns), (1,)),
            {"channels_last": channels_last},
            2,
            fills={2: Fill.ROW_INDEX},
            domain=OWN_DOMAIN,
        )


OWN_SAMPLER_INPUT = Contract(
    "SamplerInput",
    _lower,
    _kernel_cases,
    first_use=(f"2x4x9x13 P={row_size(2)} channels_last=0", f"2x4x9x13 P={row_size(2)} channels_last=1"),
    limits=_limits,
    domain=OWN_DOMAIN,
    dtypes=frozenset({ir.DataType.FLOAT16}),
    float32_inputs=frozenset({0, 1}),
    output_rank=4,
    other_outputs={1: (ir.DataType.FLOAT, 2)},
)
