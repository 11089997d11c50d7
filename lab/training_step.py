"""Training loops of fixed shape: the budget, the learning rate, and steps as CUDA graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["Budget", "CapturedStep", "make_optimizer", "set_learning_rate"]

_WARMUPS = 3  # calls before the capture, which choose algorithms and allocate the optimizer's state
_FINAL_SHARE = 0.02  # of the largest learning rate
_MAX_QUEUED = 4  # replays that the host is ahead of the GPU


@dataclass
class Budget:
    """The length of a training in seconds or in steps.

    Attributes:
        seconds: duration; ignored if `steps` is given.
        steps: number of steps; None for the duration.
        started: time of the start, by `time.perf_counter`.
        done: number of steps so far.
    """

    seconds: float
    steps: int | None = None
    started: float = field(default_factory=time.perf_counter)
    done: int = 0

    @property
    def progress(self) -> float:
        """Share of the budget that is used up; 1 or more at the end."""
        if self.steps is not None:
            return self.done / self.steps
        return (time.perf_counter() - self.started) / self.seconds

    def learning_rate(self, largest: float, warmup_steps: int) -> float:
        """Return the learning rate of the next step: a linear warm-up, and half a cosine over the budget."""
        warm = min(1.0, (self.done + 1) / warmup_steps)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.progress))
        return largest * warm * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


def make_optimizer(parameters: list[torch.nn.Parameter], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW for parameters on one device; on a GPU with a learning rate that a CUDA graph can read."""
    if not parameters[0].is_cuda:
        return torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=weight_decay)
    rate = torch.zeros((), device=parameters[0].device)
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True, capturable=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class CapturedStep:
    """A function of fixed tensors that is replayed as a CUDA graph; on a CPU, the function itself.

    The first call runs the function a few times before it is captured. A function that cannot be captured is called.

    Attributes:
        error: reason for which the function was not captured, if so.
    """

    def __init__(self, function: Callable[[], None], device: str) -> None:
        self.error: str | None = None
        self._function = function
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._events: list[torch.cuda.Event] = []

    def prepare(self) -> None:
        """Warm up and capture. Call this with a learning rate of zero: the function runs a few times."""
        if self._stream is None:
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(_WARMUPS):
                self._function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._function()
            self._graph = graph
        except RuntimeError as error:
            self.error = str(error).splitlines()[0]
            torch.cuda.synchronize()

    def __call__(self, fill: Callable[[], None]) -> None:
        """Fill the tensors that the function reads, and run it; returns before the GPU has finished."""
        if self._stream is None:
            fill()
            self._function()
            return
        with torch.cuda.stream(self._stream):
            fill()
            if self._graph is None:
                self._function()
            else:
                self._graph.replay()
            event = torch.cuda.Event()
            event.record()
        self._events.append(event)
        if len(self._events) > _MAX_QUEUED:
            self._events.pop(0).synchronize()
