"""Measurements that are not rows of the table: step counts with their fitted line, image sizes, and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sdonnx.reference.workload import Workload

__all__ = ["Kernels", "LineFit", "Resolution", "Resolutions", "Throughput", "fit_line"]


@dataclass(frozen=True)
class LineFit:
    """time = slope * steps + offset, in seconds.

    Attributes:
        slope: seconds per step.
        offset: seconds of the work that does not depend on the steps: text encoder, decoder, overhead.
        r_squared: share of the variance that the line explains.
    """

    slope: float
    offset: float
    r_squared: float


@dataclass(frozen=True)
class Throughput:
    """Latency by number of steps, and the fitted line.

    Attributes:
        rival: title of the engine.
        workload: the workload, with the maximum number of steps.
        points: (steps, median latency in seconds).
        line: time = slope * steps + offset.
    """

    rival: str
    workload: Workload
    points: tuple[tuple[int, float], ...]
    line: LineFit


@dataclass(frozen=True)
class Resolution:
    """Latency after a change of the image size, or of the adapters' scale at the first size.

    Attributes:
        height: in pixels.
        width: in pixels.
        first_s: seconds of the first image.
        second_s: seconds of the second image.
        settled_s: seconds of the fastest image after that.
        ip_adapter_scale: the scale, if it was changed.
    """

    height: int
    width: int
    first_s: float
    second_s: float
    settled_s: float
    ip_adapter_scale: float | None = None

    @property
    def title(self) -> str:
        """The title in tables."""
        return (
            f"{self.height}x{self.width}"
            if self.ip_adapter_scale is None
            else f"adapter scale {self.ip_adapter_scale:g}"
        )

    @property
    def stall_s(self) -> float:
        """Additional time of the first two images over a later one; some compilers capture in the second."""
        return sum(max(seconds - self.settled_s, 0.0) for seconds in (self.first_s, self.second_s))


@dataclass(frozen=True)
class Resolutions:
    """Image sizes that one process changed to in turn, after a warm-up at the first size."""

    rival: str
    workload: Workload
    visited: tuple[Resolution, ...]


@dataclass(frozen=True)
class Kernels:
    """GPU time of one image by kind of operator.

    Attributes:
        rival: title of the engine.
        workload: the workload.
        milliseconds: device time by kind, longest first; "idle" is the time without kernels.
        launches: number of kernels.
        source: the profiler.
    """

    rival: str
    workload: Workload
    milliseconds: dict[str, float]
    launches: int
    source: str


def fit_line(points: Sequence[tuple[float, float]]) -> LineFit:
    """Return the least-squares line through (steps, seconds), for at least two different step counts."""
    steps, seconds = np.asarray(points, np.float64).T
    slope, offset = np.polynomial.Polynomial.fit(steps, seconds, 1).convert().coef[::-1]
    residual = float(np.sum((seconds - (slope * steps + offset)) ** 2))
    total = float(np.sum((seconds - seconds.mean()) ** 2))
    return LineFit(float(slope), float(offset), 1.0 if total == 0 else 1 - residual / total)
