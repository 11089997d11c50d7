"""Text to image with Stable Diffusion 2.1, at 768x768 and then at 512x512 in one process.

`python examples/text_to_image_sd21.py --model stabilityai/stable-diffusion-2-1`
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import diffusers
import torch

from sdonnx import compile_pipe


def main() -> None:
    """Generate two images of each size and save the second; the first one shows the time of a new size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stabilityai/stable-diffusion-2-1")
    parser.add_argument("--prompt", default="a lighthouse on a cliff at dusk, oil painting")
    parser.add_argument("--height", type=int, nargs="+", default=[768, 512])
    parser.add_argument("--width", type=int, nargs="+", help="one for each height (default: the heights)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler-config", help="JSON or a mode, as OneDiff's users write them")
    parser.add_argument("--saved-image", default="sd21.png", help="the size is put before the name")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    pipe: Any = diffusers.StableDiffusionPipeline.from_pretrained(
        args.model, torch_dtype=torch.float16 if has_gpu else torch.float32
    )
    pipe.to("cuda" if has_gpu else "cpu")
    pipe = compile_pipe(pipe, options=args.compiler_config)

    for height, width in zip(args.height, args.width or args.height, strict=True):
        for name in ("first", "second"):
            start = time.perf_counter()
            image = pipe(
                args.prompt,
                height=height,
                width=width,
                num_inference_steps=args.steps,
                generator=torch.Generator("cpu").manual_seed(args.seed),
            ).images[0]
            print(f"{height}x{width}, {name} image: {time.perf_counter() - start:.2f} s")
        image.save(f"h{height}-w{width}-{args.saved_image}")


if __name__ == "__main__":
    main()
