"""The command line `sdonnx`, also `python -m sdonnx`.

This module imports almost nothing, so that Ctrl-C during the imports of a command ends with one line and status 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "sample": ("sdonnx.cli.sample", "write a sample pipeline, small and trained, or with random weights"),
    "export": ("sdonnx.cli.export", "export a diffusers pipeline to a folder of ONNX graphs"),
    "optimize": ("sdonnx.cli.optimize", "fuse the graphs for an execution provider, convert them to fp16"),
    "explain": ("sdonnx.cli.explain", "show which operators of a folder were fused, which were not, and why"),
    "doctor": ("sdonnx.cli.doctor", "check the environment and the results of the GPU kernels"),
    "verify": ("sdonnx.cli.verify", "prove that a folder generates the same images as its original"),
    "generate": ("sdonnx.cli.generate", "generate images with an optimized folder"),
    "serve": ("sdonnx.cli.serve", "serve folders over HTTP, with OpenAI's images API"),
    "benchmark": ("sdonnx.cli.benchmark", "measure the speed of engines and compare their images"),
    "bake": ("sdonnx.cli.bake", "write an optimized folder with LoRA files in its weights"),
    "lora": ("sdonnx.cli.lora", "look into LoRA files, and convert them to the layout of PEFT"),
    "cache": ("sdonnx.cli.cached_graphs", "list or remove the graphs that sdonnx.compile has cached"),
    "completion": ("sdonnx.cli.completion", "print a script for the completion of a shell"),
    "quickstart": ("sdonnx.cli.quickstart", "generate an image with a sample pipeline and compare with PyTorch"),
}
"""Command -> (module with `add_arguments` and `run`, summary)."""

_INTERRUPTED = 130  # sdonnx.terminal.INTERRUPTED; importing that module takes 0.1 s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the command and its arguments; by default `sys.argv[1:]`.
    """
    try:
        from sdonnx.cli.command_line import run_command_line

        return run_command_line(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        if arguments is not None and "--debug" in arguments:
            raise
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
