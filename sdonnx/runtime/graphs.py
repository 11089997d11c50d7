"""The graphs of a folder, loaded when they are needed, and given back where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.families import Family, Role
from sdonnx.folder import PipelineFolder
from sdonnx.runtime.device import Device
from sdonnx.runtime.session import Graph, Run, SessionSettings
from sdonnx.runtime.weights import load_shared_weights

__all__ = ["GraphSet", "Observer"]

Observer = Callable[[Role, Run], AbstractContextManager[Any]]
"""Told what a graph does and its run, and returns what the run is wrapped in."""

# What stands beside each component's model (`sdonnx.compose`).
_FILES = {
    Role.TEXT_ENCODER: "text.onnx",
    Role.TEXT_ENCODER_2: "text.onnx",
    Role.CONDITIONS: "conditions.onnx",
    Role.DENOISER: "step.onnx",
    Role.IMAGE_ENCODER: "encode.onnx",
    Role.IMAGE_DECODER: "decode.onnx",
    Role.SAFETY_CHECKER: "check.onnx",
    Role.IMAGE_PROMPT_ENCODER: "prompt.onnx",
    Role.IMAGE_PROMPT_ADAPTER: "project.onnx",
}

_OF_DENOISER = {Role.CONDITIONS, Role.DENOISER}

# For short prompts, in place of those.
_SHORT = {Role.CONDITIONS: "conditions-short.onnx", Role.DENOISER: "step-short.onnx"}

# Products of weights and prompts take 2.1 MB for each token of PixArt, 530 MB for so many of all prompts of a batch.
_MOST_SHORT = 256

# How the names begin of what the step graph takes from the conditions graph (`sdonnx.compose.conditions`).
_TOLD = "told."

# Bound anew at each use: what they take is of another size than the image.
_UNCAPTURED = {Role.SAFETY_CHECKER, Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER}

# Autoencoders that overflow fp16 stay in float32, at a tenth of the speed without TF32; torch uses it for convolutions.
# The sampler's update in the denoiser's graph is a float32 product that needs all bits of the latents.
_TF32 = {Role.IMAGE_ENCODER, Role.IMAGE_DECODER}


@dataclass
class GraphSet:
    """The graphs of a folder, by what they do.

    Attributes:
        folder: the optimized folder.
        family: its family.
        device: where the graphs run.
        settings: what the caller set of ONNX Runtime.
        low_memory: keep the denoiser alone, all of its graphs; every other one is loaded for each use.
        observer: what each run of a graph is wrapped in; None for nothing.
    """

    folder: PipelineFolder
    family: Family
    device: Device
    settings: SessionSettings
    low_memory: bool
    observer: Observer | None = None
    _loaded: dict[tuple[Role, bool], Graph] = field(default_factory=dict)
    _weights: dict[str, OrtValue] | None = None

    @cached_property
    def has_short(self) -> bool:
        """Whether there is a graph of the denoiser for short prompts: see `sdonnx.compose.absorption`."""
        return (self.folder.path / self.family.with_role(Role.DENOISER).name / _SHORT[Role.DENOISER]).is_file()

    def is_short(self, prompts: int, tokens: int) -> bool:
        """Tell whether prompts of so many tokens each are for the graph for short prompts."""
        return tokens < self._head_size and prompts * tokens <= _MOST_SHORT

    @cached_property
    def _head_size(self) -> int:
        """Channels of a head: with as many tokens, graphs for short prompts multiply by as many columns as others."""
        size = self.config(Role.DENOISER).get("attention_head_dim") if self.has_short else None
        return size if isinstance(size, int) else 0

    def path(self, role: Role, *, short: bool | None = None) -> Path:
        """Return the file of a graph.

        Args:
            role: what it does.
            short: of the denoiser, whether it is the one for short prompts; None for that one if there is one.

        Raises:
            FolderError: it is missing.
        """
        component = Role.DENOISER if role is Role.CONDITIONS else role
        files = _SHORT if self._is_for_short(role, short) else _FILES
        return self.folder.onnx_model(self.family.with_role(component).name, files[role])

    def _is_for_short(self, role: Role, short: bool | None) -> bool:
        return role in _OF_DENOISER and (self.has_short if short is None else short)

    def config(self, role: Role) -> dict[str, Any]:
        """Return the configuration of the component."""
        return self.folder.config(self.family.with_role(role).name)

    def stays(self, role: Role) -> bool:
        """Tell whether a graph stays loaded, and may be captured."""
        return role in _OF_DENOISER or not self.low_memory

    def splits(self, *, short: bool | None = None) -> bool:
        """Tell whether what the denoiser makes of its prompt alone is a graph of its own.

        Raises:
            FolderError: the denoiser's graph is missing, or that one although the denoiser's reads what it gives.
        """
        return any(name.startswith(_TOLD) for name in self.get(Role.DENOISER, short=short).inputs)

    def told(self, *, short: bool | None = None) -> Graph:
        """Return the graph that takes all that the denoiser is told of its prompt, loaded."""
        return self.get(Role.CONDITIONS if self.splits(short=short) else Role.DENOISER, short=short)

    def get(self, role: Role, *, short: bool | None = None) -> Graph:
        """Return the graph, loaded; see `path`.

        Raises:
            FolderError: the file is missing or ONNX Runtime refuses it.
        """
        key = (role, self._is_for_short(role, short))
        if key not in self._loaded:
            path, captures = self.path(role, short=short), self.stays(role) and role not in _UNCAPTURED
            # A caller's options are for all sessions: what is added to them for one would be refused for the next.
            shares = role in _OF_DENOISER and self.settings.session_options is None
            weights = self._shared_weights() if shares else {}
            self._loaded[key] = Graph(
                path, self.device, capture=captures, tf32=role in _TF32, settings=self.settings, weights=weights
            )
        return self._loaded[key]

    def _shared_weights(self) -> dict[str, OrtValue]:
        """Return what several graphs of the denoiser read."""
        if self._weights is None:
            component = self.folder.component(self.family.with_role(Role.DENOISER).name)
            self._weights = load_shared_weights(component, self.device)
        return self._weights

    def observed(self, role: Role, run: Run) -> AbstractContextManager[Any]:
        """Return what a run of that graph is to be wrapped in."""
        return nullcontext() if self.observer is None else self.observer(role, run)

    def run_once(
        self,
        role: Role,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
    ) -> dict[str, npt.NDArray[Any]]:
        """Run a graph on arrays, with buffers of this run alone, and return its outputs of these shapes and types.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        made = {name: self.device.empty(shape, dtype) for name, (shape, dtype) in outputs.items()}
        try:
            given = {name: self.device.upload(values) for name, values in inputs.items()}
            run = self.get(role).bind(given | made)
            with self.observed(role, run):
                run()
            self.device.synchronize()
            return {name: value.numpy().copy() for name, value in made.items()}
        finally:
            self.done(role)

    def done(self, role: Role) -> None:
        """Give the graph's memory back if it is not to stay; what was bound to it is gone."""
        if not self.stays(role):
            self.device.synchronize()
            self._loaded.pop((role, False), None)

    def close(self) -> None:
        """Give the graphs back, and what they share."""
        self._loaded.clear()
        self._weights = None
