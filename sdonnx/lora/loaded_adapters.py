"""The LoRA files that a pipeline has loaded, their weights, and the initializers that they change."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdonnx.errors import OptionError, WeightsError
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.folder.weight_table import Initializer, WeightTable
from sdonnx.lora.adapter_file import AdapterFile, read_adapter
from sdonnx.lora.changed_component import ChangedComponent, change_component
from sdonnx.lora.weight_change import WeightChange

__all__ = ["AdapterState", "LoadedAdapters", "warn_of_unknown_keys"]

_LOGGER = logging.getLogger("sdonnx")

_BIAS = ".bias"
_SHOWN = 3  # unknown keys in a message


@dataclass(frozen=True)
class AdapterState:
    """Which adapters are in effect, and how much.

    Attributes:
        files: the loaded adapters by name.
        weights: weight of each loaded adapter by component, by the adapter's name.
        active: names of the active adapters by component, in the order in which they apply.
        fused: adapters that stay in the weights when they are unloaded, and their scale.
        enabled: whether active adapters have an effect.
        on_host: names of adapters with factors that are not kept on the device. The host computes the weights of all
            components in which one of them is active.
    """

    files: Mapping[str, AdapterFile] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    active: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused: tuple[tuple[str, AdapterFile, Mapping[str, float]], ...] = ()
    enabled: bool = True
    on_host: frozenset[str] = frozenset()

    def changes(self, component: str) -> dict[str, list[tuple[WeightChange, float]]]:
        """Return the changes of a component's weights, those with a scale of 0 left out."""
        found: defaultdict[str, list[tuple[WeightChange, float]]] = defaultdict(list)
        for file, scales in self._in_effect(component):
            if scale := scales.get(component, 0.0):
                for name, change in file.changes.get(component, {}).items():
                    found[name].append((change, scale))
        return dict(found)

    def is_on_host(self, component: str) -> bool:
        """Return whether the host has to compute a component's weights."""
        active = self.active.get(component, ()) if self.enabled else ()
        return not self.on_host.isdisjoint([*active, *(name for name, *_ in self.fused)])

    def _in_effect(self, component: str) -> Iterator[tuple[AdapterFile, Mapping[str, float]]]:
        for _, file, scales in self.fused:
            yield file, scales
        if self.enabled:
            fused = {name for name, *_ in self.fused}
            for name in self.active.get(component, ()):
                if name not in fused:
                    yield self.files[name], self.weights[name]


class LoadedAdapters:
    """Adapters of a pipeline.

    Args:
        folder: the optimized folder.
        components: names of the components that a LoRA can change.

    Attributes:
        state: which adapters are in effect.
    """

    def __init__(self, folder: PipelineFolder, components: Sequence[str]) -> None:
        self.state = AdapterState()
        self._folder = folder
        self._components = components
        self._tables: dict[str, WeightTable] | None = None

    @property
    def tables(self) -> Mapping[str, WeightTable]:
        """The table of each component that a LoRA can change.

        Raises:
            OptionError: the pipeline has no such component, or an older version has written the folder.
            FolderError: a table is broken.
        """
        if self._tables is None:
            if not self._components:
                raise OptionError(
                    f"{self._folder.path} is a pipeline whose weights no LoRA file can change",
                    "a pipeline with a UNet",
                    "fuse the LoRA with diffusers before the export",
                )
            read = {name: WeightTable.read(self._folder.component(name)) for name in self._components}
            if missing := [name for name, table in read.items() if table is None]:
                raise OptionError(
                    f"{self._folder.path} does not say where the weights of {missing[0]} are",
                    "a folder that this version has optimized",
                    "optimize the exported pipeline again",
                )
            self._tables = {name: table for name, table in read.items() if table is not None}
        return self._tables

    def names(self) -> dict[str, Collection[str]]:
        """Return the names of the weights of each component in its state dict."""
        return {name: sorted({*table.places, *table.fixed, *table.unused}) for name, table in self.tables.items()}

    def read(self, path: Path) -> AdapterFile:
        """Return the content of a file that fits.

        Raises:
            WeightsError: the file cannot be read, or is for another model.
            OptionError: a weight cannot be changed, or the folder cannot.
            FolderError: the configuration next to the file is broken.
        """
        file = read_adapter(path, self.names())
        self.require_fitting(file)
        return file

    def by_component(self, weight: Any) -> dict[str, Any]:
        """Return the weight of an adapter in each component.

        Args:
            weight: one for all components, or by component, where those that are not named have 1; None for 1.

        Raises:
            OptionError: it names a component that no LoRA can change.
        """
        if isinstance(weight, Mapping):
            self.require_components(weight)
            return {component: weight.get(component, 1.0) for component in self.tables}
        return dict.fromkeys(self.tables, 1.0 if weight is None else weight)

    def require_components(self, names: Collection[str]) -> None:
        """Raise OptionError unless a LoRA can change each of these components."""
        if unknown := sorted(set(names) - self.tables.keys()):
            accepted = ", ".join(self.tables)
            raise OptionError(f"a LoRA in the component {unknown[0]}", f"some of {accepted}")

    def require_fitting(self, file: AdapterFile) -> None:
        """Raise unless every change of an adapter can be made.

        Raises:
            WeightsError: the model lacks a weight, or a change has another shape.
            OptionError: a weight cannot be changed, or a bias would be.
        """
        for component, changes in file.changes.items():
            table = self.tables.get(component)
            if table is None:
                raise WeightsError(f"the LoRA changes {component}", f"some of {', '.join(self.tables)}")
            known = {*table.places, *table.fixed, *table.unused}
            if fixed := sorted(changes.keys() & table.fixed):
                raise OptionError(
                    f"the LoRA changes {len(fixed)} weights of {component} that cannot be changed, such as {fixed[0]}",
                    "weights that the folder says the place of",
                    "optimize the exported pipeline again, or fuse the LoRA with diffusers before the export",
                )
            if biases := sorted(name for name in changes if name.endswith(_BIAS)):
                raise OptionError(
                    f"the LoRA changes {len(biases)} biases of {component}, such as {biases[0]}",
                    "changes of weights",
                    "fuse it with diffusers before the export",
                )
            if unknown := sorted(changes.keys() - known):
                raise WeightsError(
                    f"the LoRA changes {len(unknown)} weights that {component} lacks, such as {unknown[0]}",
                    "an adapter for this model",
                )
            for name, change in changes.items():
                if name not in table.unused:
                    change.check(table.shapes[name])

    def changed(
        self, state: AdapterState, component: str, adds_products: Callable[[Initializer], bool] = lambda _: False
    ) -> ChangedComponent:
        """Return the changed initializers of a component.

        Args:
            state: the adapters in effect.
            component: the component.
            adds_products: whether the device can add products of low rank to an initializer. Those of adapters that are
                kept on the host are computed here nevertheless.

        Raises:
            FolderError: the file of weights cannot be read.
            WeightsError: a changed weight exceeds the range of its type.
        """
        options = [] if state.is_on_host(component) else [adds_products]
        return change_component(self.tables[component], state.changes(component), *options)


def warn_of_unknown_keys(name: str, file: AdapterFile) -> None:
    """Log keys of a file that match no weight, if there are any."""
    if file.unknown:
        shown = ", ".join(file.unknown[:_SHOWN])
        _LOGGER.warning("%d keys of the LoRA %s match no weight: %s", len(file.unknown), name, shown)
