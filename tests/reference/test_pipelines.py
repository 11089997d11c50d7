"""The reference images: diffusers in several data types, and an optimized folder from the same noise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from support.pipelines import refused

from sdonnx.errors import DeviceMemoryError, FolderError, ProviderError
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.metrics import psnr
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.optimized_pipeline import OptimizedPipeline
from sdonnx.reference.workload import Workload

WORKLOAD = Workload(batch_size=2, height=64, width=64, steps=3, seed=5)


def pixels(images: list[Image.Image]) -> npt.NDArray[np.float32]:
    """Return images as (B,H,W,3) from 0 to 1."""
    return np.stack([np.asarray(image, np.float32) / 255 for image in images])


@pytest.mark.parametrize("prompts", [PROMPTS[0], list(PROMPTS[:2])], ids=["one prompt", "two prompts"])
def test_images_are_equal(prompts: str | list[str], micro: Path, micro_cpu: Path) -> None:
    images = []
    for source in (DiffusersPipeline(micro, "cpu"), OptimizedPipeline(micro_cpu)):
        source.load(WORKLOAD)
        images.append(pixels(source.generate(prompts, WORKLOAD)))
        source.unload()
    assert images[0].shape == (2 if isinstance(prompts, str) else 4, 64, 64, 3)
    assert psnr(*images) >= 50


# diffusers' AutoPipeline imports all pipelines; one that needs sentencepiece uses torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("started", [False, True], ids=["from noise", "from an image"])
def test_half_precision_has_the_same_noise(
    started: bool, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes samplers that sample noise in each step. Before torch 2.13 the random stream differs in float16."""
    from diffusers.schedulers import scheduling_euler_ancestral_discrete

    module: Any = scheduling_euler_ancestral_discrete
    sample: Any = module.randn_tensor
    types: list[torch.dtype] = []

    def recorded(*shape: Any, dtype: torch.dtype, **options: Any) -> Any:
        types.append(dtype)
        return sample(*shape, dtype=dtype, **options)

    monkeypatch.setattr(module, "randn_tensor", recorded)
    path = tmp_path / "start.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(path)
    workload = Workload(1, 64, 64, 4, scheduler="euler_a", image=str(path) if started else None)
    images = []
    for precision in ("float32", "float16"):
        source = DiffusersPipeline(micro, "cpu", precision)
        source.load(workload)
        images.append(pixels(source.generate(PROMPTS[0], workload)))
    assert set(types) == {torch.float32}
    assert psnr(*images) >= 45


def test_out_of_memory_error_of_torch_is_one_line(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")

    source = DiffusersPipeline(micro, "cpu")
    source.load(WORKLOAD)
    monkeypatch.setattr(source.denoiser, "forward", fail)
    with refused(DeviceMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB;"):
        source.generate(PROMPTS[0], WORKLOAD)


def test_rejects_a_folder_for_another_provider(micro_cpu: Path) -> None:
    with refused(ProviderError, "was optimized for cpu; expected a folder for cuda"):
        OptimizedPipeline(micro_cpu, "cuda")


def test_rejects_an_incomplete_diffusers_folder(micro: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    weights = "diffusion_pytorch_model.safetensors"
    shutil.copytree(micro, broken, ignore=shutil.ignore_patterns(weights))
    source = DiffusersPipeline(broken, "cpu")
    with refused(FolderError, f"diffusers cannot load {broken}"):
        source.load(WORKLOAD)
