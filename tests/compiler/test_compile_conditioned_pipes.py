"""`compile_pipe` of pipelines with ControlNet, T2I-Adapter, IP-Adapter, inpainting and refiners: the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import in_diffusers
from support.pipeline_cache import PipelineCache

import sdonnx
from sdonnx.metrics import psnr
from sdonnx.sample.architecture import ADAPTER_FILES

# Schedulers and image processors of diffusers pass torch tensors to np.array, which numpy 2 warns about.
pytestmark = [
    pytest.mark.usefixtures("variants"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

SIZE: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 2, "output_type": "np"}
SAME_DB = 90

Both = tuple[Any, Any]


def _picture(seed: int, height: int = 64, width: int = 96) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def _loaded(folder: Path) -> Both:
    """Return the pipeline of a folder, and another one with a compiled UNet."""
    compiled = in_diffusers(folder)
    others = set(compiled.components) - {"unet"}
    return in_diffusers(folder), sdonnx.compile_pipe(compiled, ignores=others)


@pytest.fixture
def base(pipelines: PipelineCache) -> Both:
    """Stable Diffusion 1."""
    return _loaded(pipelines.micro("tiny-ip-adapter"))


@pytest.fixture
def xl(pipelines: PipelineCache) -> Both:
    """Stable Diffusion XL."""
    return _loaded(pipelines.micro("sdxl-tiny-ip-adapter"))


def _as(kind: Any, pipes: Both, **added: Any) -> Both:
    """Return both pipelines as another class, with more components."""
    made = []
    for pipe in pipes:
        # from_pipe compares the exact types of components that are not passed.
        other = kind.from_pipe(pipe, unet=pipe.unet, **added)
        other.set_progress_bar_config(disable=True)
        made.append(other)
    return made[0], made[1]


def _images(pipe: Any, **arguments: Any) -> Any:
    return pipe(**({"prompt": "a fox"} | arguments), generator=torch.manual_seed(3)).images


def _agreement(pipes: Both, **arguments: Any) -> float:
    """Return the PSNR between the images of both pipelines, in dB."""
    expected, found = (_images(pipe, **(SIZE | arguments)) for pipe in pipes)
    assert np.std(found) > 0.02
    return psnr(found, expected)


def _image(pipes: Both, **arguments: Any) -> Any:
    return _images(pipes[1], **SIZE, **arguments)


def _control_net(unet: Any) -> Any:
    made: Any = diffusers.ControlNetModel.from_unet(unet).eval().requires_grad_(False)
    for layer in (*made.controlnet_down_blocks, made.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=0.05)  # ControlNet starts with zeros, which change nothing
    return made


def _adapter(kind: str, unet: Any, downscale_factor: int) -> Any:
    torch.manual_seed(0)
    made: Any = diffusers.T2IAdapter(
        channels=list(unet.config.block_out_channels), num_res_blocks=1, downscale_factor=downscale_factor,
        adapter_type=kind,
    )  # fmt: skip
    return made.eval().requires_grad_(False)


def _again(name: str) -> str:
    return f"UNet2DConditionModel is compiled again, for {name}"


def test_controlnet(base: Both, warned: list[str]) -> None:
    kind: Any = diffusers.StableDiffusionControlNetPipeline
    pipes = _as(kind, base, controlnet=_control_net(base[0].unet))
    assert _agreement(pipes, image=_picture(0)) > SAME_DB
    assert _agreement(pipes, image=_picture(1), controlnet_conditioning_scale=0.5, guess_mode=True) > SAME_DB
    assert _agreement(base) > SAME_DB  # without residuals
    assert psnr(_image(pipes, image=_picture(0)), _image(base)) < 40
    assert warned == [_again("residuals of ControlNet")]


@pytest.mark.filterwarnings("ignore:The decode_latents method:FutureWarning")  # diffusers itself calls it
def test_t2i_adapter(base: Both, warned: list[str]) -> None:
    pipes = _as(diffusers.StableDiffusionAdapterPipeline, base, adapter=_adapter("full_adapter", base[0].unet, 8))
    assert _agreement(pipes, image=_picture(0), num_images_per_prompt=2) > SAME_DB
    assert psnr(_image(pipes, image=_picture(0)), _image(base)) < 40
    assert warned == [_again("2 residuals of T2I-Adapter")]


@pytest.mark.slow
def test_controlnet_of_xl(xl: Both, warned: list[str]) -> None:
    pipes = _as(diffusers.StableDiffusionXLControlNetPipeline, xl, controlnet=_control_net(xl[0].unet))
    assert _agreement(pipes, image=_picture(0)) > SAME_DB
    assert warned == [_again("6 time_ids and residuals of ControlNet")]


@pytest.mark.weekly
def test_t2i_adapter_of_xl_in_half_of_the_steps(xl: Both, warned: list[str]) -> None:
    pipes = _as(diffusers.StableDiffusionXLAdapterPipeline, xl, adapter=_adapter("full_adapter_xl", xl[0].unet, 16))
    for seed in range(2):
        assert _agreement(pipes, image=_picture(seed), adapter_conditioning_factor=0.5) > SAME_DB
    assert warned == [_again("6 time_ids and 2 residuals of T2I-Adapter")]


def _load_adapters(pipes: Both, folder: Path, names: list[str]) -> None:
    for pipe in pipes:
        pipe.load_ip_adapter(str(folder), subfolder="ip_adapter", weight_name=names)


def _scaled_agreement(pipes: Both, scale: Any, **arguments: Any) -> float:
    for pipe in pipes:
        pipe.set_ip_adapter_scale(scale)
    return _agreement(pipes, **arguments)


def test_ip_adapters_with_scales(pipelines: PipelineCache, warned: list[str]) -> None:
    """A plain adapter and a Plus adapter, loaded after the UNet was compiled."""
    folder = pipelines.micro("tiny-ip-adapter")
    pipes = _loaded(folder)
    _load_adapters(pipes, folder, list(ADAPTER_FILES))
    images: dict[str, Any] = {"ip_adapter_image": [_picture(0), [_picture(1), _picture(2)]]}
    for scale in ([0.0, 0.0], [0.3, 1.0], [{"up": {"block_1": [0.7, 0.1]}}, {"down": {"block_0": [0.9]}, "mid": 1}]):
        assert _scaled_agreement(pipes, scale, **images) > SAME_DB
    strong = _image(pipes, **images)
    pipes[1].set_ip_adapter_scale([0.0, 0.0])
    assert psnr(_image(pipes, **images), strong) < 60
    assert warned == ["UNet2DConditionModel changed after it was compiled, and is compiled again"]
    masks = [torch.ones(1, 1, 64, 96), torch.ones(1, 2, 64, 96)]
    in_torch = _scaled_agreement(pipes, [0.5, 0.5], **images, cross_attention_kwargs={"ip_adapter_masks": masks})
    assert in_torch == float("inf")
    assert warned[1:] == ["torch computes a call of UNet2DConditionModel: it has cross_attention_kwargs"]
    for pipe in pipes:
        pipe.unload_ip_adapter()
    assert _agreement(pipes) > SAME_DB


@pytest.mark.weekly
def test_ip_adapters_of_xl_with_scales(pipelines: PipelineCache, warned: list[str]) -> None:
    folder = pipelines.micro("sdxl-tiny-ip-adapter")
    plain, compiled = in_diffusers(folder), in_diffusers(folder)
    _load_adapters((plain, compiled), folder, [ADAPTER_FILES[0]])
    pipes = plain, sdonnx.compile_pipe(compiled, ignores=set(compiled.components) - {"unet"})
    for scale in (0.8, {"down": {"block_1": [0.2]}, "up": 0.6}):
        assert _scaled_agreement(pipes, scale, ip_adapter_image=_picture(0)) > SAME_DB
    assert warned == []


@pytest.mark.slow
def test_inpainting_with_nine_channels(pipelines: PipelineCache, warned: list[str]) -> None:
    plain = in_diffusers(pipelines.micro("tiny"))
    torch.manual_seed(0)
    unet: Any = diffusers.UNet2DConditionModel.from_config(plain.unet.config, in_channels=9)
    plain.unet = unet.eval().requires_grad_(False)
    compiled = diffusers.StableDiffusionPipeline(**plain.components, requires_safety_checker=False)
    sdonnx.compile_pipe(compiled, ignores={"vae", "text_encoder"})
    pipes = _as(diffusers.StableDiffusionInpaintPipeline, (plain, compiled))
    mask = Image.fromarray(np.eye(64, 96, dtype=np.uint8) * 255)
    assert _agreement(pipes, image=_picture(0), mask_image=mask) > SAME_DB
    assert warned == []


@pytest.mark.weekly
def test_the_refiner_of_xl(pipelines: PipelineCache, warned: list[str]) -> None:
    pipes = _loaded(pipelines.micro("sdxl-refiner-tiny"))
    given: dict[str, Any] = {"strength": 0.9, "num_inference_steps": 3, "output_type": "np"}
    for seed in range(2):
        theirs, ours = (_images(pipe, image=_picture(seed), **given) for pipe in pipes)
        assert psnr(ours, theirs) > SAME_DB
    assert warned == [_again("5 time_ids")]
