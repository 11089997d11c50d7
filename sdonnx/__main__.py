"""`sdonnx`, or `python -m sdonnx`: the commands.

A command's module is imported when the command is asked for: drawing loads nothing of exporting.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sdonnx import __version__
from sdonnx.terminal import guarded

__all__ = ["main"]

# Command -> (module with add_arguments and run, what it does)
_COMMANDS = {
    "sample": ("sdonnx.sample.command", "write a sample pipeline with seeded random weights"),
    "export": ("sdonnx.export.__main__", "a diffusers pipeline to a folder of ONNX graphs"),
    "optimize": ("sdonnx.optimize_pipeline", "fuse the graphs for a provider, convert to fp16"),
    "explain": ("sdonnx.explain", "what was fused in a folder, what was not, and why"),
    "doctor": ("sdonnx.doctor.command", "what is missing here, and whether the kernels compute what they should"),
    "verify": ("sdonnx.verify.command", "prove that a folder draws what its original draws"),
    "generate": ("sdonnx.generate", "draw images with an optimized folder"),
    "benchmark": ("sdonnx.benchmark.command", "time engines under one clock, and compare their images"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="sdonnx", description="Diffusion pipelines on ONNX Runtime.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(given)
    return guarded(importlib.import_module(_COMMANDS[options.command][0]).run, options)


if __name__ == "__main__":
    sys.exit(main())
