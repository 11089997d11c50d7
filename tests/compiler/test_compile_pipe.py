"""`sdonnx.compile_pipe`: diffusers pipelines with drop-ins as components generate the same images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from support.diffusers_pipelines import in_diffusers
from support.pipeline_cache import PipelineCache
from support.pipelines import refused

import sdonnx
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.errors import OptionError
from sdonnx.metrics import psnr
from sdonnx.sample.architecture import ADAPTER_FILES

SIZE: dict[str, Any] = {"height": 24, "width": 16, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture(scope="module")
def pipes(nano: Path) -> tuple[Any, Any]:
    """The pipeline of a folder, and another one that is compiled."""
    return in_diffusers(nano), sdonnx.compile_pipe(
        in_diffusers(nano), options={"mode": "O2"}, fuse_qkv_projections=True, backend="nexfort"
    )


def test_a_compiled_pipeline_stays_as_it_is(pipes: tuple[Any, Any]) -> None:
    """With the same options; with others, components are compiled again."""
    pipe = pipes[1]
    parts = dict(pipe.components)
    again = sdonnx.compile_pipe(pipe, options={"mode": "O2"})
    assert again is pipe
    assert all(getattr(again, name) is part for name, part in parts.items())
    other = sdonnx.compile_pipe(type(pipe)(**parts, requires_safety_checker=False), options={"mode": "O2:freezing"})
    assert isinstance(other.unet, CompiledModule)
    assert other.unet is not parts["unet"]


def _own(noted: list[str]) -> list[str]:
    return [each for each in noted if "torch computes" in each or "compiled" in each]


def test_every_component_is_a_drop_in(pipes: tuple[Any, Any]) -> None:
    plain, compiled = pipes
    for name in ("unet", "vae", "text_encoder"):
        part: Any = getattr(compiled, name)
        assert isinstance(part, CompiledModule)
        assert type(part).__name__ == type(getattr(plain, name)).__name__
    assert compiled.components.keys() == plain.components.keys()
    assert compiled.config == plain.config


@pytest.mark.parametrize("batch", [1, 2])
def test_images_agree(pipes: tuple[Any, Any], batch: int, noted: list[str]) -> None:
    arguments = SIZE | {"num_images_per_prompt": batch}
    theirs, ours = (pipe("a fox", generator=torch.manual_seed(3), **arguments).images for pipe in pipes)
    assert psnr(ours, theirs) > 90
    assert _own(noted) == []


# Schedulers of diffusers pass torch tensors to np.array, which numpy 2 warns about.
numpy_warns = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@numpy_warns
def test_other_schedulers_and_callbacks(pipes: tuple[Any, Any], noted: list[str]) -> None:
    import diffusers

    seen: list[list[int]] = []
    images = []
    for pipe in pipes:
        before, steps = pipe.scheduler, list[int]()
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(before.config)

        def note(_: Any, step: int, timestep: Any, values: Any, steps: list[int] = steps) -> Any:
            steps.append(step)
            return {"latents": values["latents"] * 0.9}

        images.append(pipe("a fox", generator=torch.manual_seed(3), callback_on_step_end=note, **SIZE).images)
        pipe.scheduler = before
        seen.append(steps)
    assert seen == [[0, 1], [0, 1]]
    assert psnr(images[1], images[0]) > 90
    assert _own(noted) == []


@numpy_warns
def test_image_to_image_with_the_same_components(pipes: tuple[Any, Any]) -> None:
    import diffusers

    image = np.random.default_rng(0).random((1, 24, 16, 3), np.float32)
    results = []
    for pipe in pipes:
        other: Any = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        other.set_progress_bar_config(disable=True)
        results.append(
            other("a fox", image=image, strength=0.6, num_inference_steps=4, generator=torch.manual_seed(3),
                  output_type="np").images
        )  # fmt: skip
    assert psnr(results[1], results[0]) > 90


@pytest.mark.usefixtures("variants")
@numpy_warns
def test_stable_diffusion_xl(pipelines: PipelineCache, noted: list[str]) -> None:
    """Two text encoders, and a UNet that is conditioned on sizes."""
    folder = pipelines.micro("sdxl-tiny")
    plain, compiled = in_diffusers(folder), sdonnx.compile_pipe(in_diffusers(folder))
    assert all(
        isinstance(getattr(compiled, name), CompiledModule) for name in ("text_encoder", "text_encoder_2", "unet")
    )
    theirs, ours = (pipe("a fox", generator=torch.manual_seed(3), **SIZE).images for pipe in (plain, compiled))
    assert psnr(ours, theirs) > 90
    assert not any("torch computes" in each for each in noted)


@pytest.mark.usefixtures("variants")
def test_the_image_encoder_of_an_adapter(pipelines: PipelineCache, noted: list[str]) -> None:
    """IP-Adapter Plus reads hidden states of the image encoder, and the plain adapter its embedding."""
    folder = pipelines.micro("tiny-ip-adapter")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    images = []
    for name in ADAPTER_FILES:
        for compiled in (False, True):
            pipe = in_diffusers(folder)
            pipe.load_ip_adapter(str(folder), subfolder="ip_adapter", weight_name=name)
            pipe.set_ip_adapter_scale(0.8)
            if compiled:
                sdonnx.compile_pipe(pipe, ignores=("unet", "vae", "text_encoder"))
                assert isinstance(pipe.image_encoder, CompiledModule)
            picture = Image.fromarray(pixels)
            made = pipe("a fox", ip_adapter_image=picture, generator=torch.manual_seed(3), **SIZE)
            images.append(made.images)
        assert psnr(images[-1], images[-2]) > 90
    assert psnr(images[0], images[2]) < 60
    assert not any("torch computes" in each for each in noted)


@pytest.mark.usefixtures("variants")
def test_control_net(micro: Path, noted: list[str]) -> None:
    """The ControlNet is a drop-in; its two scales are an input of one graph."""
    import diffusers

    parts = in_diffusers(micro).components
    torch.manual_seed(0)
    model: Any = diffusers.ControlNetModel.from_unet(parts["unet"])
    for name, parameter in model.named_parameters():
        if "controlnet_down_blocks" in name or "controlnet_mid_block" in name:
            torch.nn.init.normal_(parameter, std=0.05)  # zero in new networks
    parts["controlnet"] = model.eval()
    picture = torch.rand(1, 3, SIZE["height"], SIZE["width"], generator=torch.manual_seed(1))

    def run(pipe: Any, scale: float) -> Any:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.manual_seed(3)
        arguments = {"controlnet_conditioning_scale": scale, "control_guidance_end": 0.5, "generator": generator}
        return pipe("a fox", image=picture, **arguments, **SIZE).images

    made: Any = diffusers.StableDiffusionControlNetPipeline
    pipe = made(**parts, requires_safety_checker=False)
    theirs = [run(pipe, scale) for scale in (1.0, 0.0)]
    assert sdonnx.compile_pipe(pipe, ignores=("vae", "text_encoder")) is pipe
    control_net: Any = pipe.controlnet
    assert isinstance(control_net, CompiledModule)
    programs: Any = control_net._programs
    graph = programs.methods["forward"]._built.graph
    with mock.patch.object(graph, "run", wraps=graph.run) as runs:
        ours = [run(pipe, scale) for scale in (1.0, 0.0)]
    assert runs.call_count >= 2 * SIZE["num_inference_steps"]
    assert all(psnr(one, other) > 90 for one, other in zip(ours, theirs, strict=True))
    assert psnr(theirs[0], theirs[1]) < 60
    assert not any("torch computes a call of ControlNetModel" in each for each in noted)


def test_an_ignored_component_stays_in_torch(nano: Path) -> None:
    pipe = in_diffusers(nano)
    before = pipe.vae, pipe.text_encoder
    assert sdonnx.compile_pipe(pipe, ignores=("vae", "text_encoder")) is pipe
    assert (pipe.vae, pipe.text_encoder) == before
    assert isinstance(pipe.unet, CompiledModule)


def test_an_unsupported_component_stays_in_torch(nano: Path, noted: list[str]) -> None:
    """A class of the user, derived from a supported one, may compute something else."""
    pipe = in_diffusers(nano)

    class Changed(type(pipe.unet)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    pipe.unet.__class__ = Changed
    sdonnx.compile_pipe(pipe, ignores="vae")
    assert [isinstance(getattr(pipe, name), CompiledModule) for name in ("unet", "vae", "text_encoder")] == [
        False, False, True,
    ]  # fmt: skip
    stays = [message for message in noted if "stays in torch" in message]
    assert stays == ["the unet stays in torch: its class is not supported"]


def test_a_compiled_pipeline_can_be_saved(pipes: tuple[Any, Any], tmp_path: Path) -> None:
    plain, compiled = pipes
    compiled.save_pretrained(tmp_path / "saved")
    again = in_diffusers(tmp_path / "saved")
    theirs, ours = (pipe("a fox", generator=torch.manual_seed(3), **SIZE).images for pipe in (plain, again))
    assert np.array_equal(ours, theirs)


def test_pipelines_that_are_refused(nano: Path) -> None:
    pipe = in_diffusers(nano)
    parts = {name: getattr(pipe, name) for name in ("unet", "vae", "text_encoder")}
    with refused(OptionError, "ignores 'vea'", "some of"):
        sdonnx.compile_pipe(pipe, ignores=["vea"])
    with refused(OptionError, "without components to compile", "ignore less"):
        sdonnx.compile_pipe(pipe, ignores=tuple(parts))
    with refused(OptionError, "a Linear", "a pipeline of diffusers", "sdonnx.compile is for modules"):
        sdonnx.compile_pipe(torch.nn.Linear(1, 1))
    with refused(OptionError, "the mode 'fast' is unknown", "O2"):
        sdonnx.compile_pipe(pipe, options="fast")
    pipe.vae._hf_hook = SimpleNamespace()
    with refused(OptionError, "the vae of a StableDiffusionPipeline with offloading", "remove_all_hooks"):
        sdonnx.compile_pipe(pipe)
    del pipe.vae._hf_hook
    pipe.vae.half()
    with refused(OptionError, "AutoencoderKL that cannot be compiled", "float16", "module.float()"):
        sdonnx.compile_pipe(pipe)
    # Nothing was replaced.
    assert all(getattr(pipe, name) is part for name, part in parts.items())
