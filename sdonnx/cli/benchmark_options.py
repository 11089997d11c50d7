"""The benchmark's options.

Names and meanings follow ONNX Runtime's benchmark.py for Stable Diffusion. OneDiff's names for the same options
are also accepted, and each name can be spelled with `-` and with `_`.
"""

from __future__ import annotations

import argparse
import math
import re
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sdonnx.benchmark.engine import PROVIDERS
from sdonnx.benchmark.engines import ENGINES, SdonnxCompileEngine, find_engine
from sdonnx.benchmark.engines.pytorch import COMPILE_MODES
from sdonnx.benchmark.measure import RARE_RESOLUTIONS, WARM_UPS
from sdonnx.benchmark.rivals import COMPILERS, NAMES
from sdonnx.cli.quantization_options import add_quantization_arguments, given_quantization, quantization_config
from sdonnx.errors import OptionError, ProviderError
from sdonnx.folder.folder_version import FolderKind, folder_kind
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.precision_search.search_options import AUTO
from sdonnx.sample.write_sample import ARCHITECTURES
from sdonnx.terminal import add_common, add_option

__all__ = ["MULTIPLE", "add_arguments", "check_options", "compiled_types"]

MULTIPLE = 8
"""Pixels per latent, in every published autoencoder."""

# Versions of ONNX Runtime's benchmark.py for Stable Diffusion -> sample pipelines of the same architecture.
_ARCHITECTURES = {"1.4": "sd15", "1.5": "sd15", "2.0": "sd21", "2.1": "sd21"}

