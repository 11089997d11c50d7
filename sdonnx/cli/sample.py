"""`sdonnx sample --arch shapes -o DIR`: write a sample pipeline."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from sdonnx.sample.overflow import OVERFLOWS
from sdonnx.sample.shapes.shape_architectures import SHIPPED
from sdonnx.sample.write_sample import ARCHITECTURES, write_sample
from sdonnx.terminal import add_common, add_option, console

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Write a complete diffusers pipeline: a published architecture with random weights, or a small trained one "
        f"({', '.join(SHIPPED)}), which generates the image of its caption."
    )
    add = partial(add_option, parser)
    add("--arch", required=True, help=f"one of {', '.join(ARCHITECTURES)}")
    add("-o", "--output", required=True, type=Path, help="folder to write")
    add("--seed", type=int, default=0, help="seed of random weights (default: 0)")
    add("--safety_checker", action="store_true", help="also write the pipeline's published safety checker")
    overflows = ", ".join(OVERFLOWS)
    add("--overflow", metavar="NAME", help=f"make values overflow float16, with unchanged images: one of {overflows}")
    add("--overwrite", action="store_true", help="replace the output if it contains a pipeline")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    out = console()
    write_sample(
        options.arch,
        options.output,
        options.seed,
        safety_checker=options.safety_checker,
        overflow=options.overflow,
        overwrite=options.overwrite,
        progress=lambda text: out.print(text, style="dim"),
    )
    out.print(f"wrote {options.output}")
    return 0
