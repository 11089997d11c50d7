"""`sdonnx generate -m FOLDER -p "..." -o image.png`: generate images and write them with their parameters."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx._version import __version__
from sdonnx.cli.generate_options import (
    LoraFile,
    add_conditioning_arguments,
    add_lora_arguments,
    add_lora_tags,
    add_schedule_arguments,
    conditioning_arguments,
    conditioning_parameters,
    custom_steps,
    load_lora_files,
    read_image,
    read_lora_files,
    read_lora_tags,
    read_schedule,
    schedule_arguments,
)
from sdonnx.cli.write_images import QUALITY, STDOUT, Destination, encoded, webui_text
from sdonnx.errors import OptionError, SdonnxError
from sdonnx.runtime.inputs.conditioning_images import CONDITIONING_ARGUMENTS
from sdonnx.terminal import add_common, add_option, console, step_progress

if TYPE_CHECKING:
    from sdonnx.runtime.output import ImageOutput
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = ["add_arguments", "run"]

# Value of --vae_tiling without a number.
_DEFAULT_TILE = 0

_MINIMA = dict.fromkeys(("steps", "num_images", "height", "width", "quality", "max_batch_size", "max_pixels"), 1)

# Argument of the pipeline -> option of the command, for messages. Single words are replaced only before certain verbs.
_OPTIONS = {"num_inference_steps": "--steps", "num_images_per_prompt": "--num_images", "tile_size": "--vae_tiling"} | {
    name: f"--{name}"
    for name in (
        *(each.name for each in CONDITIONING_ARGUMENTS),
        "clip_skip", "eta", "guidance_scale", "height", "mask_image", "negative_prompt", "prompt_weighting", "seed",
        "sigmas", "strength", "timesteps", "width",
    )
}  # fmt: skip
_VERB = r"(?= (?:is|given|start)\b)"
_ARGUMENT = re.compile(rf"(?<![\w-])(?:{'|'.join(name + ('' if '_' in name else _VERB) for name in _OPTIONS)})\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = partial(add_option, parser)
    parser.description = "Generate images with an optimized folder. The image files contain the parameters."
    add("-m", "--model", required=True, type=Path, help="optimized folder")
    add("-p", "--prompt", required=True, nargs="+", help="one prompt, or several for a batch")
    add(
        "-o",
        "--output",
        required=True,
        help="a .png, .jpg or .webp file, with -1, -2, ... in the names of several images; a folder (ending in /), for "
        "numbered files; or - for standard output",
    )
    add("--overwrite", action="store_true", help="replace existing files")
    add("--quality", type=int, help=f"quality of .jpg and .webp files, 1 to 100 (default: {QUALITY})")
    add("--negative_prompt", default=None, help="description of content to avoid")
    add("--height", type=int, default=None, help="pixels, a multiple of 8; any number if the folder bins resolutions")
    add("--width", type=int, default=None, help="pixels, as for --height")
    add("-s", "--steps", type=int, help="denoising steps (default: the family's)")
    add("-g", "--guidance_scale", type=float, help="weight of the prompt (default: the family's)")
    add("-n", "--num_images", type=int, default=1, help="images per prompt (default: 1)")
    seeds = "seed of the first image; the next images have the next seeds (default: a random one, see the files)"
    add("--seed", type=int, default=None, help=seeds)
    add("--scheduler", default=None, help="ddim, euler, dpmsolver++, unipc, ... (default: the folder's)")
    add_schedule_arguments(parser)
    add("--image", type=Path, default=None, help="initial image")
    add("--mask_image", type=Path, default=None, help="mask for --image: white pixels are generated anew")
    add("--strength", type=float, default=None, help="how much of the initial image to replace by noise, 0 to 1")
    add_conditioning_arguments(parser)
    add_lora_arguments(parser)
    add_lora_tags(parser)
    add("--clip_skip", type=int, default=None, help="number of last layers of the text encoder to skip")
    weighting = "a1111: read (word:1.3), (word) and [word] in the prompts as weights (default: brackets are text)"
    add("--prompt_weighting", default=None, help=weighting)
    add("--low_memory", action="store_true", help="load the text encoder and the decoder for each use only")
    offload = "keep only the component that runs on the device (enable_model_cpu_offload)"
    add("--cpu_offload", "--offload", action="store_true", help=offload)
    add("--vae_slicing", action="store_true", help="decode one image at a time (enable_vae_slicing)")
    tiling = "decode large images in tiles, by default of the size that the decoder was trained for (enable_vae_tiling)"
    add("--vae_tiling", nargs="?", type=int, const=_DEFAULT_TILE, metavar="PIXELS", help=tiling)
    add("--max_batch_size", type=int, metavar="N", help="refuse to generate more images, prompts times --num_images")
    add("--max_pixels", type=int, metavar="N", help="refuse images of a larger height times width")
    add("--provider", default=None, help="cuda or cpu (default: the provider that the folder was optimized for)")
    add(
        "--require_certificate",
        action="store_true",
        help="refuse a folder without a valid certificate",
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _check_numbers(options)
    with _option_names():
        read_schedule(options)
    destination = Destination.of(options.output, len(options.prompt) * options.num_images, options.overwrite)
    if options.quality is not None and destination.format == "PNG":
        raise OptionError("--quality for PNG, which loses nothing", "a .jpg or .webp file", "leave out --quality")
    image, mask_image = read_image(options.image), read_image(options.mask_image)
    conditioning = conditioning_arguments(options)
    texts, tagged = read_lora_tags(options.prompt, options.lora_folder)
    adapters = [*read_lora_files(options.lora), *tagged]
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline
    from sdonnx.runtime.sampling.noise import fresh_seed

    pipeline = OrtDiffusionPipeline.from_pretrained(
        options.model,
        options.provider,
        low_memory="offload" if options.cpu_offload else options.low_memory,
        max_batch_size=options.max_batch_size,
        max_pixels=options.max_pixels,
        require_certificate=options.require_certificate,
    )
    pipeline.set_progress_bar_config(**step_progress("generating"))
    with _option_names():
        if options.vae_slicing:
            pipeline.enable_vae_slicing()
        if options.vae_tiling is not None:
            pipeline.enable_vae_tiling(options.vae_tiling or None)
    load_lora_files(pipeline, adapters)
    if options.scheduler:
        pipeline.scheduler = options.scheduler
    if options.guidance_scale is None:
        options.guidance_scale = pipeline.default_guidance_scale
    if options.steps is None:
        options.steps = custom_steps(options, str(pipeline.scheduler)) or pipeline.default_steps
    # Each image has a seed of its own, and an image to start from, so that it can be repeated without the others.
    count = len(texts) * options.num_images
    first = fresh_seed() if options.seed is None else options.seed
    seeds = [first + index for index in range(count)]
    with _option_names():
        output = pipeline(
            texts,
            options.height,
            options.width,
            options.steps,
            options.guidance_scale,
            [options.negative_prompt] * len(options.prompt) if options.negative_prompt else None,
            options.num_images,
            seed=seeds if count > 1 else first,
            strength=options.strength,
            clip_skip=options.clip_skip,
            prompt_weighting=options.prompt_weighting,
            image=None if image is None else [image] * count,
            mask_image=None if mask_image is None else [mask_image] * count,
            **schedule_arguments(options),
            **conditioning,
        )
    _write(options, pipeline, output, seeds, destination, adapters)
    return 0


def _write(
    options: argparse.Namespace,
    pipeline: OrtDiffusionPipeline,
    output: ImageOutput,
    seeds: Sequence[int],
    destination: Destination,
    adapters: Sequence[LoraFile],
) -> None:
    out = console(stderr=options.output == STDOUT)
    for index, picture in enumerate(output.images):
        parameters = {
            "prompt": options.prompt[index // options.num_images],
            "negative_prompt": options.negative_prompt or "",
            "seed": seeds[index],
            "index": index,
            "batch": len(output.images),
            "steps": options.steps,
            "guidance_scale": options.guidance_scale,
            "scheduler": str(pipeline.scheduler),
            **schedule_arguments(options),
            "strength": options.strength,
            "clip_skip": options.clip_skip,
            "prompt_weighting": options.prompt_weighting,
            "image": _name(options.image),
            "mask_image": _name(options.mask_image),
            **conditioning_parameters(options),
            **({"lora": [str(file) for file in adapters]} if adapters else {}),
            "height": picture.height,
            "width": picture.width,
            "model": options.model.name,
            "provider": pipeline.device.provider,
            "sdonnx": __version__,
        }
        text = webui_text(parameters, pipeline.scheduler_config)
        content = encoded(picture, destination.format, parameters, text, options.quality or QUALITY)
        out.print(f"{destination.write(index, content)}  seed {seeds[index]}", markup=False)


def _check_numbers(options: argparse.Namespace) -> None:
    """Raise OptionError for numbers that no pipeline accepts, before the folder is loaded."""
    for name, minimum in _MINIMA.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise OptionError(f"--{name} is {value}", f"at least {minimum}")
    if options.quality is not None and options.quality > 100:
        raise OptionError(f"--quality is {options.quality}", "1 to 100")
    for name in ("guidance_scale", "strength"):
        value = getattr(options, name)
        if value is not None and not math.isfinite(value):
            raise OptionError(f"--{name} is {value}", "a finite number")


@contextlib.contextmanager
def _option_names() -> Iterator[None]:
    """Replace the pipeline's arguments by the command's options in the messages of errors."""
    try:
        yield
    except SdonnxError as error:
        parts = [_ARGUMENT.sub(lambda name: _OPTIONS[name[0]], part) for part in error.args]
        raise type(error)(*parts) from error


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name
