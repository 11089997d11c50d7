"""`python scripts/benchmark.py`, or `python -m sdonnx benchmark`: time a pipeline with one engine.

Options are called as in ONNX Runtime's benchmark.py for Stable Diffusion, and mean what they mean there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.benchmark.engine import EngineOptions, Workload
from sdonnx.benchmark.engines import COMPILE_MODES, ENGINES
from sdonnx.benchmark.measure import PROMPTS, WARM_UPS, measure_engine
from sdonnx.benchmark.record import (
    COLUMNS,
    Row,
    append_json,
    append_row,
    record_of,
    refuse_csv,
    refuse_json,
    row_of,
)
from sdonnx.errors import OptionError
from sdonnx.terminal import add_debug, console, guarded

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["VERSIONS", "add_arguments", "main", "run"]

VERSIONS = ("1.5", "2.0", "2.1")
"""Of Stable Diffusion: a label of the row."""

_MULTIPLE = 8  # pixels of a latent, in every published autoencoder of the family

# From, to (inclusive) of what can be counted. A denoiser is trained on 1000 noise levels; seeds are torch's.
_RANGES = {
    "batch_size": (1, 1024),
    "steps": (1, 1000),
    "batch_count": (1, 10_000),
    "num_prompts": (1, len(PROMPTS)),
    "seed": (-(2**63), 2**64 - 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Time a pipeline and append what was measured to a CSV file."
    parser.add_argument("-e", "--engine", default="onnxruntime", help=f"{' or '.join(ENGINES)} (default first)")
    parser.add_argument("-r", "--provider", default=None, help="cuda or cpu; default: cuda where available")
    parser.add_argument("-v", "--version", default="1.5", help=f"{', '.join(VERSIONS)}: a label (default 1.5)")
    parser.add_argument(
        "-p",
        "--pipeline",
        required=True,
        type=Path,
        help="onnxruntime: an optimized folder; torch: diffusers'",
    )
    parser.add_argument("-b", "--batch_size", type=int, default=1, help="images drawn together (default 1)")
    parser.add_argument("--height", type=int, default=512, help="in pixels (default 512)")
    parser.add_argument("--width", type=int, default=512, help="in pixels (default 512)")
    parser.add_argument("-s", "--steps", type=int, default=50, help="denoising steps (default 50)")
    parser.add_argument("-n", "--num_prompts", type=int, default=1, help=f"1 to {len(PROMPTS)} (default 1)")
    parser.add_argument("-c", "--batch_count", type=int, default=5, help="batches of each prompt (default 5)")
    parser.add_argument("--enable_safety_checker", action="store_true", help="refused: pipelines here have none")
    parser.add_argument("--enable_torch_compile", action="store_true", help="compile the torch pipeline")
    parser.add_argument("--compile_mode", default=None, help=f"{', '.join(COMPILE_MODES)} (default reduce-overhead)")
    parser.add_argument("--skip_warmup", action="store_true", help=f"time from the first run, not after {WARM_UPS}")
    parser.add_argument("--seed", type=int, default=0, help="of the noise, in every run (default 0)")
    parser.add_argument("--csv", type=Path, default=Path("benchmark_result.csv"), help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=None, help="also append a full record, as a line of JSON")
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _refuse(options)
    refuse_csv(options.csv)
    if options.json is not None:
        refuse_json(options.json)
    compile_mode = (options.compile_mode or "reduce-overhead") if options.enable_torch_compile else None
    engine = ENGINES[options.engine](EngineOptions(options.pipeline, options.provider, compile_mode))
    workload = Workload(options.batch_size, options.height, options.width, options.steps, options.seed)
    prompts = PROMPTS[: options.num_prompts]
    out = console()
    measured = measure_engine(
        engine,
        workload,
        prompts,
        options.batch_count,
        warm_ups=0 if options.skip_warmup else WARM_UPS,
        told=lambda text: out.print(text, style="dim"),
    )
    row = row_of(engine, options.version, workload, len(prompts), options.batch_count, measured)
    try:
        append_row(options.csv, row)
        if options.json is not None:
            append_json(options.json, record_of(engine, workload, prompts, row, measured))
    finally:
        # Shown also where it could not be written: minutes went into it.
        out.print(_table(row))
    out.print(f"appended to {options.csv}")
    return 0


def _refuse(options: argparse.Namespace) -> None:
    """Raise OptionError for what can be told from the options alone."""
    _one_of("engine", options.engine, tuple(ENGINES))
    _one_of("version", options.version, VERSIONS)
    for name, (least, most) in _RANGES.items():
        if not least <= getattr(options, name) <= most:
            raise OptionError(f"--{name} is {getattr(options, name)}", f"{least} to {most}", "pass such a number")
    for name in ("height", "width"):
        pixels = getattr(options, name)
        if pixels < 1 or pixels % _MULTIPLE:
            raise OptionError(
                f"--{name} is {pixels}",
                f"a multiple of {_MULTIPLE}",
                f"choose a {name} that {_MULTIPLE} divides",
            )
    if options.enable_safety_checker:
        raise OptionError("--enable_safety_checker", "pipelines without one, as all are here", "leave the option out")
    if options.compile_mode is not None and not options.enable_torch_compile:
        raise OptionError("--compile_mode without --enable_torch_compile", "both", "add --enable_torch_compile")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise OptionError(f"the {name} {value!r} is unknown", f"one of {', '.join(known)}", "pass one")


def _table(row: Row) -> Table:
    """Return the row as a table of two columns: fourteen beside one another fit no terminal."""
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for column in COLUMNS:
        table.add_row(column, str(row[column]))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="benchmark.py")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))
