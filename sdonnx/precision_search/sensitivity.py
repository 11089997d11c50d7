"""Choose the modules to quantize by measurement: the effect of each on the output of its component, within bounds."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.pipeline_folder import finite
from sdonnx.models.spec import Role
from sdonnx.optimize.exported_pipeline import open_exported, quantization_policies
from sdonnx.optimize.optimize_request import OptimizeRequest, ProgressCallback
from sdonnx.precision_search.bounds import Bounds
from sdonnx.precision_search.image_trials import ImageQuality, ImageTrials, require_judged_captions
from sdonnx.precision_search.probe_folder import probe_device, runnable, write_wide
from sdonnx.precision_search.probe_settings import ProbeSettings
from sdonnx.precision_search.record_inputs import run_probe
from sdonnx.precision_search.rounding_trials import RoundingTrials
from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = ["Choice", "Sensitivity", "Trial", "choose_modules"]


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
        modules: number of modules, without those that the configuration names: they are quantized in every set.
        bytes_saved: bytes that their weights lose, of a component in float16.
        error: relative error of the component's output.
        images: quality of the images; None if none were generated.
    """

    modules: int
    bytes_saved: int
    error: float
    images: ImageQuality | None = None

    def as_json(self) -> dict[str, Any]:
        """Return JSON values, with the entries `psnr_db` and `accuracy` where they were measured.

        Infinity is None: an error of outputs, or a PSNR of images, that are not finite, and the PSNR of equal images.
        """
        content: dict[str, Any] = {"modules": self.modules, "bytes_saved": self.bytes_saved, "error": self.error}
        if self.images is not None:
            content["psnr_db"] = self.images.psnr_db
            if self.images.accuracy is not None:
                content["accuracy"] = asdict(self.images.accuracy)
        return dict(finite(content))


