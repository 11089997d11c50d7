"""Noise levels of the solvers that integrate in log(alpha / sigma)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdonnx.samplers.plans import LATENTS, PREDICTION, Row, predicted_data, predicted_noise

__all__ = ["NoiseLevels"]


@dataclass(frozen=True)
class NoiseLevels:
    """Levels at which the latents are alpha * data + sigma * noise, (n + 1,) each; sampling ends at the last.

    Attributes:
        ratios: diffusers' sigmas: a flow's sigmas, or the ratios sigma / alpha of diffusion.
        alphas: scale of the data.
        sigmas: scale of the noise.
    """

    ratios: NDArray[np.float64]
    alphas: NDArray[np.float64]
    sigmas: NDArray[np.float64]

    @classmethod
    def from_sigmas(cls, ratios: NDArray[np.float64], *, flow: bool) -> NoiseLevels:
        """Return the levels for diffusers' sigmas.

        alpha = 1 - sigma for a flow (arXiv:2403.03206, section 3, "Rectified Flow"), else alpha**2 + sigma**2 = 1.
        diffusers: `_sigma_to_alpha_sigma_t`.
        """
        if flow:
            return cls(ratios, 1 - ratios, ratios)
        alphas = 1 / np.sqrt(ratios**2 + 1)
        return cls(ratios, alphas, ratios * alphas)

    def at(self, i: int) -> tuple[float, float]:
        """Return the scales of the data and of the noise at level i."""
        return float(self.alphas[i]), float(self.sigmas[i])

    def growth(self, source: int, target: int) -> float:
        """Return the increase of log(alpha / sigma) between two levels: infinite if the target has no noise."""
        logs = np.log(self.sigmas[[source, target]]) - np.log(self.alphas[[source, target]])
        return float(logs[0] - logs[1])

    def data(self, prediction_type: str, i: int) -> Row:
        """Convert a prediction at level i to data.

        "flow_prediction" predicts noise - data of latents (1 - sigma) * data + sigma * noise. diffusers uses its
        `sigmas` in this formula whether or not they belong to a flow.
        """
        if prediction_type == "flow_prediction":
            return LATENTS - float(self.ratios[i]) * PREDICTION
        return predicted_data(prediction_type, LATENTS, *self.at(i))

    def noise(self, prediction_type: str, i: int) -> Row:
        """Convert a prediction at level i, of any type but "flow_prediction", to noise."""
        return predicted_noise(prediction_type, LATENTS, PREDICTION, *self.at(i))

    def scales(self, skipped: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return alphas and sigmas of the calls that remain after the first `skipped`."""
        return self.alphas[skipped:-1], self.sigmas[skipped:-1]
