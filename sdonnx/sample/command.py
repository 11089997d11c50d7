"""`python -m sdonnx sample --arch tiny -o DIR`: a sample pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdonnx.sample import ARCHITECTURES, write_sample
from sdonnx.sample.overflow import OVERFLOWS
from sdonnx.terminal import add_debug, console

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Write a complete diffusers pipeline of a published architecture, its weights random."
    parser.add_argument("--arch", required=True, help=f"one of {', '.join(ARCHITECTURES)}")
    parser.add_argument("-o", "--output", required=True, type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument(
        "--safety_checker", action="store_true", help="also write the safety checker that it is published with"
    )
    parser.add_argument(
        "--overflow", metavar="WHAT", help=f"draw the same with values beyond float16: one of {', '.join(OVERFLOWS)}"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if a pipeline is there")
    add_debug(parser)


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
