"""A guidance scale of at most 1 takes one row a step: the rows that the denoiser receives, as in diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
from PIL import Image
from support.control_networks import picture, write_controlnet
from support.diffusers_pipelines import in_diffusers, task_of
from support.pipeline_cache import PipelineCache
from support.weekly_cases import weekly

from sdonnx.models import abi
from sdonnx.runtime.device.session import Run
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

PROMPTS = ["a fox", "an owl"]
SCALES = [0.0, 1.0, 7.5]
CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"}
SMALL: dict[str, Any] = {"height": 64, "width": 64}
FAMILIES = ("tiny", "sdxl-tiny", "pixart-alpha-tiny")


@contextmanager
def our_rows() -> Iterator[list[set[int]]]:
    """Yield a list that receives the rows of each step graph that runs, of the denoiser and of ControlNets."""
    seen: list[set[int]] = []
    original = Run.__call__

    def noted(self: Run) -> None:
        graph = self._graph
        if abi.STEP_INDEX in graph.inputs:
            inputs = self.inputs()
            batches = [name for name in graph.inputs if graph.shape(name)[:1] == ["batch_size"]]
            seen.append({len(inputs[name]) for name in batches})
        original(self)

    with mock.patch.object(Run, "__call__", noted):
        yield seen


@contextmanager
def their_rows(*networks: Any) -> Iterator[list[set[int]]]:
    """Yield a list that receives the rows of each call of diffusers' networks."""
    seen: list[set[int]] = []

    def note(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append({len(given[0] if given else named["sample"])})

    hooks = [network.register_forward_pre_hook(note, with_kwargs=True) for network in networks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def assert_rows(ours: OrtDiffusionPipeline, theirs: Any, scale: float, given: Any = (), own: Any = ()) -> None:
    """Generate two images with both pipelines, and compare the rows of every call of every network.

    Args:
        ours: this project's pipeline.
        theirs: the pipeline of diffusers.
        scale: the guidance scale.
        given: further arguments of diffusers.
        own: further arguments of this project.
    """
    networks = [getattr(theirs, name) for name in ("unet", "transformer", "controlnet") if hasattr(theirs, name)]
    with their_rows(*networks) as expected:
        theirs(PROMPTS, guidance_scale=scale, **CALL, **dict(given))
    with our_rows() as found:
        ours(PROMPTS, guidance_scale=scale, **CALL, **dict(own))
    assert found == expected
    guesses = dict(own).get("guess_mode", False)  # the ControlNet runs first, and only for the prompts
    assert expected[0] == {len(PROMPTS) * (2 if scale > 1 and not guesses else 1)}
    assert expected[-1] == {len(PROMPTS) * (2 if scale > 1 else 1)}


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, pipelines: PipelineCache) -> tuple[OrtDiffusionPipeline, Any]:
    """A pipeline of each family, here and in diffusers."""
    source = pipelines.micro(request.param)
    optimized = pipelines.optimized(pipelines.exported(source), provider="cpu")
    return OrtDiffusionPipeline.from_pretrained(optimized), in_diffusers(source)


@pytest.mark.parametrize("scale", SCALES)
def test_text_to_image(both: tuple[OrtDiffusionPipeline, Any], scale: float) -> None:
    ours, theirs = both
    pixart = {"clean_caption": False, "use_resolution_binning": False} if hasattr(theirs, "transformer") else {}
    assert_rows(ours, theirs, scale, SMALL | pixart, SMALL | pixart)


@pytest.mark.parametrize("scales", weekly([[0.0, 1.0], [1.0, 0.5], [0, 0]], [1.0, 0.5]))
@pytest.mark.weekly
def test_lists_of_small_guidance_scales(both: tuple[OrtDiffusionPipeline, Any], scales: list[float]) -> None:
    with our_rows() as found:
        both[0](PROMPTS, guidance_scale=scales, **CALL, **SMALL)
    assert found
    assert all(rows == {2} for rows in found)
    with our_rows() as found:
        both[0](PROMPTS, guidance_scale=[scales[0], 7.5], **CALL, **SMALL)
    assert found
    assert all(rows == {4} for rows in found)


@pytest.fixture(scope="module")
def xl(pipelines: PipelineCache) -> tuple[OrtDiffusionPipeline, Any]:
    source = pipelines.micro("sdxl-tiny")
    optimized = pipelines.optimized(pipelines.exported(source), provider="cpu")
    return OrtDiffusionPipeline.from_pretrained(optimized), in_diffusers(source)


PICTURE = picture(1, (64, 64))
MASK = Image.new("L", (64, 64), 255)
TYPES = {
    "image": "StableDiffusionImg2ImgPipeline",
    "image xl": "StableDiffusionXLImg2ImgPipeline",
    "mask": "StableDiffusionInpaintPipeline",
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", TYPES)
def test_from_an_image(
    kind: str, scale: float, ours: OrtDiffusionPipeline, micro_torch: Any, xl: tuple[OrtDiffusionPipeline, Any]
) -> None:
    own, base = xl if kind.endswith("xl") else (ours, micro_torch)
    theirs = task_of(base, TYPES[kind])
    pictures: Any = PICTURE if kind == "mask" else [PICTURE] * len(PROMPTS)
    given: dict[str, Any] = {"image": pictures, "strength": 1.0}
    if kind == "mask":
        given |= {"mask_image": MASK, **SMALL}
    assert_rows(own, theirs, scale, given, given)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("guess_mode", [False, True])
def test_controlnet(guess_mode: bool, scale: float, controlled: tuple[OrtDiffusionPipeline, Any]) -> None:
    ours, theirs = controlled
    given = SMALL | {"guess_mode": guess_mode}
    assert_rows(ours, theirs, scale, given | {"image": PICTURE}, given | {"control_image": PICTURE})


def test_calls_with_and_without_guess_mode_alternate(controlled: tuple[OrtDiffusionPipeline, Any]) -> None:
    """Rows that a call did not compute are zeros, also after a call that computed all rows."""
    ours, _ = controlled

    def image(guess_mode: bool) -> Any:
        given = SMALL | CALL | {"guess_mode": guess_mode, "guidance_scale": 4.0}
        return ours(PROMPTS, control_image=PICTURE, seed=3, **given).images

    first = {guess_mode: image(guess_mode) for guess_mode in (True, False)}
    assert not np.array_equal(first[True], first[False])
    for guess_mode in (True, False, True):
        np.testing.assert_array_equal(image(guess_mode), first[guess_mode])


@pytest.fixture(scope="module")
def controlled(
    micro: Path, pipelines: PipelineCache, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OrtDiffusionPipeline, Any]:
    """Stable Diffusion with a ControlNet."""
    folder = write_controlnet(micro, tmp_path_factory.mktemp("rows") / "controlnet", 1)
    optimized = pipelines.optimized(pipelines.exported(micro, controlnets=[folder]), provider="cpu")
    network: Any = diffusers.ControlNetModel.from_pretrained(folder)
    theirs = task_of(in_diffusers(micro), "StableDiffusionControlNetPipeline", controlnet=network)
    return OrtDiffusionPipeline.from_pretrained(optimized), theirs


@pytest.fixture(scope="module")
def adapted(pipelines: PipelineCache) -> tuple[OrtDiffusionPipeline, Any]:
    """Stable Diffusion with an IP-Adapter."""
    source = pipelines.micro("tiny-ip-adapter")
    optimized = pipelines.optimized(pipelines.adapted(source, "ip-adapter.safetensors"), provider="cpu")
    theirs = in_diffusers(source)
    theirs.load_ip_adapter(str(source), subfolder="ip_adapter", weight_name="ip-adapter.safetensors")
    return OrtDiffusionPipeline.from_pretrained(optimized), theirs


@pytest.mark.parametrize("scale", SCALES)
def test_ip_adapter(scale: float, adapted: tuple[OrtDiffusionPipeline, Any]) -> None:
    given = SMALL | {"ip_adapter_image": PICTURE}
    assert_rows(*adapted, scale, given, given)
