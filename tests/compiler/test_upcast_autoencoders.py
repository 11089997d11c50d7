"""Compiled autoencoders in float16 with `force_upcast`: pipelines need not convert them to float32 for each image."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import in_diffusers
from support.half_graphs import half_graphs
from support.pipeline_cache import PipelineCache
from support.small_modules import small_autoencoder

import sdonnx
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.compiler.supported_modules import SUPPORTED
from sdonnx.metrics import psnr, relative_error

# Image processors of diffusers pass torch tensors to np.array, which numpy 2 warns about; upcast_vae is deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning"),
]

DECODER, ENCODER = "vae_decoder float16", "vae_encoder float16"
AGAIN = "AutoencoderKL changed after it was compiled, and is compiled again"


@pytest.fixture
def built() -> Iterator[list[str]]:
    """The graphs that were built in the test, by component and precision."""
    with half_graphs() as names:
        yield names


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(1, 4, 6, 5, generator=torch.manual_seed(0)).half().float()


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(found.float().numpy(), expected.float().numpy())


def _both(**options: Any) -> tuple[Any, Any]:
    """Return an autoencoder in float16 in torch, and an equal one that is compiled."""
    vae = small_autoencoder(**({"force_upcast": True} | options)).half()
    return vae, sdonnx.compile(copy.deepcopy(vae))


@torch.no_grad()
def test_no_conversion_is_requested(built: list[str], warned: list[str], latents: torch.Tensor, tmp_path: Path) -> None:
    """Inputs may have both types; results are in float32, as after a conversion, and so is the encoder's noise."""
    plain, vae = _both()
    plain.float()
    assert not vae.config.force_upcast
    assert vae.dtype == torch.float16
    for given in (latents, latents.half()):
        found = vae.decode(given, return_dict=False)[0]
        assert found.dtype == torch.float32
        assert _error(found, plain.decode(latents).sample) < 5e-3
    image = torch.randn(1, 3, 16, 12, generator=torch.manual_seed(1))
    ours, theirs = vae.encode(image.half()).latent_dist, plain.encode(image).latent_dist
    assert ours.parameters.dtype == torch.float32
    samples = [each.sample(torch.manual_seed(2)) for each in (ours, theirs)]
    assert _error(samples[0], samples[1]) < 5e-3
    assert built == [DECODER, ENCODER]
    assert warned == []
    vae.save_pretrained(tmp_path)
    saved: Any = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert saved.config.force_upcast  # of the module itself
    assert copy.deepcopy(vae).config.force_upcast


@torch.no_grad()
def test_torch_computes_calls_in_float32(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    """Weights are converted for the call, also if it fails, and nothing is compiled again after it."""
    plain = small_autoencoder(force_upcast=True).half()
    plain.tile_latent_min_size = 4
    vae = sdonnx.compile(copy.deepcopy(plain))
    for each in (plain, vae):
        each.enable_tiling()
    found = vae.decode(latents.half()).sample
    torch.testing.assert_close(found, plain.float().decode(latents).sample, rtol=0, atol=0)
    vae.disable_tiling()
    with pytest.raises(RuntimeError, match="channels"):
        vae.decode(latents[:, :3])
    assert {each.dtype for each in vae.parameters()} == {torch.float16}
    assert vae.decode(latents).sample.dtype == torch.float32
    assert built == [DECODER]
    assert "torch computes a call of AutoencoderKL: it uses tiles" in warned


def test_gradients_are_computed_in_float32(built: list[str], latents: torch.Tensor) -> None:
    plain, vae = _both()
    found = []
    for each in (plain.float(), vae):
        given = latents.clone().requires_grad_()
        each.decode(given).sample.square().sum().backward()
        assert given.grad is not None
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0])
    assert {each.dtype for each in vae.parameters()} == {torch.float32}


