"""`sdonnx generate -m FOLDER -p "..." -o image.png`: generate images as PNG files."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdonnx
from sdonnx.errors import OptionError, OutputError
from sdonnx.terminal import add_debug, add_option, console, progress_bar

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = partial(add_option, parser)
    parser.description = "Generate images with an optimized folder. The PNG files contain the parameters."
    add("-m", "--model", required=True, type=Path, help="optimized folder")
    add("-p", "--prompt", required=True, nargs="+", help="one prompt, or several for a batch")
    add("-o", "--output", required=True, type=Path, help="a .png file; in a batch, -1, -2, ... are appended")
    add("--negative_prompt", default=None, help="description of content to avoid")
    add("--height", type=int, default=None, help="pixels, a multiple of 8; any number if the folder bins resolutions")
    add("--width", type=int, default=None, help="pixels, as for --height")
    add("-s", "--steps", type=int, help="denoising steps (default: the family's)")
    add("-g", "--guidance_scale", type=float, help="weight of the prompt (default: the family's)")
    add("-n", "--num_images", type=int, default=1, help="images per prompt (default: 1)")
    add("--seed", type=int, default=None, help="seed (default: a random one, which is written into the PNG)")
    add("--scheduler", default=None, help="ddim, euler, dpmsolver++, unipc, ... (default: the folder's)")
    add("--image", type=Path, default=None, help="initial image")
    add("--mask_image", type=Path, default=None, help="mask for --image: white pixels are generated anew")
    add("--strength", type=float, default=None, help="how much of the initial image to replace by noise, 0 to 1")
    add("--ip_adapter_image", nargs="+", type=Path, default=[], help="one image prompt per IP-Adapter of the folder")
    scales = "weight of all image prompts, or of each (default: 1)"
    add("--ip_adapter_scale", nargs="+", type=float, default=[], help=scales)
    add("--clip_skip", type=int, default=None, help="number of last layers of the text encoder to skip")
    add("--low_memory", action="store_true", help="load the text encoder and the decoder for each use only")
    add("--provider", default=None, help="cuda or cpu (default: the provider that the folder was optimized for)")
    add(
        "--require_certificate",
        action="store_true",
        help="refuse a folder without a valid certificate",
    )
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from PIL.PngImagePlugin import PngInfo

    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    _check_output(options.output)
    image, mask_image = _read_image(options.image), _read_image(options.mask_image)
    image_prompts = [_read_image(path) for path in options.ip_adapter_image]
    weights = options.ip_adapter_scale
    pipeline = OrtDiffusionPipeline.from_pretrained(
        options.model,
        options.provider,
        low_memory=options.low_memory,
        require_certificate=options.require_certificate,
    )
    pipeline.set_progress_bar_config(disable=True)
    guidance = pipeline.default_guidance_scale if options.guidance_scale is None else options.guidance_scale
    steps = pipeline.default_steps if options.steps is None else options.steps
    if options.scheduler:
        pipeline.scheduler = options.scheduler
    with progress_bar() as bar:
        task = bar.add_task("generating", total=None)

        def on_step_end(_: OrtDiffusionPipeline, step: int, timestep: float, latents: dict[str, Any]) -> None:
            bar.update(task, completed=step + 1)

        output = pipeline(
            options.prompt,
            options.height,
            options.width,
            steps,
            guidance,
            [options.negative_prompt] * len(options.prompt) if options.negative_prompt else None,
            options.num_images,
            seed=options.seed,
            strength=options.strength,
            clip_skip=options.clip_skip,
            image=image,
            mask_image=mask_image,
            ip_adapter_image=image_prompts or None,
            ip_adapter_scale=weights[0] if len(weights) == 1 else weights or None,
            # The callback costs a copy of the latents at each step, so it is used only if the bar is visible.
            callback_on_step_end=on_step_end if bar.console.is_terminal else None,
        )
    for index, picture in enumerate(output.images):
        parameters = {
            "prompt": options.prompt[index // options.num_images],
            "negative_prompt": options.negative_prompt or "",
            "seed": output.seed,
            "index": index,
            "steps": steps,
            "guidance_scale": guidance,
            "scheduler": pipeline.scheduler,
            "strength": options.strength,
            "clip_skip": options.clip_skip,
            "image": _name(options.image),
            "mask_image": _name(options.mask_image),
            "ip_adapter_image": [path.name for path in options.ip_adapter_image],
            "ip_adapter_scale": weights,
            "height": picture.height,
            "width": picture.width,
            "model": options.model.name,
            "provider": pipeline.device.provider,
            "sdonnx": sdonnx.__version__,
        }
        metadata = PngInfo()
        metadata.add_text("parameters", json.dumps(parameters, ensure_ascii=False))
        path = options.output
        if len(output.images) > 1:
            path = path.with_name(f"{path.stem}-{index + 1}{path.suffix}")
        try:
            picture.save(path, pnginfo=metadata)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OutputError(
                f"writing {path} failed ({error.strerror or error})",
                "a place with enough free space and permission to write",
                "choose another output",
            ) from error
        console().print(f"{path}  seed {output.seed}")
    return 0


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name


def _read_image(path: Path | None) -> Image.Image | None:
    """Return the image in a file, with its pixels in memory."""
    if path is None:
        return None
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image.copy()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "an image file", "pass another file") from error


def _check_output(path: Path) -> None:
    """Check the output path before any time is spent on generating."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"the output is {path.name}", "a name that ends in .png", "choose another name")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder", "a folder to write into", "create it first")
