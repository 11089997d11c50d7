"""The parameter table: one row for each call of the step graph, uploaded once before the first call.

A row holds, in this order: the index of the next row (its own plus 1), the timestep, the input scale, the weights of
the known latents (STATE_ROWS, 2) and the matrix (STATE_ROWS, STATE_ROWS + 1 + G), where G is 2 with guidance, else 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError
from sdonnx.samplers.plans import STATE_ROWS, SamplingPlan, guided_matrices

__all__ = ["HEADER", "MAX_CALLS", "matrix_start", "parameter_table", "row_size"]

# Number of values ahead of the weights: index of the next row, timestep, input scale.
HEADER = 3

# Rows of the table. The size does not depend on the number of steps, so one captured graph serves all.
MAX_CALLS = 1024


def matrix_start() -> int:
    """Return the index in a row at which the matrix begins."""
    return HEADER + 2 * STATE_ROWS


def row_size(copies: int) -> int:
    """Return the length of a row for `copies` predictions per call."""
    return matrix_start() + STATE_ROWS * (STATE_ROWS + 1 + copies)


def parameter_table(
    plan: SamplingPlan, guidance_scale: float | None, *, initial_scale: float = 1.0, restore_known: bool = False
) -> NDArray[np.float32]:
    """Return the table of a plan, (MAX_CALLS, row_size).

    Args:
        plan: a sampler's plan, of n calls.
        guidance_scale: g, or None for one prediction per call.
        initial_scale: factor that the first call applies to its latents, so that noise can be sampled in place.
        restore_known: after each call, restore the region that the mask keeps: the clean latents at the noise level
            of the next call. Otherwise the weights of the known latents are 0.

    Raises:
        OptionError: the plan has more calls than the table has rows.
    """
    matrices = guided_matrices(plan, guidance_scale)
    matrices[0, :, 0] *= initial_scale
    calls = len(plan.timesteps)
    if calls > MAX_CALLS:
        raise OptionError(f"{calls} calls of the denoiser", f"at most {MAX_CALLS}")
    table = np.zeros((MAX_CALLS, row_size(1 if guidance_scale is None else 2)), np.float32)
    table[:calls, 0] = np.arange(1, calls + 1)
    table[:calls, 1] = plan.timesteps
    table[:calls, 2] = plan.input_scales
    table[0, 2] *= initial_scale
    if restore_known:
        table[:calls, HEADER] = plan.clean_scales[1:]
        table[:calls, HEADER + 1] = plan.noise_scales[1:]
    table[:calls, matrix_start() :] = matrices.reshape(calls, -1)
    return table
