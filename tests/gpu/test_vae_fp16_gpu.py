"""The autoencoder of Stable Diffusion XL in fp16 with scaled values, at full size and without the rest of its pipeline.

    python -m pytest -q tests/gpu/test_vae_fp16_gpu.py --weekly --results vae-fp16.json

SDONNX_KERNELS names the library of our own kernels; without it, only the form without them is measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.autoencoders import XL, export_autoencoder, optimize_autoencoder, write_autoencoder
from support.latency import median_seconds

from sdonnx.doctor.kernel_library import usable_library
from sdonnx.metrics import relative_error
from sdonnx.models import abi
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.precision.policy import Precision
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.session import Graph, SessionSettings

pytestmark = [pytest.mark.gpu, pytest.mark.weekly]

Array = npt.NDArray[Any]

LATENTS = (1, 4, 128, 128)
PIXELS = (1, 1024, 1024, 3)
WARM_UPS, CALLS, ROUNDS = 3, 10, 5

# The limits at 1024x1024, on an H200.
MAX_DECODE_MS = 30
MAX_ERROR = 2.0


@pytest.fixture(scope="module")
def latents() -> Array:
    return np.random.default_rng(0).standard_normal(LATENTS).astype(np.float32)


def pixels_of_torch(vae: Any, latents: Array, dtype: torch.dtype) -> Array:
    """Return the image (B,H,W,C) from -1 to 1."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        given = torch.from_numpy(latents).to("cuda") / vae.config.scaling_factor
        image = vae.to("cuda", dtype).decode(given.to(dtype), return_dict=False)[0].float()
    pixels: Array = image.permute(0, 2, 3, 1).cpu().numpy()
    return pixels


class Decoder:
    """The decode graph of a folder, captured.

    Args:
        file: the graph.
        latents: its input.
        library: library of our own kernels; None for a graph without them.
    """

    def __init__(self, file: Path, latents: Array, library: Path | None = None) -> None:
        self.device = device_for("cuda")
        self.device.enter()
        self.graph = Graph(file, self.device, capture=True, tf32=True, settings=SessionSettings(library=library))
        self.outputs = {
            abi.IMAGES: self.device.empty(PIXELS, np.uint8),
            abi.SAMPLE: self.device.empty(PIXELS, np.float32),
            abi.FINITE: self.device.empty((1,), np.bool_),
        }
        self.run = self.graph.bind({abi.LATENTS: self.device.upload(latents), **self.outputs})
        self.run.prepare()
        self.run.capture()

    def __call__(self) -> None:
        self.run()

    def pixels(self) -> Array:
        """Decode, and return the image (B,H,W,C) from -1 to 1, without rounding."""
        self.run()
        self.device.synchronize()
        assert self.outputs[abi.FINITE].numpy().all()
        values: Array = self.outputs[abi.SAMPLE].numpy() * 2 - 1
        return values

    def close(self) -> None:
        self.run.release()
        self.graph.unload()


def compiled_call(vae: Any, latents: Array) -> Callable[[], object]:
    """Return a call of diffusers' decoder in fp16, compiled as in diffusers' guide to fast inference."""
    vae.to("cuda", torch.float16).to(memory_format=torch.channels_last)
    given = (torch.from_numpy(latents).to("cuda") / vae.config.scaling_factor).half()
    given = given.to(memory_format=torch.channels_last)
    decode: Any = torch.compile(vae.decode, mode="reduce-overhead", fullgraph=True)

    def call() -> object:
        with torch.inference_mode():
            return decode(given, return_dict=False)[0]

    return call


def request(*norm_scale: str, kernels: str = "none") -> OptimizeRequest:
    return OptimizeRequest(precision=Precision("float16", norm_scale=norm_scale), kernels=kernels)


def test_decoder_of_sdxl_in_fp16(latents: Array, tmp_path: Path, note: Any) -> None:
    vae = write_autoencoder(XL, tmp_path / "vae")
    export_autoencoder(tmp_path / "vae", tmp_path / "onnx", "vae_decoder")
    report = optimize_autoencoder(tmp_path / "onnx", tmp_path / "fp16", "vae_decoder", request(kernels="auto"))
    assert report.precision == "float16"
    assert report.norm_scale < 1
    kept = optimize_autoencoder(tmp_path / "onnx", tmp_path / "float32", "vae_decoder", request("vae_decoder:1"))
    assert kept.precision == "float32"

    reference = pixels_of_torch(vae, latents, torch.float32)
    row: dict[str, Any] = {"pipeline": "sdxl", "pixels": 1024, "norm_scale": report.norm_scale, "ms": {}, "error": {}}
    row["error"]["torch float16"] = relative_error(pixels_of_torch(vae, latents, torch.float16), reference)

    folder = tmp_path / "fp16" / "vae_decoder"
    forms: dict[str, tuple[Path, Path | None]] = {
        "float32": (tmp_path / "float32" / "vae_decoder" / "decode.onnx", None),
        "float16": (folder / "decode.onnx", None),
    }
    library, reason = usable_library(device_for("cuda").capability())
    if library is not None:
        forms["float16 with our kernels"] = (folder / "decode-kernels.onnx", library.path)
    else:
        row["without_our_kernels"] = reason
    for name, (file, path) in forms.items():
        decoder = Decoder(file, latents, path)
        row["error"][name] = relative_error(decoder.pixels(), reference)
        row["ms"][name] = 1e3 * median_seconds(decoder, ROUNDS, calls=CALLS, warm_ups=WARM_UPS)
        decoder.close()
    compiled = compiled_call(vae, latents)
    row["ms"]["torch.compile float16"] = 1e3 * median_seconds(compiled, ROUNDS, calls=CALLS, warm_ups=WARM_UPS)
    note("vae_fp16", row)
    print(row)
    for name in forms:
        assert row["error"][name] <= MAX_ERROR * row["error"]["torch float16"], row
    assert min(row["ms"][name] for name in forms) <= MAX_DECODE_MS, row


def test_overflowing_decoder_stays_finite(latents: Array, tmp_path: Path, note: Any) -> None:
    vae = write_autoencoder(XL, tmp_path / "vae", overflow="vae")
    export_autoencoder(tmp_path / "vae", tmp_path / "onnx", "vae_decoder")
    optimize_autoencoder(tmp_path / "onnx", tmp_path / "fp16", "vae_decoder", request())
    reference = pixels_of_torch(vae, latents, torch.float32)
    assert not np.isfinite(pixels_of_torch(vae, latents, torch.float16)).all()
    decoder = Decoder(tmp_path / "fp16" / "vae_decoder" / "decode.onnx", latents)
    error = relative_error(decoder.pixels(), reference)
    decoder.close()
    note("vae_fp16_overflow", {"pipeline": "sdxl", "pixels": 1024, "error": error})
    shutil.rmtree(tmp_path / "onnx")
    assert error < 1e-2
