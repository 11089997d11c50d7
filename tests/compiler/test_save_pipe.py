"""`sdonnx.save_pipe` and `sdonnx.load_pipe`: compiled pipelines in other processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.diffusers_pipelines import in_diffusers
from support.pipelines import largest_file, refused

import sdonnx
from sdonnx.compiler.compile_module import CompiledModule, programs_of
from sdonnx.errors import FolderError, OptionError, OutputError
from sdonnx.folder.pipeline_folder import ONNX_WEIGHTS
from sdonnx.metrics import psnr

SIZE: dict[str, Any] = {"height": 24, "width": 16, "num_inference_steps": 2, "output_type": "np"}


@pytest.fixture(scope="module")
def compiled(nano: Path) -> Any:
    """A pipeline of which all but the UNet is compiled."""
    return sdonnx.compile_pipe(in_diffusers(nano), ignores=("unet",))


@pytest.fixture(scope="module")
def saved(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which it is saved."""
    folder = tmp_path_factory.mktemp("saved") / "cached_pipe"
    sdonnx.save_pipe(compiled, folder)
    return folder


def _compiled_parts(pipe: Any) -> set[str]:
    return {name for name, part in pipe.components.items() if isinstance(part, CompiledModule)}


def test_saved_graphs_are_loaded(saved: Path, nano: Path, builds: mock.Mock, warned: list[str]) -> None:
    plain, loaded = in_diffusers(nano), in_diffusers(nano)
    assert sdonnx.load_pipe(loaded, saved) is loaded
    assert _compiled_parts(loaded) == {"text_encoder", "vae"}
    theirs, ours = (pipe("a fox", generator=torch.manual_seed(3), **SIZE).images for pipe in (plain, loaded))
    assert psnr(ours, theirs) > 90
    assert builds.call_count == 0
    assert warned == []


def test_damaged_graph_is_compiled(
    saved: Path, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: mock.Mock, warned: list[str]
) -> None:
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")
    shutil.copytree(saved, damaged := tmp_path / "damaged")
    path = max(damaged.rglob(ONNX_WEIGHTS), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    sdonnx.load_pipe(in_diffusers(nano), damaged)
    assert builds.call_count == 1
    (line,) = warned
    assert f"is compiled: its saved graph cannot be loaded ({path} was damaged" in line


def test_other_weights_are_compiled(saved: Path, nano: Path, builds: mock.Mock, warned: list[str]) -> None:
    pipe = in_diffusers(nano)
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight.mul_(1.01)
    sdonnx.load_pipe(pipe, saved)
    assert _compiled_parts(pipe) == {"text_encoder", "vae"}
    assert builds.call_count == 1
    assert warned == [f"CLIPTextModel is compiled: that in {saved} has other weights"]


@pytest.mark.usefixtures("uncached")
def test_methods_compiled_by_their_first_call(
    saved: Path, nano: Path, tmp_path: Path, builds: mock.Mock, warned: list[str]
) -> None:
    pipe, image = in_diffusers(nano), torch.rand(1, 3, 16, 16) * 2 - 1
    sdonnx.load_pipe(pipe, saved, ignores="text_encoder")
    assert _compiled_parts(pipe) == {"vae"}
    with torch.inference_mode():
        expected = pipe.vae.encode(image).latent_dist.mean
    assert builds.call_count == 1
    sdonnx.save_pipe(pipe, tmp_path, ignores=("text_encoder",))
    builds.reset_mock()
    again = sdonnx.load_pipe(in_diffusers(nano), tmp_path)
    with torch.inference_mode():
        assert torch.equal(again.vae.encode(image).latent_dist.mean, expected)
    assert builds.call_count == 0
    assert warned == []


def test_compiled_components_stay(saved: Path, compiled: Any, builds: mock.Mock) -> None:
    parts = {name: getattr(compiled, name) for name in ("text_encoder", "vae")}
    sdonnx.load_pipe(compiled, saved)
    assert all(getattr(compiled, name) is part for name, part in parts.items())
    assert builds.call_count == 0


def test_saving_again(saved: Path, compiled: Any, tmp_path: Path, builds: mock.Mock) -> None:
    sdonnx.save_pipe(compiled, tmp_path, ignores="vae")
    assert list(json.loads((tmp_path / "compiled.json").read_text())["components"]) == ["text_encoder"]
    (old,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with torch.no_grad():
        compiled.text_encoder.get_input_embeddings().weight.mul_(2)
    try:
        sdonnx.save_pipe(compiled, tmp_path, ignores="vae", overwrite=False)
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [old]
        sdonnx.save_pipe(compiled, tmp_path, ignores="vae")
    finally:
        with torch.no_grad():
            compiled.text_encoder.get_input_embeddings().weight.mul_(0.5)
    (new,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert new != old


def test_graphs_of_the_cache_are_copied(
    nano: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, builds: mock.Mock
) -> None:
    pipe = sdonnx.compile_pipe(in_diffusers(nano), ignores=("unet", "vae"))
    sdonnx.save_pipe(pipe, tmp_path / "saved")
    assert builds.call_count == 1
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")
    sdonnx.load_pipe(in_diffusers(nano), tmp_path / "saved")
    assert builds.call_count == 1


def test_folders_and_pipelines_that_are_refused(saved: Path, nano: Path, compiled: Any, tmp_path: Path) -> None:
    pipe = in_diffusers(nano)
    with refused(FolderError, "compiled.json does not exist", "a folder that save_pipe wrote"):
        sdonnx.load_pipe(pipe, tmp_path)
    (tmp_path / "compiled.json").write_text('{"components": ["unet"]}')
    with refused(FolderError, "lists no components", "a folder that save_pipe wrote"):
        sdonnx.load_pipe(pipe, tmp_path)
    (tmp_path / "compiled.json").write_text('{"components": {"transformer": {}}}')
    with refused(OptionError, "without the component 'transformer'", "another folder"):
        sdonnx.load_pipe(pipe, tmp_path)
    with refused(OptionError, "a StableDiffusionPipeline that is not compiled", "after compile_pipe"):
        sdonnx.save_pipe(pipe, tmp_path)
    with refused(OptionError, "ignores 'vea'"):
        sdonnx.load_pipe(pipe, saved, ignores=("vea",))
    with refused(OptionError, "a Linear", "a pipeline of diffusers"):
        sdonnx.save_pipe(torch.nn.Linear(1, 1), tmp_path)
    pipe.vae._hf_hook = SimpleNamespace()
    with refused(OptionError, "offloading", "remove_all_hooks"):
        sdonnx.load_pipe(pipe, saved)
    assert _compiled_parts(pipe) == set()


def test_folder_that_cannot_be_written(compiled: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(OutputError, "writing into", "Not a directory", "choose another folder"):
        sdonnx.save_pipe(compiled, tmp_path / "file" / "saved")
    with largest_file(100), refused(OutputError, "writing into", "choose another folder"):
        sdonnx.save_pipe(compiled, tmp_path / "saved", ignores="vae")
    assert [path.name for path in (tmp_path / "saved").rglob("*")] == []


def test_code_of_the_user_is_refused(nano: Path, tmp_path: Path) -> None:
    pipe = sdonnx.compile_pipe(in_diffusers(nano), ignores=("unet", "vae"))
    pipe.text_encoder.own = lambda: None
    with refused(OptionError, "the text_encoder cannot be saved: own is", "pass ignores=('text_encoder',)"):
        sdonnx.save_pipe(pipe, tmp_path)
    assert programs_of(pipe.unet) == {}
