"""The parameter table: what the host tells every call of the step graph, in one upload before the first.

A row holds, in this order: the index of the next row (its own plus 1), the timestep, the input scale, the background's
weights (STATE_ROWS, 2) and the matrix (STATE_ROWS, STATE_ROWS + 1 + G), where G is 2 with guidance and 1 without.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError
from sdonnx.samplers import STATE_ROWS, SamplingPlan, guided_matrices

__all__ = ["HEADER", "MOST_CALLS", "matrix_start", "parameter_table", "row_size"]

# Index of the next row, timestep, input scale.
HEADER = 3

# Rows of the table. One size for every number of steps, so that one captured graph serves all.
MOST_CALLS = 1024


def matrix_start() -> int:
    """Return where in a row the matrix begins."""
    return HEADER + 2 * STATE_ROWS


def row_size(copies: int) -> int:
    """Return the length of a row, for `copies` predictions a call."""
    return matrix_start() + STATE_ROWS * (STATE_ROWS + 1 + copies)


def parameter_table(
    plan: SamplingPlan, guidance_scale: float | None, *, initial_scale: float = 1.0, background: bool = False
) -> NDArray[np.float32]:
    """Return the table of a plan, (MOST_CALLS, row_size).

    Args:
        plan: a sampler's plan, of n calls.
        guidance_scale: g, or None for one prediction a call.
        initial_scale: what the first call multiplies its latents by, so that noise can be drawn in place.
        background: after each call, put back what the mask keeps: the clean latents with the noise of the next
            call's level. Without it the background is 0.

    Raises:
        OptionError: the plan has more calls than the table has rows.
    """
    matrices = guided_matrices(plan, guidance_scale)
    matrices[0, :, 0] *= initial_scale
    calls = len(plan.timesteps)
    if calls > MOST_CALLS:
        raise OptionError(f"{calls} calls of the denoiser", f"at most {MOST_CALLS}", "ask for fewer steps")
    table = np.zeros((MOST_CALLS, row_size(1 if guidance_scale is None else 2)), np.float32)
    table[:calls, 0] = np.arange(1, calls + 1)
    table[:calls, 1] = plan.timesteps
    table[:calls, 2] = plan.input_scales
    table[0, 2] *= initial_scale
    if background:
        table[:calls, HEADER] = plan.clean_scales[1:]
        table[:calls, HEADER + 1] = plan.noise_scales[1:]
    table[:calls, matrix_start() :] = matrices.reshape(calls, -1)
    return table
