"""`python -m sdonnx generate -m FOLDER -p "..." -o image.png`: draw images to PNG files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdonnx
from sdonnx.errors import OptionError, OutputError
from sdonnx.terminal import add_debug, console, progress_bar

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Draw images with an optimized folder. The PNG files hold their parameters."
    parser.add_argument("-m", "--model", required=True, type=Path, help="the optimized folder")
    parser.add_argument("-p", "--prompt", required=True, nargs="+", help="one prompt, or several of one batch")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a .png file; a batch gets -1, -2, ...")
    parser.add_argument("--negative_prompt", default=None, help="what to draw away from")
    parser.add_argument("--height", type=int, default=None, help="pixels, a multiple of 8; any number for PixArt")
    parser.add_argument("--width", type=int, default=None, help="likewise")
    parser.add_argument("-s", "--steps", type=int, help="denoising steps (default: the family's)")
    parser.add_argument("-g", "--guidance_scale", type=float, help="weight of the prompt (default: the family's)")
    parser.add_argument("-n", "--num_images", type=int, default=1, help="images for each prompt")
    parser.add_argument("--seed", type=int, default=None, help="by default a fresh one, which the PNG names")
    parser.add_argument("--scheduler", default=None, help="ddim, euler, dpmsolver++, unipc, ...; default: the folder's")
    parser.add_argument("--image", type=Path, default=None, help="an image to start from")
    parser.add_argument("--mask_image", type=Path, default=None, help="white where to draw anew, for --image")
    parser.add_argument("--strength", type=float, default=None, help="how far from the image to go, 0 to 1")
    parser.add_argument(
        "--ip_adapter_image", nargs="+", type=Path, default=[], help="an image for each IP-Adapter of the folder"
    )
    parser.add_argument(
        "--ip_adapter_scale", nargs="+", type=float, default=[], help="weight of all of them, or of each (default 1)"
    )
    parser.add_argument("--clip_skip", type=int, default=None, help="last layers of the text encoder to leave out")
    parser.add_argument("--low_memory", action="store_true", help="load the text encoder and decoder for each use")
    parser.add_argument("--provider", default=None, help="cuda or cpu; default: what the folder is for")
    parser.add_argument(
        "--require_certificate", action="store_true", help="refuse a folder that verify has not passed, or that changed"
    )
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from PIL.PngImagePlugin import PngInfo

    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    _refuse_output(options.output)
    image, mask_image = _opened(options.image), _opened(options.mask_image)
    prompting = [_opened(path) for path in options.ip_adapter_image]
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
        task = bar.add_task("drawing", total=None)

        def told(_: OrtDiffusionPipeline, step: int, timestep: float, latents: dict[str, Any]) -> None:
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
            ip_adapter_image=prompting or None,
            ip_adapter_scale=weights[0] if len(weights) == 1 else weights or None,
            # A bar costs a copy of the latents at each step: only for somebody who looks at it.
            callback_on_step_end=told if bar.console.is_terminal else None,
        )
    for index, drawn in enumerate(output.images):
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
            "height": drawn.height,
            "width": drawn.width,
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
            drawn.save(path, pnginfo=metadata)
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


def _opened(path: Path | None) -> Image.Image | None:
    """Return the image in a file, read to its end."""
    if path is None:
        return None
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image.copy()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "an image file", "give another file") from error


def _refuse_output(path: Path) -> None:
    """Look at the output before minutes of drawing are spent on it."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"the output is {path.name}", "a name that ends in .png", "choose such a name")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder", "a folder to write into", "make it first")
