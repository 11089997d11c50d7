"""Graphs of an optimized folder, loaded on first use and unloaded if memory is short."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy.typing as npt
from onnxruntime import OrtValue

from sdonnx.errors import OptionError
from sdonnx.folder.certificate import LoadedFolder
from sdonnx.folder.folder_version import read_report
from sdonnx.folder.pipeline_folder import own_kernel_graph
from sdonnx.models import abi
from sdonnx.models.spec import Family, Role
from sdonnx.runtime.device.cancellation import Cancellation
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph, Run, SessionSettings

if TYPE_CHECKING:
    from sdonnx.lora.changed_component import ChangedComponent

__all__ = ["OFFLOAD", "GraphSet", "LowMemory", "Observer", "require_low_memory"]

Observer = Callable[[Role, Run], AbstractContextManager[Any]]
"""Returns the context manager in which to run a graph: (role of the graph, the run)."""

OFFLOAD: Literal["offload"] = "offload"

LowMemory = bool | Literal["offload"]
"""Which graphs are loaded for each use and unloaded afterwards: none (False), all but the denoiser's, which stays
captured (True), or all (OFFLOAD), so that the device holds the weights of one component at a time."""

# Maximum number of tokens in a batch for the graphs for short prompts. Matmuls of weights and prompts take 2.1 MB for
# each token in a transformer of 28 layers and width 1152, 530 MB for this number.
_MAX_SHORT_TOKENS = 256

# Not captured: they run once for an image or less often.
_UNCAPTURED = {Role.SAFETY_CHECKER, Role.IMAGE_PROMPT_ENCODER, Role.IMAGE_PROMPT_ADAPTER, Role.T2I_ADAPTER}

# TF32 is for autoencoders that overflow fp16 and stay in float32, at a tenth of the speed without TF32; torch also uses
# it for convolutions. The denoiser's graph has none: the sampler's update is a float32 matmul that needs all bits.
_TF32 = {Role.IMAGE_ENCODER, Role.IMAGE_DECODER}


def require_low_memory(value: Any) -> LowMemory:
    """Return a value of `LowMemory`.

    Raises:
        OptionError: it is none.
    """
    if isinstance(value, bool) or value == OFFLOAD:
        return cast(LowMemory, value)
    raise OptionError(f"low_memory is {value!r}", f"False, True or {OFFLOAD!r}")


class GraphSet:
    """Graphs of a folder, by role.

    Args:
        folder: the optimized folder.
        family: the folder's family.
        device: where the graphs run.
        settings: options of ONNX Runtime, and the library of our own kernels where they are used.
        low_memory: which graphs are loaded for each use only; see `LowMemory`.

    Attributes:
        folder: the optimized folder.
        report: its `sdonnx.json`.
        changed: the weights that adapters have changed.
        observer: wraps each run of a graph; None for no observer.
        cancellation: ends the runs of a call.
    """

    def __init__(
        self,
        folder: LoadedFolder,
        family: Family,
        device: Device,
        settings: SessionSettings,
        low_memory: LowMemory,
    ) -> None:
        from sdonnx.runtime.device.session_weights import ChangedWeights

        self.folder, self.family, self.device, self._settings = folder, family, device, settings
        self.observer: Observer | None = None
        self.cancellation = Cancellation()
        self.report = read_report(folder.path)
        self._low_memory = low_memory
        self._loaded: dict[tuple[Role, bool, int], Graph] = {}
        self._weights: dict[str, OrtValue] | None = None
        self._loading_weights = threading.Lock()
        self.changed = ChangedWeights(device, settings.library, keeps_graphs=not low_memory)

    @cached_property
    def has_short(self) -> bool:
        """Whether the denoiser has graphs for short prompts: see `sdonnx.compose.absorption`."""
        return (self.folder.path / self.family.with_role(Role.DENOISER).name / (abi.STEP.short_file or "")).is_file()

    def is_short(self, prompts: int, tokens: int) -> bool:
        """Return whether prompts of this length use the graphs for short prompts.

        Args:
            prompts: number of prompts in the batch, including negative ones.
            tokens: length of each prompt.
        """
        return tokens < self._head_size and prompts * tokens <= _MAX_SHORT_TOKENS

    @cached_property
    def _head_size(self) -> int:
        """Channels of a head: with fewer tokens, graphs for short prompts multiply fewer columns than the others."""
        size = self.config(Role.DENOISER).get("attention_head_dim") if self.has_short else None
        return size if isinstance(size, int) else 0

    def path(self, role: Role, *, short: bool | None = None, number: int = 0) -> Path:
        """Return the file of a graph, in the form that this machine has the kernels for.

        Args:
            role: role of the graph.
            short: for the denoiser, whether to return the graph for short prompts; None to return it if it exists.
            number: the component among those with its role.

        Raises:
            FolderError: the file is missing.
        """
        spec = abi.GRAPHS[role]
        file = spec.short_file if self._is_for_short(role, short) else None
        component = self.family.all_with_role(spec.component)[number].name
        path = self.folder.onnx_model(component, file or spec.file)
        own = own_kernel_graph(path.name)
        if self._settings.library is None or not (path.parent / own).is_file():
            return path  # a graph in which nothing was replaced has one form
        return self.folder.onnx_model(component, own)

    def _is_for_short(self, role: Role, short: bool | None) -> bool:
        return role in abi.DENOISER_ROLES and (self.has_short if short is None else short)

    def config(self, role: Role) -> dict[str, Any]:
        """Return the configuration of the component with a role."""
        return self.folder.config(self.family.with_role(role).name)

    def itemsizes(self, role: Role) -> tuple[int, int]:
        """Return the smallest and the largest size in bytes of an element of a component's activations."""
        components = self.report.get("components")
        entry = components.get(self.family.with_role(role).name) if isinstance(components, Mapping) else None
        if not isinstance(entry, Mapping):
            return (2, 4)
        if entry.get("precision") == "float32":
            return (4, 4)
        kept = entry.get("float32")
        return (2, 4 if isinstance(kept, Mapping) and any(kept.values()) else 2)

    def stays(self, role: Role) -> bool:
        """Return whether a graph stays loaded, and may be captured."""
        if self._low_memory == OFFLOAD:
            return False
        return role in abi.DENOISER_ROLES | abi.CONTROL_ROLES or not self._low_memory

    def set_low_memory(self, low_memory: LowMemory) -> None:
        """Change which graphs are loaded for each use, and unload all graphs; no run may be bound to them."""
        self.device.synchronize()
        self._low_memory = low_memory
        for role, *_ in list(self._loaded):
            self._unload(role)
        self.changed.keep_graphs(not low_memory)

    def loaded(self) -> set[Role]:
        """Return the roles of the graphs that have their weights on the device."""
        return {role for (role, *_), graph in self._loaded.items() if graph.is_loaded}

    def has_precompute(self, *, short: bool | None = None) -> bool:
        """Return whether a precompute graph computes the step-invariant inputs of the denoiser.

        Raises:
            FolderError: the denoiser's graph is missing.
        """
        return any(name.startswith(abi.PRECOMPUTED) for name in self.get(Role.DENOISER, short=short).inputs)

    def conditioning_graph(self, *, short: bool | None = None) -> Graph:
        """Return the loaded graph that reads the conditioning: the precompute graph, or the denoiser's without one."""
        return self.get(Role.PRECOMPUTE if self.has_precompute(short=short) else Role.DENOISER, short=short)

    def get(self, role: Role, *, short: bool | None = None, number: int = 0) -> Graph:
        """Return the loaded graph; see `path` for the arguments.

        Raises:
            FolderError: the file is missing or ONNX Runtime rejects it.
        """
        key = (role, self._is_for_short(role, short), number)
        if key not in self._loaded:
            path, captures = self.path(role, short=short, number=number), self.stays(role) and role not in _UNCAPTURED
            # The caller's options are one object for all sessions: ONNX Runtime rejects to add an initializer twice.
            shares = role in abi.DENOISER_ROLES and self._settings.session_options is None
            self._loaded[key] = Graph(
                path,
                self.device,
                capture=captures,
                tf32=role in _TF32,
                settings=self._settings,
                weights=lambda: self._read_weights(path, shares=shares),
                injected=lambda: self.changed.injected(path),
                cancellation=self.cancellation,
            )
        return self._loaded[key]

    def _read_weights(self, path: Path, *, shares: bool) -> dict[str, OrtValue]:
        """Return the initializers that a graph which is being loaded reads from buffers."""
        self.folder.require_unchanged(path.parent.name)  # the graph may be loaded again
        shared = self._shared_weights() if shares else {}
        injected = self.changed.injected(path)
        return {name: each for name, each in shared.items() if name not in injected} | self.changed.weights(path)

    def change_weights(self, changed: Mapping[str, ChangedComponent]) -> None:
        """Use other weights in components, by name; no run may be bound to their graphs.

        The graphs are loaded again when they are used next.

        Raises:
            OptionError: the graphs have session options of the caller.
        """
        if self._settings.session_options is not None:
            raise OptionError(
                "weights are changed in a pipeline with session_options, which are one object for all graphs",
                "sessions with options of their own",
                "load the pipeline without session_options",
            )
        self.device.synchronize()
        for key, graph in list(self._loaded.items()):
            if graph.path.parent.name in changed:
                graph.unload()  # even if a caller still holds it
                del self._loaded[key]
        self.changed.replace(changed)

    def load(self) -> None:
        """Load the graphs that every image needs at the same time, except those that do not stay loaded.

        Raises:
            FolderError: the file of a graph is missing, or ONNX Runtime rejects it. If several fail, the error
                of the component that runs first is raised.
        """
        roles = [*(spec.role for spec in self.family.text_encoders), Role.DENOISER, Role.IMAGE_DECODER]
        for role in roles:
            self.path(role)
        denoiser = self.folder.path / self.family.with_role(Role.DENOISER).name
        if (denoiser / abi.GRAPHS[Role.PRECOMPUTE].file).is_file():
            roles.append(Role.PRECOMPUTE)
        staying = [role for role in roles if self.stays(role)]
        if self._settings.session_options is not None:
            for role in staying:  # sessions add entries to the caller's options, which are one object
                self.get(role)
        elif staying:
            with ThreadPoolExecutor(len(staying), "sdonnx-load", self.device.enter) as pool:
                for loading in [pool.submit(self.get, role) for role in staying]:
                    loading.result()

    def _shared_weights(self) -> dict[str, OrtValue]:
        """Return the weights that several graphs of the denoiser share."""
        from sdonnx.runtime.device.session_weights import load_shared_weights

        with self._loading_weights:
            if self._weights is None:
                component = self.folder.component(self.family.with_role(Role.DENOISER).name)
                self._weights = load_shared_weights(component, self.device)
            return self._weights

    def observed(self, role: Role, run: Run) -> AbstractContextManager[Any]:
        """Return the context manager in which to run a graph."""
        return nullcontext() if self.observer is None else self.observer(role, run)

    def run_once(
        self,
        role: Role,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
        *,
        number: int = 0,
    ) -> dict[str, npt.NDArray[Any]]:
        """Run a graph on arrays with temporary buffers, and return its outputs, given their shapes and types.

        Raises:
            DeviceMemoryError: the device has too little memory.
        """
        outputs_of = {name: self.device.empty(shape, dtype) for name, (shape, dtype) in outputs.items()}
        try:
            inputs_of = {name: self.device.upload(values) for name, values in inputs.items()}
            run = self.get(role, number=number).bind(inputs_of | outputs_of)
            with self.observed(role, run):
                run()
            self.device.synchronize()
            return {name: value.numpy().copy() for name, value in outputs_of.items()}
        finally:
            self.done(role)

    def done(self, role: Role) -> None:
        """Unload a graph that does not stay loaded; runs bound to it must not be used again."""
        if not self.stays(role):
            self.device.synchronize()
            self._unload(role)

    def _unload(self, role: Role) -> None:
        if role not in abi.DENOISER_ROLES:
            for key in [key for key in self._loaded if key[0] is role]:
                self._loaded.pop(key).unload()  # even if a caller still holds it
            return
        # Shapes and types of the denoiser's inputs are read before each call, without its weights.
        for (each, *_), denoiser in self._loaded.items():
            if each is role:
                denoiser.unload(capture=self.stays(role))
        if not self.loaded() & abi.DENOISER_ROLES:
            self._weights = None

    def close(self) -> None:
        """Unload the graphs and their shared weights."""
        self._loaded.clear()
        self._weights = None
        self.changed.forget_buffers()
