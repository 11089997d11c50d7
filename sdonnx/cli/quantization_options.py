"""The options of `sdonnx optimize` that quantize a pipeline."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.errors import OptionError, OutputError, ProviderError
from sdonnx.folder.prompt_file import read_prompts
from sdonnx.precision_search.search_options import AUTO, CALIBRATION_CALLS, METHODS, Bounds, ProbeSettings
from sdonnx.quantization.quantization_config import require_fp8_matmuls
from sdonnx.terminal import add_option, console, tensor_progress

if TYPE_CHECKING:
    from rich.table import Table

    from sdonnx.optimize.optimize_request import OptimizeRequest
    from sdonnx.optimize.report import OptimizeReport
    from sdonnx.precision_search.sensitivity import Choice
    from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = [
    "add_quantization_arguments",
    "choice_table",
    "given_quantization",
    "quantization_config",
    "quantization_lines",
    "quantized_request",
]

_ALSO = ", or write the folder on the machine that runs it"

_OF_AUTO = ("max_error", "min_psnr", "min_accuracy", "accuracy_prompts", "sensitivity")

# Options that quantize, or have an effect only with others that do.
_QUANTIZING = (
    "quantize", "quantize_config", "quant_submodules_config_path", *_OF_AUTO, "calibration_prompts",
    "calibration_steps", "calibration_size", "calibration", "export_qdq",
)  # fmt: skip


def add_quantization_arguments(parser: argparse.ArgumentParser, description: str | None = None) -> None:
    """Add the options as a group, with a description of what they apply to."""
    add = partial(add_option, parser.add_argument_group("quantization", description))
    add(
        "--quantize",
        nargs="?",
        const="",
        metavar="TYPE",
        help="quantize matmuls and convolutions of the denoiser, for example int8_weightonly or "
        "fp8_e4m3_e4m3_dynamic (also fp8, the default); auto chooses the modules by measurement",
    )
    add(
        "--quantize_config",
        metavar="JSON",
        help='types by module, as JSON or a file of JSON: {"quant_type": TYPE, "modules": {"COMPONENT:MODULE": TYPE}}',
    )
    add(
        "--quant_submodules_config_path",
        type=Path,
        metavar="FILE",
        help='with --quantize: quantize only the modules of a file {MODULE: {"ssim": x}}, those with the highest SSIM',
    )
    add(
        "--max_error",
        type=float,
        metavar="ERROR",
        help="with --quantize auto: largest error of the denoiser to float32 (default: "
        f"{Bounds.DEFAULT_MAX_ERROR}, unless another bound is given)",
    )
    add(
        "--min_psnr",
        type=float,
        metavar="DB",
        help="with --quantize auto: smallest PSNR of an image to float32; images are generated for each set that is "
        "tried",
    )
    add(
        "--min_accuracy",
        type=float,
        metavar="PERCENT",
        help="with --quantize auto, for trained samples: smallest share of images that show their captions, such as 95",
    )
    add(
        "--accuracy_prompts",
        type=int,
        metavar="N",
        help=f"with --min_accuracy: number of held-out captions (default: {Bounds.captions})",
    )
    add(
        "--sensitivity",
        type=Path,
        metavar="FILE",
        help="with --quantize auto: also write the effect of each module, in the form of "
        "--quant_submodules_config_path",
    )
    add(
        "--calibration_prompts",
        type=Path,
        metavar="FILE",
        help="for --quantize auto, and types with calibrated scales (fp8_static): file with one prompt per line, whose "
        "images are generated to measure activations",
    )
    add(
        "--calibration_method",
        default=METHODS[0],
        metavar="METHOD",
        help="max (default): the largest magnitude; percentile: that of 99 %% of the calls; mse: that with the least "
        "squared error",
    )
    add(
        "--calibration_steps",
        type=int,
        metavar="N",
        help="denoising steps (default: 4, and 20 for the images of --min_accuracy)",
    )
    add(
        "--calibration_size",
        type=int,
        metavar="PIXELS",
        help="height and width of the images (default: the pipeline's)",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="in place of prompts: calibration.json of a calibrated folder, or that folder",
    )
    add(
        "--export_qdq",
        action="store_true",
        help="with --quantize: also write qdq.onnx for each quantized component, in standard operators with "
        "QuantizeLinear and DequantizeLinear, for TensorRT, OpenVINO and other run-times",
    )


def quantized_request(options: argparse.Namespace, request: OptimizeRequest) -> OptimizeRequest:
    """Return the request with the quantization that the options describe; calibrate and choose modules if asked to.

    Raises:
        SdonnxError: an option or the folder cannot be used.
    """
    config = quantization_config(options)
    if config is not None and request.suits_own_kernels and request.kernels == "auto":
        require_fp8_matmuls(config, _capability_here(), _ALSO)
    request = replace(request, quantization=config, export_qdq=options.export_qdq, scales=_scales_of(options))
    if config is not None and config.needs_calibration and options.calibration_prompts is not None:
        from sdonnx.precision_search.calibrate import calibrate

        with tensor_progress() as progress:
            scales = calibrate(options.input, request, _probe_of(options), options.calibration_method, progress)
        request = replace(request, scales=scales)
    return _with_chosen_modules(options, request) if options.quantize == AUTO else request


def quantization_config(options: argparse.Namespace) -> QuantizationConfig | None:
    """Return the types that the options describe; None if they ask for no quantization.

    Raises:
        OptionError: an option cannot be used, has no effect, or contradicts another one.
    """
    from sdonnx.quantization.quantization_config import QuantizationConfig

    name = "" if options.quantize == AUTO else options.quantize
    config = QuantizationConfig.from_flags(name, options.quantize_config, options.quant_submodules_config_path)
    _require_sense(options, config is not None and config.needs_calibration)
    return config


def given_quantization(options: argparse.Namespace, but: Collection[str] = ()) -> str | None:
    """Return the first option of this module that was given, but for some; None if there is none."""
    names = (name for name in _QUANTIZING if name not in but)
    return next((name for name in names if getattr(options, name) not in (None, False)), None)


def _capability_here() -> tuple[int, int] | None:
    """Return the compute capability of this machine's GPU; None if there is none, or no ONNX Runtime for it."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    from sdonnx.runtime.device.device import device_for

    try:
        return device_for("cuda").capability()
    except ProviderError:
        return None


