"""`python -m sdonnx.export -m MODEL -o OUT`: a diffusers pipeline to a folder of ONNX graphs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sdonnx.terminal import add_debug, console, guarded, tensor_progress

__all__ = ["add_arguments", "main", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Export a diffusers pipeline to ONNX (opset 23, dynamic sizes). Weights are read one at a time, "
        "so the memory does not grow with the model."
    )
    parser.add_argument(
        "-m", "--model", required=True, help="a local diffusers folder, or the id of a pipeline on the hub"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "float16"), help="of weights, inputs and outputs"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if a pipeline is there")
    parser.add_argument(
        "--allow_pickle",
        nargs="+",
        default=[],
        metavar="COMPONENT",
        help="components whose weights may be read from a pickle (.bin); only for authors you trust",
    )
    parser.add_argument(
        "--ip-adapter",
        "--ip_adapter",
        nargs="+",
        default=[],
        type=Path,
        metavar="FOLDER_OR_FILE",
        help="IP-Adapters (safetensors), in the order in which their images will be given",
    )
    parser.add_argument(
        "--image-encoder",
        "--image_encoder",
        type=Path,
        metavar="FOLDER",
        help="the adapters' image encoder (default: the pipeline's, or image_encoder beside an adapter)",
    )
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from sdonnx.export.pipeline import export_pipeline

    with tensor_progress() as told:
        export_pipeline(
            options.model,
            options.output,
            dtype=options.dtype,
            overwrite=options.overwrite,
            allow_pickle=options.allow_pickle,
            ip_adapters=options.ip_adapter,
            image_encoder=options.image_encoder,
            progress=told,
        )
    console().print(f"exported to {options.output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m sdonnx.export")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
