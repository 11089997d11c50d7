"""Text to image with PixArt-alpha or PixArt-Sigma at 1024x1024.

`python examples/text_to_image_pixart.py --model PixArt-alpha/PixArt-XL-2-1024-MS`
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import diffusers
import torch

from sdonnx import compile_pipe


def main() -> None:
    """Generate two images and save the second; the first one includes all work that is done once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="PixArt-alpha/PixArt-XL-2-1024-MS")
    parser.add_argument("--prompt", default="a wooden robot on a white background, product photography")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler-config", help="JSON or a mode, as OneDiff's users write them")
    parser.add_argument("--saved-image", default="pixart.png")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(
        args.model, torch_dtype=torch.float16 if has_gpu else torch.float32
    )
    pipe.to("cuda" if has_gpu else "cpu")
    pipe = compile_pipe(pipe, options=args.compiler_config)

    for name in ("first", "second"):
        start = time.perf_counter()
        image = pipe(
            args.prompt,
            height=args.height,
            width=args.width,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(args.seed),
            use_resolution_binning=False,  # the requested size instead of the closest one of the training
        ).images[0]
        print(f"{name} image: {time.perf_counter() - start:.2f} s")
    image.save(args.saved_image)


if __name__ == "__main__":
    main()
