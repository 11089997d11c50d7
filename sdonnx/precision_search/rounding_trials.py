"""Runs of a component in float32 with the factors of some products rounded to 8 bits by nodes of the graph.

A trial writes no weights. Its time is not a quantized folder's: weights are rounded in the graph, and products
are in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.edit import dims
from sdonnx.graph.passes import tidy
from sdonnx.metrics import relative_error, structural_similarity
from sdonnx.operators.operator_table import LowerContribOperators
from sdonnx.precision_search.record_inputs import Feeds
from sdonnx.quantization.quantization_config import QuantizationPolicy
from sdonnx.quantization.quantization_types import QuantizationType
from sdonnx.quantization.quantize_activations import rounded_along, rounded_by_rows, rounded_by_scale
from sdonnx.quantization.quantize_weights import (
    WeightedNode,
    computed_from_first_input,
    rounds_activations,
    weighted_nodes,
)
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import device_thread
from sdonnx.runtime.device.session import Graph

__all__ = ["RoundingTrials"]

# Up to this number of products each is measured by itself; of larger networks all of a series, such as the queries of
# all blocks, are measured together.
_MAX_SINGLE = 64

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_TRIAL = "trial.onnx"


class RoundingTrials:
    """Runs of a component with some modules quantized.

    Args:
        folder: the component in float32.
        policy: the types of its modules.
        feeds: recorded inputs.
        device: where the graphs run.
        scales: largest magnitude of the activations of each module, for calibrated types.
    """

    def __init__(
        self,
        folder: Path,
        policy: QuantizationPolicy,
        feeds: Sequence[Feeds],
        device: Device,
        scales: Mapping[str, float],
    ) -> None:
        self._folder, self._policy, self._feeds, self._device, self._scales = folder, policy, feeds, device, scales
        self._reference = self._run(set())

    def groups(self) -> dict[tuple[str, ...], int]:
        """Return the groups of modules to measure together, with the bytes that each saves in float16.

        Modules that the policy names are left out: they are quantized in any case.
        """
        model = ir.load(self._folder / ONNX_MODEL)
        products = [each for each, *_ in self._quantizable(model) if each.paths and not self._policy.names(each.paths)]
        groups: dict[Any, tuple[list[str], int]] = {}
        for each in products:
            series = tuple(_NUMBER.sub("*", path) for path in each.paths)
            key = each.paths if len(products) <= _MAX_SINGLE else series
            modules, saved = groups.get(key, ([], 0))
            size = math.prod(int(size) for size in dims(each.weight) or () if isinstance(size, int))
            groups[key] = [*modules, *each.paths], saved + size
        return {tuple(dict.fromkeys(modules)): saved for modules, saved in groups.values()}

    def compared(self, modules: set[str]) -> tuple[float, float]:
        """Return the largest error of an output of any call, and the least similarity, with some modules quantized."""
        errors, similarities = [], []
        for found, expected in zip(self._run(modules), self._reference, strict=True):
            for name, values in found.items():
                errors.append(relative_error(values, expected[name]))
                similarities.append(structural_similarity(values, expected[name]))
        return max(errors), min(similarities)

    def named(self) -> set[str]:
        """Return the modules that are quantized in any case, since the policy names them."""
        products = (each for each, *_ in self._quantizable(ir.load(self._folder / ONNX_MODEL)))
        return {path for each in products if self._policy.names(each.paths) for path in each.paths}

    def _quantizable(self, model: ir.Model) -> list[tuple[WeightedNode, QuantizationType, bool]]:
        """Return the products that the policy quantizes, with their types and whether activations are rounded."""
        moving = computed_from_first_input(model.graph)
        found = []
        for each in weighted_nodes(model.graph):
            kind = self._policy.type_of(each.paths)
            rounds = None if kind is None else rounds_activations(each, kind, moving)
            if kind is not None and rounds is not None:
                found.append((each, kind, rounds))
        return found

    def _run(self, modules: set[str]) -> list[Feeds]:
        model = ir.load(self._folder / ONNX_MODEL)
        for each, kind, rounds in self._quantizable(model) if modules else []:
            if each.paths and set(each.paths) <= modules:
                self._round(each, kind, rounds)
        if self._device.provider == "cpu":
            LowerContribOperators()(model)
        tidy(model)
        path = self._folder / _TRIAL
        ir.save(model, path)

        def results() -> list[Feeds]:
            graph = Graph(path, self._device)
            return [graph.run(given) for given in self._feeds]

        return device_thread(self._device).run(results)

    def _round(self, each: WeightedNode, kind: QuantizationType, rounds: bool) -> None:
        """Round the weight of a product in the graph, and the activations if `rounds`."""
        rank = len(dims(each.weight) or ())
        axes = [axis for axis in range(rank) if kind.per_tensor or axis != each.axis]
        factor = each.node.inputs[1]
        reader = each.node if factor is each.weight or factor is None else factor.producer() or each.node
        index = list(reader.inputs).index(each.weight)
        reader.replace_input_with(index, rounded_along(reader, each.weight, kind.weights, axes))
        x = each.node.inputs[0]
        if not rounds or kind.activations is None or x is None:
            return
        if kind.is_static:
            most = max(self._scales[path] for path in each.paths)
            rounded = rounded_by_scale(each.node, x, kind.activations, most / kind.activations.max_value)
        else:
            rounded = rounded_by_rows(each.node, x, kind.activations, kind.per_tensor)
        each.node.replace_input_with(0, rounded)
