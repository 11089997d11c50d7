"""Sizes of outputs are spelled so that optimum-onnx can evaluate them, and they are the sizes that a run returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.pipeline_cache import PipelineCache

from sdonnx.export.simplify import spaced
from sdonnx.graph.shapes.expressions import parsed

# Odd, different from each other, and no multiples of 8, so that a wrong rounding or a swapped axis shows.
LATENTS = {"batch_size": 2, "height": 5, "width": 7, "height_latent": 3, "width_latent": 5}
PIXELS = {"batch_size": 3, "height": 37, "width": 43}
TRANSFORMER = {"batch_size": 2, "height": 6, "width": 10}  # patches of 2 by 2
TOKENS = {"sequence_length": 77, "images": 2, "image_tokens": 5}
DTYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("batch_size", "batch_size"),
        ("8*height_latent", "8 * height_latent"),
        ("(height//8)", "height // 8"),
        ("8 * (height//8)", "8 * ( height // 8 )"),
        ("((height - 1)//2) + 1", "( height - 1 ) // 2 + 1"),
        ("-height+2*width", "- height + 2 * width"),
        ("height**2 % 3", "height ** 2 % 3"),
        # No arithmetic of names and integers.
        ("Max(1,height)", "Max(1,height)"),
        ("unet.height", "unet.height"),
        ("height of a", "height of a"),
    ],
)
def test_spells_sizes(written: str, expected: str) -> None:
    assert spaced(written) == expected
    assert spaced(expected) == expected


@pytest.mark.parametrize("size", ["8*h", "(h//8)", "8 * (h//8)", "((h - 1)//2) + 1", "-h+2*w", "(h - (w - 1))//2"])
def test_means_the_same_size(size: str) -> None:
    assert parsed(spaced(size)) == parsed(size)
    assert evaluated(spaced(size), {"h": 37, "w": 21}) == eval(size, {"h": 37, "w": 21})


def test_sizes_of_torch_cannot_be_evaluated() -> None:
    """The evaluation of this test refuses what optimum refuses."""
    for size in ("8*height_latent", "(height_latent//8)"):
        with pytest.raises(NameError, match="height_latent"):
            evaluated(size, {"height_latent": 8})


def evaluated(size: str, sizes: Mapping[str, int]) -> int:
    """Return a size as optimum-onnx 0.1.0 evaluates it; `sizes` has the sizes of the inputs' axes."""
    parts = [str(sizes.get(part, part)) for part in size.split(" ")]
    return int(eval(" ".join(parts), {"__builtins__": {}}))


def assert_sizes_are_those_of_a_run(path: Path) -> None:
    """Compare every output's size with the size that ONNX Runtime returns, for inputs of zeros."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    by_name = {"vae_encoder": PIXELS, "transformer": TRANSFORMER}.get(path.parent.name, LATENTS) | TOKENS
    inputs: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for tensor in session.get_inputs():
        # `image_tokens_0` and the like are axes of the first adapter.
        shape = [by_name[dim.rstrip("_0123456789")] if isinstance(dim, str) else dim for dim in tensor.shape]
        sizes |= {name: size for name, size in zip(tensor.shape, shape, strict=True) if isinstance(name, str)}
        inputs[tensor.name] = np.zeros(shape, DTYPES[tensor.type])
    outputs = session.run(None, inputs)
    for output, found in zip(session.get_outputs(), outputs, strict=True):
        expected = [evaluated(dim, sizes) if isinstance(dim, str) else dim for dim in output.shape]
        assert expected == list(found.shape), f"{path.parent.name}: {output.name} has {output.shape}"


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "sdxl-refiner-tiny", "pixart-alpha-tiny"])
def test_exported_sizes_are_those_of_a_run(arch: str, pipelines: PipelineCache) -> None:
    folder = pipelines.exported(pipelines.micro(arch))
    graphs = sorted(folder.glob("*/model.onnx"))
    assert len(graphs) >= 4
    for path in graphs:
        assert_sizes_are_those_of_a_run(path)


def test_sizes_of_adapters_and_the_safety_checker(pipelines: PipelineCache) -> None:
    folders = [
        pipelines.adapted(pipelines.micro("sdxl-tiny-ip-adapter")),
        pipelines.exported(pipelines.micro("tiny", safety_checker=True)),
    ]
    graphs = {path.parent.name: path for folder in folders for path in folder.glob("*/model.onnx")}
    assert {"image_encoder", "safety_checker", "unet"} <= set(graphs)
    for path in graphs.values():
        assert_sizes_are_those_of_a_run(path)
