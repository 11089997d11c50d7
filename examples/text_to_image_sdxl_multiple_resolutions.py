"""Text to image with Stable Diffusion XL, at usual and at rare sizes in one process, without compiling again.

`python examples/text_to_image_sdxl_multiple_resolutions.py --model stabilityai/stable-diffusion-xl-base-1.0`
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import diffusers
import torch

from sdonnx import compile_pipe

SIZES = ["1024x1024", "960x720", "768x896", "1280x768", "544x408", "520x1032"]


def main() -> None:
    """Generate an image to warm up, and then two images of each size; save the second image of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
    parser.add_argument("--prompt", default="a street market in the rain, film photograph")
    parser.add_argument("--height", type=int, default=1024, help="height of the image that warms up")
    parser.add_argument("--width", type=int, default=1024, help="width of the image that warms up")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="HEIGHTxWIDTH", help="multiples of 8")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler-config", help="JSON or a mode, as OneDiff's users write them")
    parser.add_argument("--saved-image", default="sdxl.png", help="the size is put before the name")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    pipe: Any = diffusers.StableDiffusionXLPipeline.from_pretrained(
        args.model, torch_dtype=torch.float16 if has_gpu else torch.float32
    )
    pipe.to("cuda" if has_gpu else "cpu")
    pipe = compile_pipe(pipe, options=args.compiler_config)

    def generate(height: int, width: int, name: str) -> Any:
        start = time.perf_counter()
        image = pipe(
            args.prompt,
            height=height,
            width=width,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(args.seed),
        ).images[0]
        print(f"{height}x{width}, {name}: {time.perf_counter() - start:.2f} s")
        return image

    generate(args.height, args.width, "warm-up")
    for size in args.sizes:
        height, width = map(int, size.split("x"))
        generate(height, width, "first image")
        generate(height, width, "second image").save(f"h{height}-w{width}-{args.saved_image}")


if __name__ == "__main__":
    main()
