"""Text to image with LoRAs, with other weights for each image.

`python examples/lora_changing_weights.py --lora style.safetensors face.safetensors --weights 1,0 0.8,0.5`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from sdonnx import compile_pipe


def main() -> None:
    """Generate an image without LoRA, and then one for each set of weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
    parser.add_argument("--lora", nargs="+", required=True, help="files, as load_lora_weights accepts them")
    parser.add_argument("--weights", nargs="+", default=["1"], help="a weight for each file, with commas")
    parser.add_argument("--prompt", default="a bear at a table in a diner")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler-config", help="JSON or a mode, as OneDiff's users write them")
    parser.add_argument("--saved-image", default="lora.png", help="the weights are added to the name")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(
        args.model, torch_dtype=torch.float16 if has_gpu else torch.float32
    )
    pipe.to("cuda" if has_gpu else "cpu")
    pipe = compile_pipe(pipe, options=args.compiler_config)

    def generate(name: str) -> Any:
        start = time.perf_counter()
        image = pipe(
            args.prompt,
            height=args.height,
            width=args.width,
            num_inference_steps=args.steps,
            generator=torch.Generator("cpu").manual_seed(args.seed),
        ).images[0]
        print(f"{name}: {time.perf_counter() - start:.2f} s")
        return image

    generate("without LoRA")
    names = [f"lora_{index}" for index in range(len(args.lora))]
    for name, file in zip(names, args.lora, strict=True):
        pipe.load_lora_weights(file, adapter_name=name)
    saved = Path(args.saved_image)
    for text in args.weights:
        pipe.set_adapters(names, [float(each) for each in text.split(",")])
        generate(f"weights {text}").save(saved.with_stem(f"{saved.stem}-{text.replace(',', '-')}"))
        generate(f"weights {text} again")


if __name__ == "__main__":
    main()
