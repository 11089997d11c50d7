"""Sampling plans, and the rows that solvers build them from.

A paper's formula is written as it stands: `LATENTS`, `NOISE`, `PREDICTION` and `HISTORY[k]` are rows of an identity
matrix, so a linear combination of them is a row of the coefficient matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.errors import OptionError

__all__ = [
    "HISTORY",
    "LATENTS",
    "NOISE",
    "PREDICTION",
    "STATE_ROWS",
    "Row",
    "SamplingPlan",
    "assemble",
    "guided_matrices",
    "new_state",
    "predicted_data",
    "predicted_noise",
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
