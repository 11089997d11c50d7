"""Trials of quantized modules in float32: outputs of a component, and images of the pipeline.

A trial of a component rounds the factors of matmuls by nodes of the graph and writes no weights. Its time is not a
quantized folder's: weights are rounded in the graph, and matmuls are in float32.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL, PipelineFolder
from sdonnx.graph.edit import dims
from sdonnx.metrics import Proportion, psnr, relative_error, structural_similarity
from sdonnx.models.spec import ComponentSpec, Role
from sdonnx.optimize.exported_pipeline import ExportedPipeline, quantization_policies
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.optimize.optimizer import write_component
from sdonnx.precision_search.fp16_emulation import link_or_copy, write_emulated_component
from sdonnx.precision_search.record_inputs import Feeds, run_graph, run_probe, wide_request
from sdonnx.precision_search.search_options import Bounds, ProbeSettings
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
from sdonnx.runtime.pipeline import NotFiniteWarning, OrtDiffusionPipeline
from sdonnx.sample.shapes.shape_architectures import GUIDANCE_SCALE, TRAINED, reads_shape_captions
from sdonnx.sample.shapes.shape_judge import draw_batches, held_out_captions, score_images, summarize

__all__ = ["ImageQuality", "ImageTrials", "RoundingTrials", "judged_captions", "require_judged_captions"]

# Up to this number of matmuls each is measured by itself; of larger networks all of a series, such as the queries of
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
        matmuls = [each for each, *_ in self._quantizable(model) if each.paths and not self._policy.names(each.paths)]
        groups: dict[Any, tuple[list[str], int]] = {}
        for each in matmuls:
            series = tuple(_NUMBER.sub("*", path) for path in each.paths)
            key = each.paths if len(matmuls) <= _MAX_SINGLE else series
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
        matmuls = (each for each, *_ in self._quantizable(ir.load(self._folder / ONNX_MODEL)))
        return {path for each in matmuls if self._policy.names(each.paths) for path in each.paths}

    def _quantizable(self, model: ir.Model) -> list[tuple[WeightedNode, QuantizationType, bool]]:
        """Return the matmuls that the policy quantizes, with their types and whether activations are rounded."""
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
        return run_graph(
            model, self._folder / _TRIAL, self._device, lambda graph: [graph.run(given) for given in self._feeds]
        )

    def _round(self, each: WeightedNode, kind: QuantizationType, rounds: bool) -> None:
        """Round the weight of a matmul in the graph, and the activations if `rounds`."""
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


@dataclass(frozen=True)
class ImageQuality:
    """Measurements of generated images.

    Attributes:
        psnr_db: smallest PSNR of an image to that in float32, in dB; infinity for equal images.
        accuracy: the images that show their captions; None if they were not judged.
    """

    psnr_db: float
    accuracy: Proportion | None = None


def require_judged_captions(folder: PipelineFolder) -> None:
    """Raise unless the images of a pipeline can be judged by their captions.

    Raises:
        OptionError: the pipeline does not read the captions.
    """
    if not reads_shape_captions(folder):
        raise OptionError(
            f"--min_accuracy for {folder.path}",
            f"one of the trained samples {', '.join(TRAINED)}, whose images can be judged",
            "leave out --min_accuracy; --min_psnr is for every pipeline",
        )


class ImageTrials:
    """Images of sets of quantized modules.

    Args:
        pipeline: the exported pipeline.
        request: the options, with a quantization.
        wide: the pipeline in float32, as the device runs it.
        references: the images in float32 of `settings`.
        device: where the graphs run.
        work: a folder for temporary files.
        settings: images to compare with `references`.
        bounds: the bounds.

    Attributes:
        reference: the quality of the images in float32.

    Raises:
        PrecisionError: the images in float32 are not finite or do not meet the bounds.
    """

    def __init__(
        self,
        pipeline: ExportedPipeline,
        request: OptimizeRequest,
        wide: Path,
        references: Sequence[Any],
        device: Device,
        work: Path,
        settings: ProbeSettings,
        bounds: Bounds,
    ) -> None:
        if not all(np.isfinite(image).all() for image in references):
            raise PrecisionError(
                "images contain NaN or infinity in float32 as well",
                "a pipeline that generates images in float32",
                "leave out --min_psnr and --min_accuracy",
            )
        self._pipeline, self._request, self._device, self._work = pipeline, request, device, work
        self._references, self._settings, self._bounds = references, settings, bounds
        self._denoiser = pipeline.family.with_role(Role.DENOISER)
        self._config = request.quantization or QuantizationConfig()
        self._captions = () if bounds.min_accuracy is None else held_out_captions(bounds.captions, settings.seed)
        accuracy = self._accuracy(wide)
        if accuracy is not None and not self.is_accurate(accuracy):
            raise PrecisionError(
                f"{accuracy} of {accuracy.count} images show their captions in float32",
                f"at least {bounds.min_accuracy:g} %",
                "lower --min_accuracy, or raise --calibration_steps",
            )
        self.reference = ImageQuality(float("inf"), accuracy)
        policies = quantization_policies(request, pipeline.family)
        written = [each for each in pipeline.family.components if policies[each.name].is_active]
        self._folder = work / "images"
        ignored = shutil.ignore_patterns(self._denoiser.name, *(each.name for each in written))
        shutil.copytree(wide, self._folder, ignore=ignored, copy_function=link_or_copy)
        for spec in written:
            if spec is not self._denoiser:
                self._write(spec, self._config)

    def is_accurate(self, accuracy: Proportion) -> bool:
        """Return whether an accuracy meets the bound."""
        # Integers are compared without rounding: 95 of 100 are 95 %.
        return self._bounds.min_accuracy is None or 100 * accuracy.right >= self._bounds.min_accuracy * accuracy.count

    def meets_bounds(self, quality: ImageQuality) -> bool:
        """Return whether images meet the bounds. Images that were not judged do not meet a bound on the accuracy."""
        if self._bounds.min_psnr_db is not None and not quality.psnr_db >= self._bounds.min_psnr_db:
            return False
        return self._bounds.min_accuracy is None or (
            quality.accuracy is not None and self.is_accurate(quality.accuracy)
        )

    def measured(self, modules: Sequence[str]) -> ImageQuality:
        """Return the quality of images with some modules quantized.

        Captions are judged only if the PSNR meets its bound.
        """
        self._write(self._denoiser, replace(self._config, only=tuple(modules)))
        images = run_probe(self._folder, self._device.provider, self._settings, record=False).images
        pairs = zip(images, self._references, strict=True)
        decibels = min(psnr(np.clip(image, 0, 1), np.clip(reference, 0, 1)) for image, reference in pairs)
        if self._bounds.min_psnr_db is not None and not decibels >= self._bounds.min_psnr_db:
            return ImageQuality(decibels)
        return ImageQuality(decibels, self._accuracy(self._folder))

    def _write(self, spec: ComponentSpec, config: QuantizationConfig) -> None:
        """Write a component with a quantization, in float32 where it is not quantized."""
        target = self._folder / spec.name
        shutil.rmtree(target, ignore_errors=True)
        runs_as_it_is = self._device.provider == self._request.provider
        made = target if runs_as_it_is else self._work / "quantized"
        write_component(self._pipeline, spec, made, wide_request(self._request, config))
        if not runs_as_it_is:
            write_emulated_component(made, target)
            shutil.rmtree(made)

    def _accuracy(self, folder: Path) -> Proportion | None:
        """Return the share of captions that a folder's images show; None without captions."""
        if not self._captions:
            return None
        with OrtDiffusionPipeline.from_pretrained(folder, self._device.provider) as pipeline, warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFiniteWarning)  # such an image is wrong
            warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
            pipeline.set_progress_bar_config(disable=True)
            accuracy = judged_captions(pipeline, self._captions, self._bounds.caption_steps, self._settings.seed)
        return Proportion(**accuracy["right"])


def judged_captions(
    pipeline: OrtDiffusionPipeline, captions: Sequence[str], steps: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Generate an image of each caption with a trained sample, and return the accuracy by measure (`summarize`).

    Args:
        pipeline: the trained sample, optimized.
        captions: the captions.
        steps: denoising steps.
        seed: seed of the first batch; the same seed gives the same noise to each folder.
    """

    def generate(batch: list[str], first: int) -> Sequence[Any]:
        return list(pipeline(batch, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE, seed=first).images)

    return summarize(score_images(draw_batches(generate, captions, seed), captions))
