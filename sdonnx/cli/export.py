"""`sdonnx export -m MODEL -o OUT`: export a diffusers pipeline or a single file to a folder of ONNX graphs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from sdonnx.export.open_source import is_hub_id, is_single_file, open_source
from sdonnx.terminal import add_common, add_option, console, tensor_progress

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Export a diffusers pipeline to ONNX (opset 23, dynamic sizes). Weights are read one at a time, "
        "so memory use does not grow with the model."
    )
    add = partial(add_option, parser)
    add("-m", "--model", required=True, help="local diffusers folder, id of a pipeline on the hub, or single file")
    add("-o", "--output", required=True, type=Path, help="folder to write")
    dtypes = ("float32", "float16")
    add("--dtype", default="float32", choices=dtypes, help="type of weights, inputs and outputs (default: float32)")
    add("--overwrite", action="store_true", help="replace the output if it contains a pipeline")
    add(
        "--allow_pickle",
        nargs="+",
        default=[],
        metavar="COMPONENT",
        help="components whose weights may be read from a pickle (.bin), or all, also for a .ckpt; only for authors "
        "that you trust",
    )
    add("--variant", help="variant of the weights, such as fp16 for *.fp16.safetensors (default: what the folder has)")
    add(
        "--ip_adapter",
        nargs="+",
        default=[],
        type=Path,
        metavar="FOLDER_OR_FILE",
        help="IP-Adapters (safetensors), in the order in which images are passed to the pipeline",
    )
    add(
        "--image_encoder",
        type=Path,
        metavar="FOLDER",
        help="image encoder of the adapters (default: the pipeline's, or image_encoder next to an adapter)",
    )
    add(
        "--controlnet",
        nargs="+",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="ControlNets of diffusers, in the order in which control images are passed to the pipeline",
    )
    add(
        "--t2i_adapter",
        nargs="+",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="T2I-Adapters of diffusers, in place of ControlNets",
    )
    add(
        "--config",
        metavar="FOLDER_OR_ID",
        help="for a single file: diffusers folder or id on the hub, of which tokenizers, scheduler and configurations "
        "are used (default: the published pipeline's)",
    )
    add("--vae", type=Path, metavar="FILE", help="for a single file: file of the autoencoder (default: the file's)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    # Before torch is imported, which takes seconds.
    if not is_hub_id(options.model) and not is_single_file(options.model):
        open_source(options.model)
    from sdonnx.export.export_pipeline import export_pipeline

    with tensor_progress() as on_progress:
        export_pipeline(
            options.model,
            options.output,
            dtype=options.dtype,
            overwrite=options.overwrite,
            allow_pickle=options.allow_pickle,
            variant=options.variant,
            ip_adapters=options.ip_adapter,
            image_encoder=options.image_encoder,
            config=options.config,
            vae=options.vae,
            controlnets=options.controlnet,
            t2i_adapters=options.t2i_adapter,
            progress=on_progress,
        )
    console().print(f"exported to {options.output}")
    return 0