@torch.no_grad()
def test_conversions_by_the_user_change_the_weights(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    plain, vae = _both()
    vae.to(torch.float32)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.float32}
    assert vae.config.force_upcast
    assert _error(vae.decode(latents).sample, plain.float().decode(latents).sample) < 1e-5
    vae.half()
    assert _error(vae.decode(latents).sample, plain.decode(latents).sample) < 5e-3
    vae.decoder.conv_in.weight.mul_(2)
    assert _error(vae.decode(latents).sample, plain.decode(latents).sample) > 0.1
    assert built == [DECODER, "vae_decoder float32", DECODER, DECODER]
    assert warned == [AGAIN] * 3


@torch.no_grad()
def test_the_graph_agrees_with_torch_in_float32(warned: list[str], built: list[str], latents: torch.Tensor) -> None:
    """`check_agreement` allows the errors of float16, and still notices wrong results."""
    compiled = sdonnx.compile(
        small_autoencoder(force_upcast=True).half(), options={"options": {"check_agreement": True}}
    )
    for _ in range(2):
        assert compiled.decode(latents).sample.dtype == torch.float32
    assert built == [DECODER]
    assert warned == []


@torch.no_grad()
def test_without_force_upcast_results_are_in_float16(built: list[str], latents: torch.Tensor) -> None:
    _, vae = _both(force_upcast=False)
    assert vae.decode(latents.half()).sample.dtype == torch.float16


def test_methods_accept_the_configuration() -> None:
    vae = small_autoencoder(force_upcast=True).half()
    assert [method.why_not(vae) for method in SUPPORTED[type(vae)]] == [None, None]


@pytest.fixture(scope="module")
def source(pipelines: PipelineCache) -> Path:
    """A pipeline of Stable Diffusion XL with a decoder that exceeds float16's range."""
    return pipelines.nano("sdxl-tiny", overflow="vae")


KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "text to image": (diffusers.StableDiffusionXLPipeline, ()),
    "image to image": (diffusers.StableDiffusionXLImg2ImgPipeline, ("image",)),
    "inpainting": (diffusers.StableDiffusionXLInpaintPipeline, ("image", "mask_image")),
}


def _picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC)


def _half(source: Path, kind: Any) -> Any:
    pipe = kind(**in_diffusers(source).to(torch.float16).components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    "name", [pytest.param(kind, marks=[] if kind == "inpainting" else [pytest.mark.weekly]) for kind in KINDS]
)
def test_images_of_pipelines(name: str, source: Path, built: list[str], warned: list[str]) -> None:
    """Each image equals torch's, where the autoencoder is converted to float32. Nothing is compiled again."""
    kind, given = KINDS[name]
    arguments: dict[str, Any] = {each: _picture(seed) for seed, each in enumerate(given)}
    if not given:
        arguments |= {"height": 64, "width": 96}
    else:
        arguments["strength"] = 0.8
    arguments |= {"num_inference_steps": 2, "output_type": "np"}
    plain, pipe = _half(source, kind), _half(source, kind)
    sdonnx.compile_pipe(pipe, ignores=set(pipe.components) - {"vae"})
    vae: Any = pipe.vae
    assert isinstance(pipe.vae, CompiledModule)
    for seed in range(2):
        images = [each("a fox", generator=torch.manual_seed(seed), **arguments).images for each in (plain, pipe)]
        assert np.isfinite(images[0]).all()
        assert np.std(images[0]) > 0.02
        assert psnr(images[1], images[0]) > 55
        assert {vae.dtype, *(each.dtype for each in vae.parameters())} == {torch.float16}
    assert built == [DECODER, ENCODER][: 1 + bool(given)]
    assert warned == []


@torch.no_grad()
def test_the_graph_has_no_overflow(source: Path, built: list[str]) -> None:
    """Without a conversion torch's float16 overflows, and the graph does not."""
    vae = in_diffusers(source).vae.half()
    latents = torch.randn(1, 4, 8, 8, generator=torch.manual_seed(0)).half()
    assert not torch.isfinite(vae.decode(latents).sample).all()
    found = sdonnx.compile(vae).decode(latents).sample
    assert _error(found, vae.float().decode(latents.float()).sample) < 1e-2
