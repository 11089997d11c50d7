"""The noise levels that a solver in log(alpha / sigma) steps through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.samplers.plans import LATENTS, PREDICTION, Row, predicted_data, predicted_noise

__all__ = ["NoiseLevels"]


@dataclass(frozen=True)
class NoiseLevels:
    """Levels at which the latents are alpha * data + sigma * noise, (n + 1,) each, the last where sampling ends.

    Attributes:
        given: diffusers' sigmas: those of a flow, or the ratios sigma / alpha of diffusion.
        alphas: how much of the data.
        sigmas: how much noise.
    """

    given: NDArray[np.float64]
    alphas: NDArray[np.float64]
    sigmas: NDArray[np.float64]

    @classmethod
    def of(cls, given: NDArray[np.float64], *, flow: bool) -> NoiseLevels:
        """Return the levels for diffusers' sigmas.

        alpha = 1 - sigma for a flow (arXiv:2403.03206, section 3, "Rectified Flow"), else alpha**2 + sigma**2 = 1.
        diffusers: `_sigma_to_alpha_sigma_t`.
        """
        if flow:
            return cls(given, 1 - given, given)
        alphas = 1 / np.sqrt(given**2 + 1)
        return cls(given, alphas, given * alphas)

    def at(self, i: int) -> tuple[float, float]:
        """Return how much data and how much noise level i holds."""
        return float(self.alphas[i]), float(self.sigmas[i])

    def growth(self, source: int, target: int) -> float:
        """Return how much log(alpha / sigma) grows from a level to another: infinite where no noise is left."""
        logs = np.log(self.sigmas[[source, target]]) - np.log(self.alphas[[source, target]])
        return float(logs[0] - logs[1])

    def data(self, prediction_type: str, i: int) -> Row:
        """Return the data that a prediction at level i means.

        "flow_prediction" predicts noise - data of latents (1 - sigma) * data + sigma * noise; diffusers takes
        its `sigmas` for that whether or not they are a flow's.
        """
        if prediction_type == "flow_prediction":
            return LATENTS - float(self.given[i]) * PREDICTION
        return predicted_data(prediction_type, LATENTS, *self.at(i))

    def noise(self, prediction_type: str, i: int) -> Row:
        """Return the noise that a prediction at level i means, of any type but "flow_prediction"."""
        return predicted_noise(prediction_type, LATENTS, PREDICTION, *self.at(i))

    def scales(self, skipped: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return alphas and sigmas of the calls that are left after `skipped` ones."""
        return self.alphas[skipped:-1], self.sigmas[skipped:-1]
