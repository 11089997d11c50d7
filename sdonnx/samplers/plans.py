"""Sampling plans, the rows that solvers build them from, and the table that the step graph reads.

A paper's formula is written as it stands: `LATENTS`, `NOISE`, `PREDICTION` and `HISTORY[k]` are rows of an identity
matrix, so a linear combination of them is a row of the coefficient matrix.

The parameter table has one row for each call of the step graph and is uploaded once before the first call. A row
holds, in this order: the index of the next row (its own plus 1), the timestep, the input scale, the weights of the
known latents (STATE_ROWS, 2) and the matrix (STATE_ROWS, STATE_ROWS + 1 + G), where G is 2 with guidance, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError

__all__ = [
    "HEADER",
    "HISTORY",
    "LATENTS",
    "MAX_CALLS",
    "NOISE",
    "PREDICTION",
    "STATE_ROWS",
    "Row",
    "SamplingPlan",
    "assemble",
    "guided_matrices",
    "matrix_start",
    "new_state",
    "parameter_table",
    "predicted_data",
    "predicted_noise",
    "row_size",
]

STATE_ROWS = 5

Row = NDArray[np.float64]

_IDENTITY: Row = np.eye(STATE_ROWS + 2)
LATENTS: Row = _IDENTITY[0]
HISTORY: Row = _IDENTITY[1:STATE_ROWS]
NOISE: Row = _IDENTITY[-2]
PREDICTION: Row = _IDENTITY[-1]


@dataclass(frozen=True)
class SamplingPlan:
    """The computation of each of the n calls of the denoiser.

    Attributes:
        timesteps: (n,) float32, the denoiser's timestep input.
        input_scales: (n,) float32; the denoiser's input is latents * input_scale.
        matrices: (n, STATE_ROWS, STATE_ROWS + 2) float64; new state = matrix @ [state, noise, prediction].
            Row 0 of the state is the latents. The other rows are history and start at 0.
        init_noise_sigma: standard deviation of the initial Gaussian latents, if sampling does not start from an image.
        needs_noise: (n,) bool, the calls that need fresh Gaussian noise in the noise row. diffusers samples noise
            even if its coefficient is 0 (the last step). It is sampled here as well, so that a generator that is
            reused later is in the same state.
        clean_scales: (n + 1,) float32. clean * clean_scales[i] + noise * noise_scales[i] are clean latents at the
            noise level of call i, equal to `add_noise(clean, noise, timesteps[i:i + 1])` of diffusers' class. Image
            to image starts from i = 0. Inpainting restores the known region with i + 1 after call i. Index n is 1,
            so the known region ends without noise.
        noise_scales: (n + 1,) float32, see clean_scales; index n is 0.
    """

    timesteps: NDArray[np.float32]
    input_scales: NDArray[np.float32]
    matrices: NDArray[np.float64]
    init_noise_sigma: float
    needs_noise: NDArray[np.bool_]
    clean_scales: NDArray[np.float32]
    noise_scales: NDArray[np.float32]


def assemble(
    timesteps: NDArray[np.float64],
    matrices: Sequence[Row],
    levels: tuple[NDArray[np.float64], NDArray[np.float64]],
    *,
    input_scales: NDArray[np.float64] | None = None,
    init_noise_sigma: float = 1.0,
    needs_noise: bool | NDArray[np.bool_] = False,
) -> SamplingPlan:
    """Return the plan of a solver.

    Args:
        timesteps: (n,).
        matrices: n matrices.
        levels: scales of the data and of the noise in the latents of each call, two arrays of shape (n,).
        input_scales: (n,). Default: 1.
        init_noise_sigma: see `SamplingPlan`.
        needs_noise: see `SamplingPlan`; a single value applies to all calls.

    Raises:
        OptionError: there are no calls.
    """
    count = len(matrices)
    if count == 0:
        raise OptionError("no step is left", "at least one step", "raise num_inference_steps or strength")
    scales = np.ones(count) if input_scales is None else input_scales
    clean, noise = levels
    return SamplingPlan(
        timesteps=timesteps.astype(np.float32),
        input_scales=scales.astype(np.float32),
        matrices=np.stack(matrices),
        init_noise_sigma=float(init_noise_sigma),
        needs_noise=np.full(count, needs_noise),
        clean_scales=np.append(clean, 1.0).astype(np.float32),
        noise_scales=np.append(noise, 0.0).astype(np.float32),
    )


def guided_matrices(plan: SamplingPlan, guidance_scale: float | None) -> NDArray[np.float64]:
    """Return the plan's matrices with classifier-free guidance folded in.

    The guided prediction is unconditional + g * (conditional - unconditional): arXiv:2207.12598, equation 6, with
    w = g - 1, as in diffusers' pipelines. It is linear, so it becomes two columns of the matrix.

    Args:
        plan: a sampler's plan.
        guidance_scale: g, or None for one prediction per call, without guidance.

    Returns:
        Without guidance (n, STATE_ROWS, STATE_ROWS + 2): columns [state rows, noise, prediction].
        With guidance (n, STATE_ROWS, STATE_ROWS + 3): columns [state rows, noise, unconditional, conditional].
    """
    if guidance_scale is None:
        return plan.matrices.copy()
    prediction = plan.matrices[..., -1:]
    return np.concatenate(
        [plan.matrices[..., :-1], (1 - guidance_scale) * prediction, guidance_scale * prediction], axis=-1
    )


def new_state(latents: Row, *history: Row) -> Row:
    """Stack the rows of the new state. History rows that are not given become 0."""
    matrix = np.zeros((STATE_ROWS, STATE_ROWS + 2))
    matrix[0] = latents
    for row, kept in enumerate(history, start=1):
        matrix[row] = kept
    return matrix


def predicted_data(prediction_type: str, latents: Row, alpha: float, sigma: float) -> Row:
    """Convert a prediction to denoised latents, for latents = alpha * data + sigma * noise.

    Source: arXiv:2202.00512, appendix D (v = alpha * noise - sigma * data).
    """
    if prediction_type == "sample":
        return PREDICTION
    if prediction_type == "v_prediction":
        return alpha * latents - sigma * PREDICTION
    return (latents - sigma * PREDICTION) / alpha


def predicted_noise(prediction_type: str, latents: Row, prediction: Row, alpha: float, sigma: float) -> Row:
    """Convert a prediction to the predicted noise, for latents = alpha * data + sigma * noise."""
    if prediction_type == "sample":
        return (latents - alpha * prediction) / sigma
    if prediction_type == "v_prediction":
        return alpha * prediction + sigma * latents
    return prediction


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
