"""Text to image with an IP-Adapter, with another scale for each image.

`python examples/ip_adapter_changing_scales.py --input-image picture.png`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image

from sdonnx import compile_pipe


def main() -> None:
    """Generate an image to warm up, and then one for each scale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
    parser.add_argument("--ip-adapter", default="h94/IP-Adapter", help="folder or repository of the adapter")
    parser.add_argument("--subfolder", default="sdxl_models")
    parser.add_argument("--weight-name", default="ip-adapter_sdxl.safetensors")
    parser.add_argument("--input-image", required=True, help="the prompt image")
    parser.add_argument("--scale", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--prompt", default="a bear at a table in a diner")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler-config", help="JSON or a mode, as OneDiff's users write them")
    parser.add_argument("--saved-image", default="ip-adapter.png", help="the scale is added to the name")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(
        args.model, torch_dtype=torch.float16 if has_gpu else torch.float32
    )
    pipe.load_ip_adapter(args.ip_adapter, subfolder=args.subfolder, weight_name=args.weight_name)
    pipe.to("cuda" if has_gpu else "cpu")
    pipe = compile_pipe(pipe, options=args.compiler_config)
    picture = Image.open(args.input_image).convert("RGB")

    def generate(scale: float, name: str) -> Any:
        pipe.set_ip_adapter_scale(scale)  # a number is enough; OneDiff needs a tensor that is changed in place
        start = time.perf_counter()
        image = pipe(
            args.prompt,
            ip_adapter_image=picture,
            height=args.height,
            width=args.width,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(args.seed),
        ).images[0]
        print(f"{name}: {time.perf_counter() - start:.2f} s")
        return image

    generate(args.scale[0], "warm-up")
    saved = Path(args.saved_image)
    for scale in args.scale:
        generate(scale, f"scale {scale:g}").save(saved.with_stem(f"{saved.stem}-{scale:g}"))


if __name__ == "__main__":
    main()
