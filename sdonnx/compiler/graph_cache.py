"""Load the graph of a module from a cache, or build it and write it there.

An entry has the graph and those weights that are not parameters of the module, such as transposed ones. The others are
taken from the module's memory.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdonnx.compiler.graph_key import GraphKey, IndescribableError, graph_key
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature
from sdonnx.compiler.graph_target import GraphTarget
from sdonnx.compiler.host_weights import HostWeights
from sdonnx.compiler.merged_adapters import without_adapters
from sdonnx.compiler.saved_graph import load_saved
from sdonnx.errors import FolderError
from sdonnx.folder.folder_cache import ENTRY, FolderCache, entry_info, graph_cache, require_unchanged
from sdonnx.runtime.device.session import Graph

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["ModuleGraphs"]

_LOGGER = logging.getLogger(__name__)

_ATTEMPTS = 2  # a broken entry in a read-only folder stays there

# Of the description of an entry: the parts of its key, which weights are parameters of the module, where the others are
# in the file, and where changed weights belong.
_PARTS, _WEIGHTS, _STORED, _PLACES = "parts", "weights", "stored", "places"


class ModuleGraphs:
    """The graphs of a module's method.

    Args:
        module: The module, in evaluation mode.
        method: The method.
        saved: Entries that are searched before the user's cache, and to which nothing is added; None for none.
        weights: Where the weights of the module are.
    """

    def __init__(
        self, module: torch.nn.Module, method: GraphMethod, saved: FolderCache | None, weights: HostWeights
    ) -> None:
        self.module, self.method, self.saved, self.weights = module, method, saved, weights
        self._loaded: dict[str, GraphKey] = {}  # the last entry of each kind of calls, in which values may change

    def load(
        self,
        signature: GraphSignature,
        *,
        frees: bool = False,
        loads: Executor | None = None,
        loaded: Callable[[Graph], None] = lambda graph: None,
    ) -> Callable[[], Graph]:
        """Load a graph from a cache, or build it, write it into the user's cache, and load it.

        Args:
            signature: The signature of the graph.
            frees: Move the weights to the host's memory first, if they are to be there, so that the device never has
                both torch's weights and the graph's.
            loads: Loads a graph that is in a cache while the caller goes on; None to load it when the result is called.
            loaded: Called with a graph that `loads` has loaded.

        Returns:
            A function, to be called once, that returns the graph.

        Raises:
            FolderError: The module cannot be traced, or ONNX Runtime rejects the graph; raised by the function.
            DeviceMemoryError: The device has too little memory; raised by the function, too.
            OptionError: SDONNX_CACHE_LIMIT is no size.
        """
        cache = graph_cache()
        if frees:
            self.weights.settle()  # graphs are loaded and keys computed from the host's memory
        module = without_adapters(self.module, signature.lora_scale)
        key = None
        if cache is not None or self.saved is not None:
            try:
                start = time.perf_counter()
                key = self._key(module, signature)
                _LOGGER.debug("hashed %s in %.2f s", self._name, time.perf_counter() - start)
            except IndescribableError as reason:
                _LOGGER.info("%s is not cached: %s", self._name, reason)
        if key is None:
            return lambda: self._load_built(self._build(module, signature), signature)

        def load() -> Graph | None:
            if self.saved is not None:
                has_entry = self.saved.has_entry(key.digest)
                if (graph := self._load_from(self.saved, key, module, signature)) is not None:
                    return graph
                if not has_entry:  # a broken one has its own line in the log
                    self._warn_of_another_state(self.saved, key)
            return None if cache is None else self._load_from(cache, key, module, signature)

        def load_early() -> Graph | None:
            if (graph := load()) is not None:
                loaded(graph)
            return graph

        known = load if loads is None else loads.submit(load_early).result
        return lambda: known() or self._made(cache, key, module, signature)

    def save(self, signature: GraphSignature, saved: FolderCache) -> str:
        """Write a graph into a folder of entries, from the user's cache or built again, and return its key.

        Raises:
            IndescribableError: The module cannot be described in other processes.
            FolderError: The module cannot be traced.
            OSError: The folder cannot be written.
        """
        module = without_adapters(self.module, signature.lora_scale)
        key = self._key(module, signature)
        cache = graph_cache()
        cached = None if cache is None else _intact(cache, key.digest)

        def write(folder: Path) -> Mapping[str, Any]:
            if cached is None:
                return self._write(self._build(module, signature), module, signature, key, folder)
            shutil.copytree(cached, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ENTRY))
            return entry_info(cached)

        saved.add(key.digest, write)
        return key.digest

    def key(self, signature: GraphSignature) -> GraphKey:
        """Return the key of a graph.

        Raises:
            IndescribableError: The module cannot be described in other processes.
        """
        return self._key(without_adapters(self.module, signature.lora_scale), signature)

    def _key(self, module: torch.nn.Module, signature: GraphSignature) -> GraphKey:
        target = _target_parts(signature.target)
        if signature.quantization is not None:
            target["quantization"] = json.dumps(signature.quantization.as_json())  # in order: the first match decides
        return graph_key(module, signature, self.method, target)

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _build(self, module: torch.nn.Module, signature: GraphSignature) -> ir.Model:
        from sdonnx.compiler.module_graph import build_model

        start = time.perf_counter()
        model = build_model(module, signature, self.method.prepare)
        _LOGGER.debug("built the graph of %s in %.1f s", self._name, time.perf_counter() - start)
        return model

    def _load_built(self, model: ir.Model, signature: GraphSignature) -> Graph:
        from sdonnx.compiler.module_graph import load_model

        return load_model(model, self._name, signature.target)

    def _made(
        self, cache: FolderCache | None, key: GraphKey, module: torch.nn.Module, signature: GraphSignature
    ) -> Graph:
        """Load the last graph with new values of weights, or a new one, which is written into the user's cache."""
        if cache is None:
            return self._load_built(self._build(module, signature), signature)
        if cache.find(key.digest) is None and (graph := self._load_changed(cache, key, module, signature)) is not None:
            return graph
        for _ in range(_ATTEMPTS):
            built: list[ir.Model] = []

            def write(folder: Path, built: list[ir.Model] = built) -> Mapping[str, Any]:
                built.append(self._build(module, signature))
                return self._write(built[0], module, signature, key, folder)

            if cache.entry(key.digest, write) is None:
                return self._load_built(built[0] if built else self._build(module, signature), signature)
            is_new = bool(built)
            built.clear()  # transformed weights are read from the entry
            if (graph := self._load_from(cache, key, module, signature, is_new=is_new)) is not None:
                return graph
        return self._load_built(self._build(module, signature), signature)

    def _load_changed(
        self, cache: FolderCache, key: GraphKey, module: torch.nn.Module, signature: GraphSignature
    ) -> Graph | None:
        """Load the last graph with new values of weights; None where anything else has changed. Nothing is written."""
        base = self._loaded.get(key.parts["call"])
        changed = base.changed_from(key) if base is not None else []
        if base is None or not changed or (path := cache.find(base.digest)) is None:
            return None
        info = entry_info(path)
        places, references = info.get(_PLACES), info.get(_WEIGHTS)
        if not isinstance(places, dict) or not isinstance(references, dict) or not places.keys() >= set(changed):
            return None
        from sdonnx.compiler.changed_values import load_changed

        graph = load_changed(path, references, {name: places[name] for name in changed}, module, signature)
        if graph is not None:
            cache.keep(base.digest, graph)
            _LOGGER.info("%s keeps its graph: %d weights have new values", self._name, len(changed))
        return graph

    def _write(
        self, model: ir.Model, module: torch.nn.Module, signature: GraphSignature, key: GraphKey, folder: Path
    ) -> dict[str, Any]:
        """Write the files of an entry, and return its description.

        Raises:
            OSError: The folder cannot be written, or another thread changed the module meanwhile.
        """
        from sdonnx.compiler.changed_values import weight_places
        from sdonnx.compiler.module_graph import save_model

        references, stored = save_model(model, module, folder)
        if self.key(signature) != key:
            raise OSError(errno.EBUSY, "the module changed while it was compiled")
        shown = {name: key.parts[name] for name in ("class", "method")} | {"precision": signature.target.precision}
        counts = Counter(key.tensors)
        unique = {name for name, digest in zip(key.names, key.tensors, strict=True) if counts[digest] == 1}
        places = weight_places(model, module, unique)
        return {**shown, _PARTS: key.parts, _WEIGHTS: references, _STORED: stored, _PLACES: places}

    def _load_from(
        self,
        cache: FolderCache,
        key: GraphKey,
        module: torch.nn.Module,
        signature: GraphSignature,
        *,
        is_new: bool = False,
    ) -> Graph | None:
        """Load an entry; None if there is none, or it is broken. A broken one of the user's cache is removed.

        Args:
            cache: The cache.
            key: The key.
            module: The module without adapters.
            signature: The signature of the graph, and where it runs.
            is_new: Whether this process has just written it, so that it would not become better if it were made again.
        """
        if (path := cache.find(key.digest)) is None:
            return None
        start = time.perf_counter()
        try:
            if not is_new:
                require_unchanged(path)
            info = entry_info(path)
            references, stored = info.get(_WEIGHTS), info.get(_STORED)
            if not isinstance(references, dict) or not isinstance(stored, dict):
                raise FolderError(f"{path} names no weights", "those of the module", "remove the folder")
            graph = load_saved(path, references, stored, module, signature.target)
        except FolderError as error:
            if cache is self.saved:
                _LOGGER.warning("%s is compiled: its saved graph cannot be loaded (%s)", self._name, error)
                return None
            cache.discard(key.digest, str(error))
            if is_new:
                raise
            return None
        cache.keep(key.digest, graph)
        if cache is not self.saved:
            self._loaded[key.parts["call"]] = key
        _LOGGER.debug("loaded %s from %s in %.2f s", self._name, path, time.perf_counter() - start)
        return graph

    def _warn_of_another_state(self, saved: FolderCache, key: GraphKey) -> None:
        """Log which part of the key differs from a saved graph of the same class and method."""
        names = ("class", "method")
        for entry in reversed(saved.entries()):
            parts = entry.info.get(_PARTS)
            if isinstance(parts, dict) and all(parts.get(name) == key.parts[name] for name in names):
                changed = key.difference(parts)
                _LOGGER.warning("%s is compiled: that in %s has other %s", self._name, saved.root, changed)
                return


def _intact(cache: FolderCache, key: str) -> Path | None:
    """Return the folder of a key after its files were checked; a broken entry is removed."""
    path = cache.find(key)
    if path is not None:
        try:
            require_unchanged(path)
        except FolderError as error:
            cache.discard(key, str(error))
            return None
    return path


def _target_parts(target: GraphTarget) -> dict[str, str]:
    """Return what decides a graph besides its module, by name."""
    kernels = "none" if target.settings.library is None else "own"
    parts = {"kernels": kernels, "provider": target.device.provider, "precision": target.precision}
    if target.device.provider == "cuda":
        parts["compute_capability"] = ".".join(map(str, target.device.capability() or ()))
    return parts