@dataclass(frozen=True)
class Choice:
    """The modules that were chosen.

    Attributes:
        config: the configuration with these modules.
        sensitivities: the effect of each group of modules, the least sensitive first.
        trials: the sets that were tried, by their size: larger sets save more and have larger errors. With bounds on
            images, the first is the empty set.
        bounds: the bounds.
        settings: the images that were generated for the trials.
        provider: execution provider of the trials.
    """

    config: QuantizationConfig
    sensitivities: tuple[Sensitivity, ...]
    trials: tuple[Trial, ...]
    bounds: Bounds
    settings: ProbeSettings
    provider: str

    @property
    def modules(self) -> int:
        """Number of modules that were chosen."""
        return len(set(self.config.only or ()))

    def as_submodules(self) -> dict[str, dict[str, float]]:
        """Return the effect of each module in the form of OneDiff's files, with the error in addition."""
        return {
            module: {"ssim": round(each.ssim, 6), "error": each.error}
            for each in self.sensitivities
            for module in each.modules
        }

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for the report."""
        return {
            "bounds": self.bounds.as_json(),
            "settings": asdict(self.settings),
            "provider": self.provider,
            "modules": self.modules,
            "trials": [trial.as_json() for trial in self.trials],
        }


def choose_modules(
    source: Path,
    request: OptimizeRequest,
    settings: ProbeSettings,
    bounds: Bounds,
    progress: ProgressCallback | None = None,
) -> Choice:
    """Return the largest set of the denoiser's modules that meets bounds when it is quantized.

    Modules are added in the order of their own errors. A set meets the bounds if all of them hold.

    Args:
        source: the exported pipeline.
        request: the options, with a quantization; modules are chosen for its default type.
        settings: the images to generate.
        bounds: the bounds.
        progress: callback for progress.

    Raises:
        PrecisionError: the bounds exclude every module.
        SdonnxError: an option or the folder cannot be used.
    """
    pipeline = open_exported(source, request)
    if bounds.min_accuracy is not None:
        require_judged_captions(pipeline.folder)
    spec = pipeline.family.with_role(Role.DENOISER)
    policy = quantization_policies(request, pipeline.family)[spec.name]
    config = request.quantization or QuantizationConfig()
    device = probe_device(request.provider)
    work = Path(tempfile.mkdtemp(prefix="sdonnx-sensitivity-"))
    try:
        wide = work / "wide"
        wide.mkdir()
        names = [each.name for each in pipeline.family.components]
        write_wide(pipeline, wide, request, progress)
        folder = runnable(wide, work / "recorded", names, device, request.provider)
        recorded = run_probe(folder, device.provider, settings)
        images = None
        if bounds.needs_images:
            images = ImageTrials(pipeline, request, folder, recorded.images, device, work, settings, bounds)
        scales = (request.scales or {}).get(spec.name, {})
        trials = RoundingTrials(wide / spec.name, policy, recorded.feeds[spec.name], device, scales)
        found = _sensitivities(trials, spec.name, progress)
        search = _Search(trials, images, found, bounds, spec.name, progress)
        count = search.largest()
        only = tuple(module for each in found[:count] for module in each.modules)
        tried = tuple(search.tried[number] for number in sorted(search.tried))
        return Choice(replace(config, only=only), found, tried, bounds, settings, device.provider)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sensitivities(trials: RoundingTrials, name: str, progress: ProgressCallback | None) -> tuple[Sensitivity, ...]:
    """Return the effect of each group of modules, the least sensitive first.

    Raises:
        OptionError: there is no module to choose from.
    """
    groups = trials.groups()
    if not groups:
        raise OptionError(
            f"no module of {name} to choose from",
            "some that the quantization type is for and the configuration does not name",
            "leave out entries of modules, or name a type in place of auto",
        )
    found = []
    for index, (modules, saved) in enumerate(groups.items()):
        if progress is not None:
            progress(f"{name}: measuring the effect of each module", index, len(groups))
        error, similarity = trials.compared(set(modules))
        found.append(Sensitivity(modules, error, similarity, saved))
    return tuple(sorted(found, key=lambda each: (each.error, each.modules)))


class _Search:
    """Trials of sets of modules, each with the first modules in the order of their effects.

    Args:
        trials: runs of the denoiser.
        images: generates images; None if no bound needs them.
        found: the effects of the modules, in order.
        bounds: the bounds.
        name: name of the denoiser.
        progress: callback for progress.

    Attributes:
        tried: the trials by the number of entries of `found` in the set.
    """

    def __init__(
        self,
        trials: RoundingTrials,
        images: ImageTrials | None,
        found: Sequence[Sensitivity],
        bounds: Bounds,
        name: str,
        progress: ProgressCallback | None,
    ) -> None:
        self.tried: dict[int, Trial] = {} if images is None else {0: Trial(0, 0, 0.0, images.reference)}
        self._trials, self._images, self._found, self._bounds = trials, images, found, bounds
        self._name, self._progress, self._named = name, progress, trials.named()

    def largest(self) -> int:
        """Return the number of entries in the largest set that meets the bounds, by bisection.

        Images are generated only for sets with errors within their bound, since they take longer.

        Raises:
            PrecisionError: the bounds exclude every module.
        """
        count = _largest(len(self._found), self._is_within_error)
        if count == 0:
            raise PrecisionError(
                f"the error of {self._name} is {self._trial(1).error:.2g} with its least sensitive modules quantized",
                f"at most {self._bounds.max_error:g}",
                "raise --max_error, or take a type with a smaller error, such as int8_weightonly",
            )
        if self._images is None:
            return count
        count = _largest(count, self._has_right_images)
        if count == 0:
            raise self._wrong_images()
        return count

    def _is_within_error(self, count: int) -> bool:
        return self._bounds.max_error is None or self._trial(count).error <= self._bounds.max_error

    def _has_right_images(self, count: int) -> bool:
        trial = self._trial(count)
        if self._images is None:
            return True
        if self._progress is not None:
            self._progress(f"generating images with {trial.modules} modules quantized", 0, 0)
        quality = self._images.measured(self._first(count))
        self.tried[count] = replace(trial, images=quality)
        return self._images.meets_bounds(quality)

    def _trial(self, count: int) -> Trial:
        if count not in self.tried:
            modules = self._first(count)
            error, _ = self._trials.compared({*modules, *self._named})
            saved = sum(each.bytes_saved for each in self._found[:count])
            self.tried[count] = Trial(len(set(modules)), saved, error)
        return self.tried[count]

    def _first(self, count: int) -> tuple[str, ...]:
        return tuple(module for each in self._found[:count] for module in each.modules)

    def _wrong_images(self) -> PrecisionError:
        """Return the error about the images with the least sensitive modules quantized."""
        quality = self.tried[1].images
        if quality is None or quality.accuracy is None:
            decibels = math.nan if quality is None else quality.psnr_db
            return PrecisionError(
                f"an image has {decibels:.1f} dB to that in float32 with the least sensitive modules quantized",
                f"at least {self._bounds.min_psnr_db:g} dB",
                "lower --min_psnr, or take a type with a smaller error, such as int8_weightonly",
            )
        return PrecisionError(
            f"{quality.accuracy} of images show their captions with the least sensitive modules quantized",
            f"at least {self._bounds.min_accuracy:g} %",
            "lower --min_accuracy, or take a type with a smaller error, such as int8_weightonly",
        )


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
