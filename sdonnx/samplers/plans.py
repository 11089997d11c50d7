"""The plan of a sampler, and the rows that a solver writes it with.

A formula of a paper is written as it stands: `LATENTS`, `NOISE`, `PREDICTION` and `HISTORY[k]` are rows of an
identity matrix, so a linear combination of them is a row of the coefficient matrix.
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
    """What to compute at each of the n calls of the denoiser.

    Attributes:
        timesteps: (n,) float32, what the denoiser is told.
        input_scales: (n,) float32, the denoiser sees latents * input_scale.
        matrices: (n, STATE_ROWS, STATE_ROWS + 2) float64; new state = matrix @ [state, noise, prediction].
            Row 0 of the state is the latents, the others are history and start at 0.
        init_noise_sigma: the initial latents are Gaussian noise times this, where no image is started from.
        needs_noise: (n,) bool, the calls that want fresh Gaussian noise in the noise row. Where a coefficient
            of it is 0 (the last step), diffusers draws it all the same, and a generator that is used again
            later must have moved on as far.
        clean_scales: (n + 1,) float32. clean * clean_scales[i] + noise * noise_scales[i] are clean latents with
            as much noise as call i expects, what `add_noise(clean, noise, timesteps[i:i + 1])` of diffusers'
            class gives there: image to image starts from i = 0, and inpainting, after call i, puts back
            what is kept of the image with i + 1. Index n is 1: what is kept ends as it is, without noise.
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
        matrices: n of them.
        levels: how much of the data and how much noise the latents of each call hold, two of (n,).
        input_scales: (n,). Default: 1.
        init_noise_sigma: as the plan's.
        needs_noise: as the plan's, or the same for all calls.

    Raises:
        OptionError: there is no call to make.
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


def new_state(latents: Row, *history: Row) -> Row:
    """Stack the new state's rows; history that is not kept becomes 0."""
    matrix = np.zeros((STATE_ROWS, STATE_ROWS + 2))
    matrix[0] = latents
    for row, kept in enumerate(history, start=1):
        matrix[row] = kept
    return matrix


def predicted_data(prediction_type: str, latents: Row, alpha: float, sigma: float) -> Row:
    """Return the denoised latents that a prediction means, for latents = alpha * data + sigma * noise.

    Source: arXiv:2202.00512, appendix D (v = alpha * noise - sigma * data).
    """
    if prediction_type == "sample":
        return PREDICTION
    if prediction_type == "v_prediction":
        return alpha * latents - sigma * PREDICTION
    return (latents - sigma * PREDICTION) / alpha


def predicted_noise(prediction_type: str, latents: Row, prediction: Row, alpha: float, sigma: float) -> Row:
    """Return the noise that a prediction means, for latents = alpha * data + sigma * noise."""
    if prediction_type == "sample":
        return (latents - alpha * prediction) / sigma
    if prediction_type == "v_prediction":
        return alpha * prediction + sigma * latents
    return prediction