def _require_sense(options: argparse.Namespace, needs_calibration: bool) -> None:
    """Raise if options are given that have no effect, or contradict each other."""
    if options.quantize != AUTO:
        for name in _OF_AUTO:
            if getattr(options, name) is not None:
                raise OptionError(f"--{name} without --quantize {AUTO}", "both", f"leave out --{name}")
        if options.calibration_prompts is not None and not needs_calibration:
            found = "--calibration_prompts without a type with calibrated scales"
            raise OptionError(found, "--quantize fp8_static, int8_static or auto", "leave out --calibration_prompts")
    elif options.quant_submodules_config_path is not None:
        found = f"--quantize {AUTO} and --quant_submodules_config_path, which both choose the modules"
        raise OptionError(found, "one of them")
    if options.calibration is not None and options.calibration_prompts is not None and needs_calibration:
        raise OptionError("--calibration and --calibration_prompts", "one of them")
    if options.accuracy_prompts is not None and options.min_accuracy is None:
        raise OptionError("--accuracy_prompts without --min_accuracy", "both", "leave out --accuracy_prompts")
    if options.quantize == AUTO:
        _bounds_of(options)  # before a calibration, which takes long


def _scales_of(options: argparse.Namespace) -> Mapping[str, Mapping[str, float]] | None:
    """Return the calibrated magnitudes of a file, none yet if they are to be measured, and None without either."""
    from sdonnx.quantization.quantization_config import read_calibration

    if options.calibration is not None:
        return read_calibration(options.calibration)
    return None if options.calibration_prompts is None else {}


def _probe_of(options: argparse.Namespace) -> ProbeSettings:
    """Return the images to generate for a calibration or a choice of modules."""
    for name in ("steps", "size"):
        number = getattr(options, f"calibration_{name}")
        if number is not None and number < 1:
            raise OptionError(f"--calibration_{name} {number}", "a number of at least 1")
    return ProbeSettings(
        None if options.calibration_prompts is None else read_prompts(options.calibration_prompts),
        options.calibration_steps or ProbeSettings.steps,
        options.calibration_size,
        calls=CALIBRATION_CALLS,
    )


def _bounds_of(options: argparse.Namespace) -> Bounds:
    """Return the bounds that the options describe."""
    captions = Bounds.captions if options.accuracy_prompts is None else options.accuracy_prompts
    steps = Bounds.caption_steps if options.calibration_steps is None else options.calibration_steps
    return Bounds(options.max_error, options.min_psnr, options.min_accuracy, captions, steps)


def _with_chosen_modules(options: argparse.Namespace, request: OptimizeRequest) -> OptimizeRequest:
    """Return the request with the modules that are chosen by measurement, and print the sets that were tried."""
    from sdonnx.precision_search.sensitivity import choose_modules

    settings = replace(_probe_of(options), calls=ProbeSettings.calls)
    with tensor_progress() as progress:
        choice = choose_modules(options.input, request, settings, _bounds_of(options), progress)
    console().print(choice_table(choice))
    if options.sensitivity is not None:
        try:
            options.sensitivity.write_text(json.dumps(choice.as_submodules(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"writing {options.sensitivity} failed ({error.strerror})", "a writable file") from error
    return replace(request, quantization=choice.config, quantization_search=choice.as_json())


def choice_table(choice: Choice) -> Table:
    """Return a table of the sets of modules that were tried, the smallest first; the chosen one is marked."""
    from rich.table import Table

    bounds = choice.bounds
    table = Table(title=f"quantized modules, {bounds}")
    accuracy = () if bounds.min_accuracy is None else (f"% of {bounds.captions} captions",)
    for name in ("modules", "MB saved", "error", *(("dB",) if bounds.needs_images else ()), *accuracy, ""):
        table.add_column(name, justify="right")
    for trial in choice.trials:
        numbers = [str(trial.modules), f"{trial.bytes_saved / 1e6:.1f}", f"{trial.error:.2e}"]
        if bounds.needs_images:
            numbers.append("" if trial.images is None else f"{trial.images.psnr_db:.1f}")
        if accuracy:
            judged = None if trial.images is None else trial.images.accuracy
            numbers.append("" if judged is None else str(judged))
        mark = "float32" if trial.modules == 0 else "chosen" if trial.modules == choice.modules else ""
        table.add_row(*numbers, mark)
    return table


def quantization_lines(report: OptimizeReport) -> Iterator[str]:
    """Yield a line for each component and quantization type: the number of weights, and their size before and after."""
    for component in report.components.values():
        for name, found in component.quantized.items():
            before, after = (size / 1e6 for size in found["bytes"])
            yield f"{component.name}: {len(found['modules'])} weights in {name}, {before:.1f} MB -> {after:.1f} MB"