# Inclusive ranges. A denoiser is trained with 1000 noise levels; the range of seeds is torch's.
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
    parser.description = (
        "Measure the latency of several engines, compare their images, and append the results to files."
    )
    _add_workload(parser)
    _add_engines(parser)
    _add_results(parser)
    add_quantization_arguments(
        parser,
        "for the folder that the command optimizes for the engine onnxruntime; the first three also for the engine "
        "sdonnx-compile, where auto is the mode O3, and which is not quantized with one of the others",
    )
    add_common(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = partial(add_option, parser.add_argument_group("workload"))
    folders = (
        "pipeline folders with the same weights, at most one of each kind: diffusers', exported, optimized; missing"
        " ones are made"
    )
    add("-p", "--pipeline", "--model", nargs="+", type=Path, default=[], metavar="FOLDER", help=folders)
    add("--arch", help="use a sample pipeline with random weights instead of a folder: tiny, sd15, ...")
    add("-w", "--work_dir", type=Path, default=Path("benchmark_work"), help="folder for new folders (%(default)s)")
    add("-v", "--version", help="label of the rows, such as 1.5 (default: the model's name)")
    add("-b", "--batch_size", "--batch", nargs="+", type=int, default=[1], help="batch sizes (1)")
    add("--height", nargs="+", type=int, default=[512], help="image heights in pixels (512)")
    add("--width", nargs="+", type=int, help="image widths in pixels, one for each height (default: the heights)")
    add("-s", "--steps", type=int, default=50, help="number of denoising steps (50)")
    add("--scheduler", help="sampler of all engines: a class of diffusers or a short name")
    add("-n", "--num_prompts", type=int, default=1, help=f"number of prompts, of {len(PROMPTS)} predefined ones (1)")
    add("--prompt", help="use this prompt instead of the predefined ones")
    add("--negative_prompt", help="the negative prompt")
    add("--guidance_scale", type=float, default=7.5, help="the guidance scale (7.5)")
    add("--seed", type=int, default=0, help="seed of the noise in every run (0)")
    add("--input_image", help="start image, for image to image")
    add("--strength", type=float, default=0.8, help="strength of image to image (0.8)")
    add(
        "--ip_adapter",
        nargs="+",
        type=Path,
        help="files of IP-Adapters (default: the first one of --arch ...-ip-adapter)",
    )
    add("--ip_adapter_image", help="prompt image of every adapter (default: a synthetic image)")
    add("--ip_adapter_scale", nargs="+", type=float, help="scales of the adapters, one row for each (0.6)")
    add("--enable_safety_checker", action="store_true", help="run the folders' safety checkers")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    add = partial(add_option, parser.add_argument_group("engines and timing"))
    engines = (
        f"{', '.join(NAMES)}; compiled ones accept a mode: torch-compile:max-autotune; FILE.py:NAME for an engine of "
        "your own (default: onnxruntime)"
    )
    add("-e", "--engine", nargs="+", metavar="ENGINE", help=engines)
    add(
        "--compiler",
        nargs="+",
        metavar="COMPILER",
        help="the engines by OneDiff's option, in place of -e: none (torch), sdonnx (sdonnx-compile), torch "
        f"(torch-compile); also {' and '.join(list(COMPILERS)[3:])}",
    )
    add(
        "--compiler_config",
        metavar="JSON",
        help="options of the engine sdonnx-compile, as of sdonnx.compile_pipe; without that engine: mode, dynamic and "
        "fullgraph of torch.compile",
    )
    add(
        "-r",
        "--provider",
        help="cuda or cpu (default: the target of the optimized folder, else cuda if there is a GPU)",
    )
    add("--enable_torch_compile", action="store_true", help="compile the engine torch")
    add("--compile_mode", help=f"{', '.join(COMPILE_MODES)} (reduce-overhead)")
    add("--use_xformers", action="store_true", help="use xformers' attention in the engine torch")
    add("--use_io_binding", action="store_true", help="no effect: onnxruntime always binds buffers")
    add("-g", "--enable_cuda_graph", action="store_true", help="no effect: onnxruntime always captures CUDA graphs")
    add("-c", "--batch_count", type=int, default=5, help="timed runs of each prompt in each round (5)")
    add("--warmups", type=int, help=f"number of warm-up runs ({WARM_UPS})")
    add("--skip_warmup", action="store_true", help="same as --warmups 0")
    add("--rounds", type=int, help="processes of each engine, in a new order each time (2, or 1 for one engine)")
    add("--timeout", type=float, help="time limit of a process in seconds (default: none)")
    add("--python", nargs="+", default=[], metavar="ENGINE=PYTHON", help="interpreter of an engine")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = partial(add_option, parser.add_argument_group("results"))
    add("--csv", type=Path, default=Path("benchmark_result.csv"), help="append rows to this file (%(default)s)")
    add("--json", type=Path, help="append full records to this file, one per line")
    add("--report", type=Path, help="write an HTML page with tables, plots and images")
    add("--output_image", type=Path, help="write each engine's first image, with the engine in its name; print paths")
    add("--print_output", action="store_true", help="show the images on the terminal")
    add("--profile", action="store_true", help="also measure GPU time by kind of operator")
    add("--throughput", action="store_true", help="also fit time = a * steps + b")
    sizes = "; true or no value: the usual ones"
    add(
        "--run_multiple_resolutions",
        nargs="*",
        metavar="HEIGHTxWIDTH",
        help=f"also measure several sizes in one process{sizes}, from half to 5/4 of the height and the width",
    )
    add(
        "--run_rare_resolutions",
        nargs="*",
        metavar="HEIGHTxWIDTH",
        help=f"the same with sizes that no model was trained for{sizes}, "
        f"{', '.join(f'{height}x{width}' for height, width in RARE_RESOLUTIONS)}",
    )


def check_options(options: argparse.Namespace) -> None:
    """Set defaults that depend on other options, and raise OptionError for invalid options."""
    if options.skip_warmup and options.warmups:
        raise OptionError("--skip_warmup and --warmups", "one of them")
    options.warmups = 0 if options.skip_warmup else WARM_UPS if options.warmups is None else options.warmups
    options.rounds = options.rounds if options.rounds is not None else 1 if len(options.engine) == 1 else 2
    options.width = options.width or options.height
    for name in ("run_multiple_resolutions", "run_rare_resolutions"):
        setattr(options, name, _sizes(name, getattr(options, name)))
    for name, (minimum, maximum) in _RANGES.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if not minimum <= value <= maximum:
                raise OptionError(f"--{name} is {value}", f"{minimum} to {maximum}", "pass a number in this range")
    for name in ("height", "width"):
        for pixels in getattr(options, name):
            if pixels < 1 or pixels % MULTIPLE:
                raise OptionError(
                    f"--{name} is {pixels}", f"a multiple of {MULTIPLE}", f"choose a {name} that {MULTIPLE} divides"
                )
    if len(options.height) != len(options.width):
        raise OptionError(f"{len(options.height)} heights and {len(options.width)} widths", "equal numbers")
    if not 0 < options.strength <= 1:
        raise OptionError(f"--strength is {options.strength}", "more than 0, at most 1", "pass a number in this range")
    if options.input_image is not None and not Path(options.input_image).is_file():
        raise OptionError(f"{options.input_image} is not a file", "an image", "pass the path of an image")
    if options.provider not in (None, *PROVIDERS):
        raise ProviderError(f"the provider {options.provider!r} is unknown", f"one of {', '.join(PROVIDERS)}")
    options.python = _pythons(options.python, options.engine)
    if options.arch is not None and options.arch not in ARCHITECTURES:
        raise OptionError(f"--arch {options.arch}", f"one of {', '.join(ARCHITECTURES)}")
    if options.arch is None and not options.pipeline:
        raise _no_pipeline(options.version)
    if options.throughput and options.steps == 1:
        raise OptionError("--throughput with one step", "at least 2", "pass for example --steps 20")
    if options.timeout is not None and not 0 < options.timeout <= threading.TIMEOUT_MAX:
        raise OptionError(
            f"--timeout is {options.timeout}", "more than 0 s, at most a year", "pass a number in this range"
        )
    if not math.isfinite(options.guidance_scale):
        raise OptionError(f"--guidance_scale is {options.guidance_scale}", "a finite number")
    _check_quantization(options)
    if options.input_image is not None and int(options.steps * options.strength) < 1:
        raise OptionError(f"--strength {options.strength} of {options.steps} steps", "at least one step")
    own = () if options.arch is None else ARCHITECTURES[options.arch].adapter_files
    if options.ip_adapter is None and own:
        options.ip_adapter = [options.work_dir / options.arch / own[0]]
    elif options.ip_adapter:
        options.ip_adapter = [_adapter_file(path) for path in options.ip_adapter]
    if not options.ip_adapter and (options.ip_adapter_image is not None or options.ip_adapter_scale):
        raise OptionError("--ip_adapter_image or --ip_adapter_scale", "--ip_adapter as well")
    options.ip_adapter_scale = (options.ip_adapter_scale or [0.6]) if options.ip_adapter else [None]
    for scale in options.ip_adapter_scale:
        if scale is not None and not math.isfinite(scale):
            raise OptionError(f"--ip_adapter_scale is {scale}", "a finite number")
    _check_images(options)


def _sizes(name: str, given: Sequence[str] | None) -> list[tuple[int, int]] | None:
    """Return the sizes (height, width) that an option names, an empty list for the usual ones, and None for none."""
    if given is None or [word.lower() for word in given] in (["false"], ["no"], ["0"]):
        return None
    if [word.lower() for word in given] in (["true"], ["yes"], ["1"]):
        return []
    sizes = []
    for text in given:
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
        size = (0, 0) if found is None else (int(found[1]), int(found[2]))
        if not min(size) or any(pixels % MULTIPLE for pixels in size):
            raise OptionError(
                f"--{name} {text}", f"HEIGHTxWIDTH in multiples of {MULTIPLE}, or true", "pass for example 768x512"
            )
        sizes.append(size)
    return sizes


def _check_quantization(options: argparse.Namespace) -> None:
    """Raise unless the options that quantize apply to a folder that the command optimizes."""
    given = given_quantization(options)
    if given is None:
        return
    others = _not_of_a_compiler(options)
    if "onnxruntime" not in options.engine and (others or SdonnxCompileEngine.name not in options.engine):
        given = others or given
        place = " in place of --compiler" if options.compiler else ""
        raise OptionError(
            f"--{given} for {', '.join(options.engine)}", "the engine onnxruntime, which reads an optimized folder",
            f"pass -e {' '.join(options.engine)} onnxruntime{place}, or omit the option",
        )  # fmt: skip
    for path in options.pipeline:
        if folder_kind(path) is FolderKind.OPTIMIZED:
            raise OptionError(
                f"--{given} and {path}, which is optimized", "a folder that the command optimizes",
                "quantize it with sdonnx optimize, or pass the diffusers or the exported folder",
            )  # fmt: skip
    quantization_config(options)  # before folders are made, which takes minutes


def compiled_types(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `sdonnx.compile_pipe` for the options that quantize.

    They are empty without the engine sdonnx-compile, and if there are options that quantize folders only.

    Raises:
        OptionError: An option cannot be used, or contradicts another one.
    """
    if SdonnxCompileEngine.name not in options.engine or _not_of_a_compiler(options):
        return {}
    config = quantization_config(options)
    if config is None:
        return {}
    types = {"quant_type": options.quantize, "quantize_config": options.quantize_config}
    if options.quantize == AUTO:
        if config.default is None:  # O3 has no effect on a configuration, so nothing would be chosen
            raise OptionError(
                f"--quantize {AUTO} and --quantize_config without a type for the denoiser", "a quant_type",
                'add for example "quant_type": "fp8"',
            )  # fmt: skip
        types = {"mode": "O3", "quantize_config": options.quantize_config}
    elif options.quant_submodules_config_path is not None:
        # The options of `sdonnx.compile_pipe` name no file of modules, but the modules themselves.
        content = config.as_json()
        types = {"quant_type": content.pop("quant_type"), "quantize_config": content}
    elif options.quantize == "" and options.quantize_config is None:
        types = {"quant_type": "fp8"}
    return {name: value for name, value in types.items() if value}


def _not_of_a_compiler(options: argparse.Namespace) -> str | None:
    """Return the first given option that quantizes folders and no compiled modules, None if there is none."""
    return given_quantization(options, but=("quantize", "quantize_config", "quant_submodules_config_path"))


def _no_pipeline(version: str | None) -> OptionError:
    """Return the error about a missing pipeline. ONNX Runtime's script downloads the one of the version."""
    if version is None:
        return OptionError("no pipeline", "-p FOLDER or --arch NAME")
    similar = _ARCHITECTURES.get(version)
    random = f", or --arch {similar} for that architecture with random weights" if similar else ""
    return OptionError(
        f"no pipeline: here -v {version} is a label of the rows, and downloads no model",
        "-p FOLDER or --arch NAME",
        f"pass -p with the folder of a diffusers, exported or optimized pipeline{random}",
    )


def _adapter_file(given: Path) -> Path:
    """Return the file of an adapter: the file itself, or the only file in a folder."""
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    if len(files) != 1 or not files[0].is_file():
        raise OptionError(f"--ip_adapter {given}", "a .safetensors file, or a folder with one")
    return files[0]


def _check_images(options: argparse.Namespace) -> None:
    from PIL import Image

    for given in (options.input_image, options.ip_adapter_image):
        if given is None:
            continue
        try:
            with Image.open(given) as file:
                file.verify()
        except OSError as error:
            raise OptionError(f"{given} cannot be read ({error})", "an image") from error
    if options.output_image is not None:
        suffix = options.output_image.suffix.lower()
        if suffix and suffix not in Image.registered_extensions():
            raise OptionError(f"--output_image {options.output_image}", "a name such as x.png")


def _pythons(given: Sequence[str], engines: Sequence[str]) -> dict[str, str]:
    """Parse `--python` to interpreters by engine."""
    known = [*ENGINES, *(find_engine(name).name for name in engines if ".py:" in name)]
    pythons = {}
    for each in given:
        engine, equals, path = each.partition("=")
        if not equals or engine not in known:
            raise OptionError(
                f"--python {each}",
                f"ENGINE=PYTHON with one of {', '.join(known)}",
                "pass for example torch=venv/bin/python",
            )
        pythons[engine] = path
    return pythons
