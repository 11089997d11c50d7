"""`sdonnx bake -m FOLDER --lora FILE:WEIGHT -o OUT`: write an optimized folder with LoRA files in its weights."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from rich.markup import escape

from sdonnx.cli.generate_options import add_lora_arguments, read_lora_files
from sdonnx.terminal import add_common, add_option, console

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = partial(add_option, parser)
    parser.description = "Write a copy of an optimized folder with LoRA files in its weights."
    add("-m", "--model", required=True, type=Path, help="optimized folder")
    add_lora_arguments(parser, required=True)
    add("-o", "--output", required=True, type=Path, help="folder to write")
    add("--overwrite", action="store_true", help="replace the output if it is a pipeline")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    files = read_lora_files(options.lora)
    from sdonnx.optimize.bake_adapters import bake_adapters

    adapters = [(file.path, file.weight) for file in files]
    changed = bake_adapters(options.model, options.output, adapters, options.overwrite)
    counts = ", ".join(f"{count} of {component}" for component, count in changed.items() if count)
    console().print(escape(f"wrote {options.output}: changed {counts}"))
    return 0
