"""The command line `sdonnx`, also `python -m sdonnx`.

Only the module of the chosen command is imported, so that `generate` loads none of the exporter's packages.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sdonnx import __version__
from sdonnx.terminal import guarded

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "sample": ("sdonnx.cli.sample", "write a sample pipeline with seeded random weights"),
    "export": ("sdonnx.cli.export", "export a diffusers pipeline to a folder of ONNX graphs"),
    "optimize": ("sdonnx.cli.optimize", "fuse the graphs for an execution provider, convert them to fp16"),
    "explain": ("sdonnx.cli.explain", "show which operators of a folder were fused, which were not, and why"),
    "doctor": ("sdonnx.cli.doctor", "check the environment and the results of the GPU kernels"),
    "verify": ("sdonnx.cli.verify", "prove that a folder generates the same images as its original"),
    "generate": ("sdonnx.cli.generate", "generate images with an optimized folder"),
    "benchmark": ("sdonnx.cli.benchmark", "measure the speed of engines and compare their images"),
    "quickstart": ("sdonnx.cli.quickstart", "generate an image with a sample pipeline and compare with PyTorch"),
}
"""Command -> (module with `add_arguments` and `run`, summary)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="sdonnx", description="Diffusion pipelines on ONNX Runtime.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(given)
    return guarded(importlib.import_module(COMMANDS[options.command][0]).run, options)


if __name__ == "__main__":
    sys.exit(main())
