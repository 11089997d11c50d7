"""Compiled autoencoders in float16 that pipelines convert to float32 and back for each image."""

from __future__ import annotations

import copy
import logging
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
from support.logged_lines import logged_lines
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
def test_to_changes_the_reported_type(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    plain, vae = _both()
    pointers = [each.data_ptr() for each in vae.parameters()]
    for _ in range(2):
        assert vae.dtype == torch.float16
        assert vae.decode(latents.half()).sample.dtype == torch.float16
        assert vae.to(dtype=torch.float32) is vae
        assert vae.dtype == torch.float32
        expected = plain.float().decode(latents).sample
        # Pipelines convert the latents to the type of a parameter, which stays float16.
        for given in (latents, latents.to(next(iter(vae.post_quant_conv.parameters())).dtype)):
            found = vae.decode(given, return_dict=False)[0]
            assert found.dtype == torch.float32
            assert _error(found, expected) < 5e-3
        image = torch.randn(1, 3, 16, 12, generator=torch.manual_seed(1))
        ours, theirs = (each.encode(image).latent_dist for each in (vae, plain))
        assert ours.parameters.dtype == torch.float32
        assert _error(ours.parameters, theirs.parameters) < 5e-3
        # Noise has the type of the distribution: the same seed draws the same noise.
        samples = [each.sample(torch.manual_seed(2)) for each in (ours, theirs)]
        assert _error(samples[0], samples[1]) < 5e-3
        assert vae.to(torch.float16) is vae
    assert [each.data_ptr() for each in vae.parameters()] == pointers
    assert built == [DECODER, ENCODER]
    assert warned == []


def test_the_conversion_is_logged_once(built: list[str]) -> None:
    _, vae = _both()
    with logged_lines(logging.INFO) as lines:
        for dtype in (torch.float32, torch.float16, torch.float32):
            vae.to(dtype)
    assert [each for each in lines if "reports float32" in each] == lines[:1]


@torch.no_grad()
def test_torch_computes_calls_in_the_reported_type(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    """Weights are converted for the call, as pipelines expect, and nothing is compiled again after it."""
    plain = small_autoencoder(force_upcast=True).half()
    plain.tile_latent_min_size = 4
    vae = sdonnx.compile(copy.deepcopy(plain))
    vae.to(torch.float32)
    for each in (plain, vae):
        each.enable_tiling()
    found = vae.decode(latents.half()).sample
    torch.testing.assert_close(found, plain.float().decode(latents).sample, rtol=0, atol=0)
    vae.disable_tiling()
    assert vae.decode(latents).sample.dtype == torch.float32
    vae.to(torch.float16)
    vae.decode(latents.half())
    assert built == [DECODER]
    assert warned == ["torch computes a call of AutoencoderKL: it uses tiles"]


@torch.no_grad()
def test_weights_are_restored_after_an_error(built: list[str], latents: torch.Tensor) -> None:
    _, vae = _both()
    vae.to(torch.float32)
    with pytest.raises(RuntimeError, match="channels"):
        vae.decode(latents[:, :3])
    assert {each.dtype for each in vae.parameters()} == {torch.float16}
    assert vae.decode(latents).sample.dtype == torch.float32
    assert built == [DECODER]


def test_gradients_in_the_reported_type(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    plain, vae = _both()
    vae.to(torch.float32)
    found = []
    for each in (plain.float(), vae):
        given = latents.clone().requires_grad_()
        each.decode(given).sample.square().sum().backward()
        assert given.grad is not None
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0])
    assert {each.dtype for each in vae.parameters()} == {torch.float32}
    assert "requires a gradient" in warned[0]


CONVERSIONS: dict[str, Any] = {
    "float": lambda vae: vae.float(),
    "to with a device": lambda vae: vae.to("cpu", torch.float32),
    "after to(float32)": lambda vae: vae.to(torch.float32).float(),
    "as DiffusionPipeline.to": lambda vae: vae.to(None, torch.float32),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@torch.no_grad()
def test_other_conversions_change_the_weights(
    name: str, built: list[str], warned: list[str], latents: torch.Tensor
) -> None:
    plain, vae = _both()
    CONVERSIONS[name](vae)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.float32}
    assert _error(vae.decode(latents).sample, plain.float().decode(latents).sample) < 1e-5
    assert (built, warned) == ([DECODER, "vae_decoder float32"], [AGAIN])


@torch.no_grad()
def test_conversions_to_float16_and_bfloat16(built: list[str], latents: torch.Tensor) -> None:
    _, vae = _both()
    for arguments in ((), ("cpu", torch.float16), (torch.float16,)):
        vae.to(torch.float32)
        vae.to(*arguments) if arguments else vae.half()
        assert vae.dtype == torch.float16
        assert vae.decode(latents.half()).sample.dtype == torch.float16
    assert built == [DECODER]
    vae.to(torch.float32)
    vae.to(torch.bfloat16)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.bfloat16}


@torch.no_grad()
def test_new_weights_are_noticed(built: list[str], warned: list[str], latents: torch.Tensor) -> None:
    plain, vae = _both()
    vae.to(torch.float32)
    vae.decode(latents)
    plain.float()
    plain.decoder.conv_in.weight.mul_(1.001)  # less than a digit of float16 for most values
    vae.load_state_dict(plain.state_dict())
    torch.testing.assert_close(vae.decoder.conv_in.weight, plain.decoder.conv_in.weight, rtol=0, atol=0)
    expected = plain.decode(latents).sample
    assert _error(vae.decode(latents).sample, expected) < 1e-5
    vae.to(torch.float16)  # converts the weights: pipelines may go on as before
    assert _error(vae.decode(latents.half()).sample, expected) < 5e-3
    vae.to(torch.float32)
    vae.decoder.conv_in.weight.mul_(2)
    assert _error(vae.decode(latents).sample, expected) > 0.1
    assert warned == [AGAIN] * 3
    assert built == [DECODER, "vae_decoder float32", DECODER, DECODER]


@torch.no_grad()
def test_the_graph_agrees_with_torch_in_float32(warned: list[str], built: list[str], latents: torch.Tensor) -> None:
    """`check_agreement` allows the errors of float16, and still notices wrong results."""
    vae = small_autoencoder(force_upcast=True).half()
    compiled = sdonnx.compile(vae, options={"options": {"check_agreement": True}})
    compiled.to(torch.float32)
    found = compiled.decode(latents).sample
    assert not torch.equal(found, vae.float().decode(latents).sample)
    assert warned == []


@torch.no_grad()
def test_without_force_upcast_to_converts_the_weights(built: list[str]) -> None:
    _, vae = _both(force_upcast=False)
    vae.to(torch.float32)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.float32}


@torch.no_grad()
def test_float16_on_the_cpu_is_converted(latents: torch.Tensor) -> None:
    """No graph computes in float16 there, so that nothing is gained from weights that stay."""
    vae = sdonnx.compile(small_autoencoder(force_upcast=True))
    vae.to(torch.float16)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.float16}
    vae.to(torch.float32)
    assert {each.dtype for each in vae.parameters()} == {vae.dtype} == {torch.float32}
    assert vae.decode(latents).sample.dtype == torch.float32


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
