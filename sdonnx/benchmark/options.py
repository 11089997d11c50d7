"""The benchmark's options.

They are called as in ONNX Runtime's benchmark.py for Stable Diffusion, and mean what they mean there; OneDiff's names
for the same things are accepted too, and each name with `-` and with `_`.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdonnx.adapters import ADAPTERS
from sdonnx.benchmark.engine import PROVIDERS
from sdonnx.benchmark.engines import COMPILE_MODES, ENGINES
from sdonnx.benchmark.measure import WARM_UPS
from sdonnx.benchmark.rivals import NAMES
from sdonnx.errors import OptionError, ProviderError
from sdonnx.prompts import PROMPTS
from sdonnx.sample.adapters import FILES
from sdonnx.sample.architectures import ARCHITECTURES
from sdonnx.terminal import add_debug

__all__ = ["MULTIPLE", "add_arguments", "refuse"]

MULTIPLE = 8
"""Pixels of a latent, in every published autoencoder of the family."""

# From, to (inclusive) of what can be counted. A denoiser is trained on 1000 noise levels; seeds are torch's.
_RANGES = {
    "batch_size": (1, 1024),
    "steps": (1, 1000),
    "batch_count": (1, 10_000),
    "num_prompts": (1, len(PROMPTS)),
    "warmups": (0, 1000),
    "rounds": (1, 1000),
    "seed": (-(2**63), 2**64 - 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Time engines under one clock, compare their images, append what was measured to files."
    _add_what(parser)
    _add_how(parser)
    _add_results(parser)
    add_debug(parser)


def _add(parser: argparse._ActionsContainer, *names: str, **options: Any) -> None:
    """Add an option under all its names, each spelled with `_` and with `-`."""
    spelled = [spelling for name in names for spelling in dict.fromkeys((name, _dashed(name)))]
    options.setdefault("dest", next(name for name in names if name.startswith("--"))[2:].replace("-", "_"))
    parser.add_argument(*spelled, **options)


def _dashed(name: str) -> str:
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _add_what(parser: argparse.ArgumentParser) -> None:
    def add(*names: str, **options: Any) -> None:
        _add(group, *names, **options)

    group = parser.add_argument_group("what is drawn")
    folders = (
        "pipelines of the same weights, one of each kind: diffusers', exported, optimized; what is missing is made"
    )
    add("-p", "--pipeline", "--model", nargs="+", type=Path, default=[], metavar="FOLDER", help=folders)
    add("--arch", help="in place of a folder, a sample pipeline with random weights: tiny, sd15, ...")
    add("-w", "--work_dir", type=Path, default=Path("benchmark_work"), help="where folders are made (%(default)s)")
    add("-v", "--version", help="a label of the rows, such as 1.5 (default: the model's name)")
    add("-b", "--batch_size", "--batch", nargs="+", type=int, default=[1], help="images together, one or more (1)")
    add("--height", nargs="+", type=int, default=[512], help="pixels, one number or more (512)")
    add("--width", nargs="+", type=int, help="pixels, as many numbers as heights (default: the heights)")
    add("-s", "--steps", type=int, default=50, help="denoising steps (50)")
    add("--scheduler", help="the sampler for all engines: diffusers' class or a short name")
    add("-n", "--num_prompts", type=int, default=1, help=f"how many of the {len(PROMPTS)} known prompts (1)")
    add("--prompt", help="a prompt in place of them")
    add("--negative_prompt", help="what to draw away from")
    add("--guidance_scale", type=float, default=7.5, help="weight of the prompt (7.5)")
    add("--seed", type=int, default=0, help="of the noise, in every run (0)")
    add("--input_image", help="an image to start from: image to image")
    add("--strength", type=float, default=0.8, help="how far from that image to go (0.8)")
    add(
        "--ip_adapter",
        nargs="+",
        type=Path,
        help="files of IP-Adapters (default: the plain one of --arch ...-ip-adapter)",
    )
    add("--ip_adapter_image", help="an image for every adapter (default: a drawn one)")
    add("--ip_adapter_scale", nargs="+", type=float, help="weights of the adapters, a row for each (0.6)")
    add("--enable_safety_checker", action="store_true", help="run the folders' safety checkers")


def _add_how(parser: argparse.ArgumentParser) -> None:
    def add(*names: str, **options: Any) -> None:
        _add(group, *names, **options)

    group = parser.add_argument_group("engines and clock")
    engines = f"{', '.join(NAMES)}; compiled ones also with a mode: torch-compile:max-autotune (default: onnxruntime)"
    add("-e", "--engine", nargs="+", default=["onnxruntime"], metavar="ENGINE", help=engines)
    add("-r", "--provider", help="cuda or cpu (default: what an optimized folder is for, else cuda where it is)")
    add("--enable_torch_compile", action="store_true", help="compile the engine torch")
    add("--compile_mode", help=f"{', '.join(COMPILE_MODES)} (reduce-overhead)")
    add("--use_xformers", action="store_true", help="xformers' attention in the engine torch")
    add("--use_io_binding", action="store_true", help="bind buffers in onnxruntime-plain; onnxruntime always does")
    add("-g", "--enable_cuda_graph", action="store_true", help="accepted: onnxruntime always captures CUDA graphs")
    add("-c", "--batch_count", type=int, default=5, help="timed runs of each prompt in each round (5)")
    add("--warmups", type=int, help=f"runs before the clock counts ({WARM_UPS})")
    add("--skip_warmup", action="store_true", help="the same as --warmups 0")
    add("--rounds", type=int, help="processes of each engine, in a new order each time (2, or 1 for one engine)")
    add("--timeout", type=float, help="seconds that a process may take (default: any time)")
    add("--python", nargs="+", default=[], metavar="ENGINE=PYTHON", help="another environment's Python for an engine")


def _add_results(parser: argparse.ArgumentParser) -> None:
    def add(*names: str, **options: Any) -> None:
        _add(group, *names, **options)

    group = parser.add_argument_group("results")
    add("--csv", type=Path, default=Path("benchmark_result.csv"), help="rows are appended to it (%(default)s)")
    add("--json", type=Path, help="full records are appended to it, a line each")
    add("--report", type=Path, help="write a page with tables, plots and images")
    add("--output_image", type=Path, help="write each engine's first image, its name added")
    add("--print_output", action="store_true", help="show the images on the terminal")
    add("--profile", action="store_true", help="also device time by kind of operator")
    add("--throughput", action="store_true", help="also fit time = a * steps + b")
    add("--run_multiple_resolutions", action="store_true", help="also visit several sizes in one process")


def refuse(options: argparse.Namespace) -> None:
    """Fill in what was left out, and raise OptionError for what can be told from the options alone."""
    if options.skip_warmup and options.warmups:
        raise OptionError("--skip_warmup and --warmups", "one of them", "leave one out")
    options.warmups = 0 if options.skip_warmup else WARM_UPS if options.warmups is None else options.warmups
    options.rounds = options.rounds if options.rounds is not None else 1 if len(options.engine) == 1 else 2
    options.width = options.width or options.height
    for name, (least, most) in _RANGES.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if not least <= value <= most:
                raise OptionError(f"--{name} is {value}", f"{least} to {most}", "pass such a number")
    for name in ("height", "width"):
        for pixels in getattr(options, name):
            if pixels < 1 or pixels % MULTIPLE:
                raise OptionError(
                    f"--{name} is {pixels}", f"a multiple of {MULTIPLE}", f"choose a {name} that {MULTIPLE} divides"
                )
    if len(options.height) != len(options.width):
        raise OptionError(
            f"{len(options.height)} heights and {len(options.width)} widths", "as many of both", "pass them in pairs"
        )
    if not 0 < options.strength <= 1:
        raise OptionError(f"--strength is {options.strength}", "more than 0, at most 1", "pass such a number")
    if options.input_image is not None and not Path(options.input_image).is_file():
        raise OptionError(f"{options.input_image} is no file", "an image", "pass the path of one")
    if options.provider not in (None, *PROVIDERS):
        raise ProviderError(
            f"the provider {options.provider!r} is unknown", f"one of {', '.join(PROVIDERS)}", "pass one"
        )
    options.python = _pythons(options.python)
    if options.arch is not None and options.arch not in ARCHITECTURES:
        raise OptionError(f"--arch {options.arch}", f"one of {', '.join(ARCHITECTURES)}", "pass one")
    if options.arch is None and not options.pipeline:
        raise OptionError("no pipeline", "-p FOLDER or --arch NAME", "pass one of them")
    if options.throughput and options.steps == 1:
        raise OptionError("--throughput with one step", "2 at least", "pass for example --steps 20")
    if options.timeout is not None and not 0 < options.timeout <= threading.TIMEOUT_MAX:
        raise OptionError(f"--timeout is {options.timeout}", "more than 0 s, and a year at most", "pass such a number")
    if not math.isfinite(options.guidance_scale):
        raise OptionError(f"--guidance_scale is {options.guidance_scale}", "a finite number", "pass such a number")
    if options.input_image is not None and "onnxruntime-plain" in options.engine:
        raise OptionError("--input-image for the engine onnxruntime-plain", "another engine", "leave one of them out")
    if options.input_image is not None and int(options.steps * options.strength) < 1:
        raise OptionError(
            f"--strength {options.strength} of {options.steps} steps", "one step at least", "raise one of them"
        )
    if options.ip_adapter is None and options.arch is not None and ARCHITECTURES[options.arch].adapters is not None:
        options.ip_adapter = [options.work_dir / options.arch / ADAPTERS / FILES[0]]
    elif options.ip_adapter:
        options.ip_adapter = [_adapter_file(path) for path in options.ip_adapter]
    if not options.ip_adapter and (options.ip_adapter_image is not None or options.ip_adapter_scale):
        raise OptionError("--ip_adapter_image or --ip_adapter_scale", "--ip_adapter too", "name the adapter")
    options.ip_adapter_scale = (options.ip_adapter_scale or [0.6]) if options.ip_adapter else [None]
    for scale in options.ip_adapter_scale:
        if scale is not None and not math.isfinite(scale):
            raise OptionError(f"--ip_adapter_scale is {scale}", "a finite number", "pass such a number")
    _refuse_images(options)


def _adapter_file(given: Path) -> Path:
    """Return the file of an IP-Adapter that lies in a folder alone, or is named; its image encoder lies beside it."""
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    if len(files) != 1 or not files[0].is_file():
        raise OptionError(f"--ip_adapter {given}", "a .safetensors file, or a folder with one", "name the file")
    return files[0]


def _refuse_images(options: argparse.Namespace) -> None:
    from PIL import Image

    for given in (options.input_image, options.ip_adapter_image):
        if given is None:
            continue
        try:
            with Image.open(given) as file:
                file.verify()
        except OSError as error:
            raise OptionError(f"{given} cannot be read ({error})", "an image", "give another") from error
    if options.output_image is not None:
        suffix = options.output_image.suffix.lower()
        if suffix and suffix not in Image.registered_extensions():
            raise OptionError(f"--output_image {options.output_image}", "a name such as x.png", "choose another")


def _pythons(given: Sequence[str]) -> dict[str, str]:
    """Return the interpreters that `--python` names, by engine."""
    pythons = {}
    for each in given:
        engine, equals, path = each.partition("=")
        if not equals or engine not in ENGINES:
            raise OptionError(
                f"--python {each}",
                f"ENGINE=PYTHON with one of {', '.join(ENGINES)}",
                "pass for example optimum=venv/bin/python",
            )
        pythons[engine] = path
    return pythons
