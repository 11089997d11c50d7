"""Choose the modules to quantize by measurement: the effect of each on the output of its component, within a bound.

Trials run the component in float32 on recorded inputs, with the factors of some products rounded to 8 bits by nodes of
the graph, so that a trial writes no weights.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sdonnx.errors import PrecisionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.graph.edit import dims
from sdonnx.graph.passes import tidy
from sdonnx.metrics import relative_error
from sdonnx.models.spec import Role
from sdonnx.operators.lowering import LowerContribOperators
from sdonnx.optimize.exported import open_exported, quantization_policies
from sdonnx.optimize.request import OptimizeRequest, ProgressCallback
from sdonnx.precision_search.probe_folder import probe_device, runnable, write_wide
from sdonnx.precision_search.probe_settings import ProbeSettings
from sdonnx.precision_search.record_inputs import Feeds, run_probe
from sdonnx.quantization.quantization_config import QuantizationConfig, QuantizationPolicy
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

__all__ = ["Choice", "Sensitivity", "Trial", "choose_modules", "structural_similarity"]

# Up to this number of products each is measured by itself; of larger networks all of a series, such as the queries of
# all blocks, are measured together.
_MAX_SINGLE = 64

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_TRIAL = "trial.onnx"

_WINDOW = 7  # of the structural similarity (Wang et al. 2004, with a uniform window as in scikit-image)


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantizing some modules and nothing else.

    Attributes:
        modules: their paths.
        error: relative error of the component's output.
        ssim: structural similarity of the output to that in float32.
        bytes_saved: bytes that their weights lose, of a component in float16.
    """

    modules: tuple[str, ...]
    error: float
    ssim: float
    bytes_saved: int


@dataclass(frozen=True)
class Trial:
    """A set of modules that was tried.

    Attributes:
        modules: number of modules.
        bytes_saved: bytes that their weights lose, of a component in float16.
        error: relative error of the component's output.
    """

    modules: int
    bytes_saved: int
    error: float


@dataclass(frozen=True)
class Choice:
    """The modules that were chosen.

    Attributes:
        config: the configuration with these modules.
        sensitivities: the effect of each group of modules, the least sensitive first.
        trials: the sets that were tried, by their size: larger sets save more and have larger errors.
        max_error: the bound.
    """

    config: QuantizationConfig
    sensitivities: tuple[Sensitivity, ...]
    trials: tuple[Trial, ...]
    max_error: float

    def as_submodules(self) -> dict[str, dict[str, float]]:
        """Return the effect of each module in the form of OneDiff's files, with the error in addition."""
        return {
            module: {"ssim": round(each.ssim, 6), "error": each.error}
            for each in self.sensitivities
            for module in each.modules
        }


def choose_modules(
    source: Path,
    request: OptimizeRequest,
    settings: ProbeSettings,
    max_error: float,
    progress: ProgressCallback | None = None,
) -> Choice:
    """Return the largest set of the denoiser's modules whose quantization keeps its error within a bound.

    Modules are added in the order of their own errors.

    Args:
        source: the exported pipeline.
        request: the options, with a quantization whose default type is chosen for.
        settings: the images to generate.
        max_error: the largest relative error of the denoiser's output on recorded inputs.
        progress: callback for progress.

    Raises:
        PrecisionError: the bound excludes every module.
        SdonnxError: an option or the folder cannot be used.
    """
    pipeline = open_exported(source, request)
    spec = pipeline.family.with_role(Role.DENOISER)
    policy = quantization_policies(request, pipeline.family)[spec.name]
    device = probe_device(request.provider)
    work = Path(tempfile.mkdtemp(prefix="sdonnx-sensitivity-"))
    try:
        wide = work / "wide"
        wide.mkdir()
        names = [each.name for each in pipeline.family.components]
        write_wide(pipeline, wide, request, progress)
        recorded = run_probe(
            runnable(wide, work / "recorded", names, device, request.provider), device.provider, settings
        )
        scales = (request.scales or {}).get(spec.name, {})
        trials = _Trials(wide / spec.name, policy, recorded.feeds[spec.name], device, scales)
        return _chosen(trials, request.quantization or QuantizationConfig(), max_error, spec.name, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _chosen(
    trials: _Trials, config: QuantizationConfig, max_error: float, name: str, progress: ProgressCallback | None
) -> Choice:
    groups = trials.groups()
    found = []
    for index, (modules, saved) in enumerate(groups.items()):
        if progress is not None:
            progress(f"{name}: measuring the effect of each module", index, len(groups))
        error, similarity = trials.compared(set(modules))
        found.append(Sensitivity(modules, error, similarity, saved))
    found.sort(key=lambda each: (each.error, each.modules))
    tried: dict[int, Trial] = {}

    def error_of(count: int) -> float:
        if count not in tried:
            first = found[:count]
            modules = {module for each in first for module in each.modules}
            tried[count] = Trial(len(modules), sum(each.bytes_saved for each in first), trials.compared(modules)[0])
        return tried[count].error

    count = _largest(len(found), lambda number: error_of(number) <= max_error)
    if count == 0:
        least = min((each.error for each in found), default=math.inf)
        raise PrecisionError(
            f"the error of {name} is {least:.2g} with its least sensitive modules quantized",
            f"at most {max_error:g}",
            "raise --max_error, or take a type with a smaller error, such as int8_weightonly",
        )
    only = tuple(module for each in found[:count] for module in each.modules)
    results = tuple(tried[number] for number in sorted(tried))
    return Choice(replace(config, only=only), tuple(found), results, max_error)


def _largest(maximum: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to a maximum that fits, if larger numbers fit less; 0 if none does."""
    if maximum == 0 or fits(maximum):
        return maximum
    low, high = 0, maximum
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class _Trials:
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
        """Return the groups of modules to measure together, with the bytes that each saves in float16."""
        model = ir.load(self._folder / ONNX_MODEL)
        products = [each for each, *_ in self._quantizable(model) if each.paths]
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


def structural_similarity(image: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Return the mean structural similarity of images (B,C,H,W); 1 for other shapes and images below the window.

    Z. Wang et al., "Image quality assessment: from error visibility to structural similarity", 2004, with a uniform
    window of 7x7; the range is that of the reference.
    """
    if image.ndim != 4 or min(image.shape[2:]) < _WINDOW:
        return 1.0
    x, y = image.astype(np.float64), reference.astype(np.float64)
    span = float(y.max() - y.min()) or 1.0
    mean_x, mean_y = _window_means(x), _window_means(y)
    factor = _WINDOW**2 / (_WINDOW**2 - 1)  # unbiased variances
    variance_x = factor * (_window_means(x * x) - mean_x**2)
    variance_y = factor * (_window_means(y * y) - mean_y**2)
    covariance = factor * (_window_means(x * y) - mean_x * mean_y)
    first, second = (0.01 * span) ** 2, (0.03 * span) ** 2
    similarity = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    similarity /= (mean_x**2 + mean_y**2 + first) * (variance_x + variance_y + second)
    return float(similarity.mean())


def _window_means(images: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(images, (_WINDOW, _WINDOW), axis=(2, 3))
    means: npt.NDArray[np.float64] = windows.mean(axis=(-2, -1))
    return means
