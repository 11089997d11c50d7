"""The cache of compiled graphs: `sdonnx.compile` of an equal module builds no graph again."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.logged_lines import logged_lines
from support.pipelines import refused
from support.small_modules import small_autoencoder, small_text_encoder

import sdonnx
from sdonnx.compiler import module_graph
from sdonnx.compiler.compile_module import programs_of
from sdonnx.compiler.module_graph import build_model
from sdonnx.errors import OptionError
from sdonnx.folder import folder_cache
from sdonnx.folder.folder_cache import ENTRY, _seal, entry_info
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.metrics import relative_error

IDS = torch.tensor([[97, 5, 6, 98]])


def _require_equal(module: Any, compiled: Any) -> None:
    """Compare a text encoder with its drop-in."""
    with torch.inference_mode():
        ours, theirs = compiled(IDS), module(IDS)
    assert relative_error(ours.last_hidden_state.numpy(), theirs.last_hidden_state.numpy()) < 1e-4


def _compile(factor: float = 1) -> None:
    """Compile a text encoder; a factor changes its weights."""
    module = small_text_encoder()
    module.encoder.layers[1].mlp.fc1.weight.mul_(factor)
    _require_equal(module, sdonnx.compile(module))


@pytest.fixture
def entry(request: pytest.FixtureRequest) -> Path:
    """A copy of the entry that all tests share, in a cache of its own."""
    built: Any = programs_of(sdonnx.compile(small_text_encoder()))["forward"]._built
    folder: Path = request.getfixturevalue("folder")
    source: Path = built.graph.path.parent
    return shutil.copytree(source, folder / source.name)


def test_equal_module_is_built_once(folder: Path, builds: mock.Mock, warned: list[str]) -> None:
    for _ in range(3):
        _compile()
    assert builds.call_count == 1
    assert len(list(folder.iterdir())) == 1
    assert warned == []


OTHER_PROCESS = """
import logging, sys
logging.getLogger("sdonnx").setLevel(logging.DEBUG)
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from compiler.test_graph_cache import _compile
_compile()
"""


def test_second_process_builds_nothing(entry: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    command, environment = [sys.executable, "-c", OTHER_PROCESS], os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    first, *others = [entry_info(path)["parts"] for path in entry.parent.iterdir()]
    assert [each for each in others if each != first] == []
    assert "loaded CLIPTextModel from " in done.stdout
    assert "built" not in done.stdout


def test_killed_process_leaves_no_graph(folder: Path, builds: mock.Mock) -> None:
    """A process that is killed removes nothing (`test_folder_cache` kills one)."""
    killed = mock.patch.object(folder_cache, "_seal", side_effect=KeyboardInterrupt)
    with killed, mock.patch("shutil.rmtree"), pytest.raises(KeyboardInterrupt):
        _compile()
    (partial,) = folder.glob(".*.partial")
    assert (partial / ONNX_MODEL).is_file()
    _compile()
    assert builds.call_count == 2
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_entry_has_no_parameters_of_the_module(folder: Path) -> None:
    """Convolution weights are parameters; matmul weights are transposed."""
    module = small_autoencoder()
    sdonnx.compile(module)
    (entry,) = folder.iterdir()
    convolutions = sum(each.weight.nbytes for each in module.decoder.modules() if isinstance(each, torch.nn.Conv2d))
    written = (entry / ONNX_WEIGHTS).stat().st_size
    assert 0 < written < convolutions / 2
    again = small_autoencoder()
    latents = torch.randn(1, 4, 5, 7)
    ours, theirs = sdonnx.compile(again).decode(latents).sample, module.decode(latents).sample
    assert relative_error(ours.numpy(), theirs.numpy()) < 1e-4


def test_parameters_with_other_strides(folder: Path, builds: mock.Mock) -> None:
    latents = torch.randn(1, 4, 5, 7)
    for layout in (torch.contiguous_format, torch.channels_last):
        module = small_autoencoder().to(memory_format=layout)
        ours, theirs = sdonnx.compile(module).decode(latents).sample, module.decode(latents).sample
        assert relative_error(ours.numpy(), theirs.numpy()) < 1e-4
    assert builds.call_count == 1


def test_changed_weights_are_another_graph(folder: Path, builds: mock.Mock) -> None:
    module = small_text_encoder()
    compiled = sdonnx.compile(module)
    for factor in (2, 0.5):
        with torch.no_grad():
            module.encoder.layers[1].mlp.fc1.weight.mul_(factor)
        _require_equal(module, compiled)
    assert builds.call_count == 1  # new values are loaded into the cached graph
    _compile(3)
    assert builds.call_count == 2


def test_changed_activations_are_another_graph(folder: Path, builds: mock.Mock) -> None:
    for function in (None, torch.nn.GELU()):
        module = small_text_encoder()
        if function is not None:
            module.encoder.layers[1].mlp.activation_fn = function
        _require_equal(module, sdonnx.compile(module))
    assert builds.call_count == 2


def test_code_of_the_user_is_not_cached(folder: Path) -> None:
    class Scaled(torch.nn.GELU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(x)

    module = small_text_encoder()
    module.encoder.layers[1].mlp.activation_fn = Scaled()
    with logged_lines(logging.INFO) as lines:
        compiled = sdonnx.compile(module)
    line, fused = lines
    assert fused.startswith("fused in CLIPTextModel: ")
    assert line.startswith("CLIPTextModel is not cached: ")
    assert "Scaled, which is not of" in line
    assert not folder.exists()
    _require_equal(module, compiled)


@pytest.mark.parametrize("file", [ONNX_MODEL, ONNX_WEIGHTS])
def test_truncated_entry_is_made_again(entry: Path, builds: mock.Mock, warned: list[str], file: str) -> None:
    content = (entry / file).read_bytes()
    (entry / file).write_bytes(content[:-1])
    _compile()
    assert builds.call_count == 1
    assert len((entry / file).read_bytes()) == len(content)
    (line,) = warned
    assert line.startswith(f"removed a broken entry of the cache: {entry / file} has {len(content) - 1} bytes")


def test_graph_that_cannot_be_loaded_is_made_again(entry: Path, builds: mock.Mock, warned: list[str]) -> None:
    (entry / ONNX_MODEL).write_bytes(b"no model")
    info = entry_info(entry)
    (entry / ENTRY).unlink()
    _seal(entry, info)
    _compile()
    assert builds.call_count == 1
    (line,) = warned
    assert line.startswith("removed a broken entry of the cache: ONNX Runtime cannot load")


@pytest.mark.parametrize("file", [ONNX_MODEL, ONNX_WEIGHTS])
def test_damaged_entry_is_made_again(entry: Path, builds: mock.Mock, warned: list[str], file: str) -> None:
    """The sizes are right, and ONNX Runtime would load the weights."""
    content = (entry / file).read_bytes()
    middle = len(content) // 2
    (entry / file).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    _compile()
    assert builds.call_count == 1
    assert (entry / file).read_bytes() == content
    (line,) = warned
    assert line.startswith(f"removed a broken entry of the cache: {entry / file} was damaged")


def test_broken_graph_that_cannot_be_removed(entry: Path, builds: mock.Mock) -> None:
    size = (entry / ONNX_MODEL).stat().st_size
    (entry / ONNX_MODEL).write_bytes(bytes(size))
    with mock.patch("sdonnx.folder.folder_cache._remove", return_value=False):
        _compile()
    assert builds.call_count == 1


def test_module_that_changes_meanwhile_is_not_cached(folder: Path, warned: list[str]) -> None:
    """Its graph has weights that its key does not have."""
    module = small_text_encoder()

    def build(*arguments: Any) -> Any:
        with torch.no_grad():
            module.encoder.layers[0].mlp.fc1.weight.mul_(2)
        return build_model(*arguments)

    with mock.patch.object(module_graph, "build_model", build):
        _require_equal(module, sdonnx.compile(module))
    assert list(folder.glob("[!.]*")) == []
    assert f"nothing is cached in {folder}: the module changed while it was compiled" in warned


def test_without_a_place_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, builds: mock.Mock, warned: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path / "file"))
    _compile()
    assert builds.call_count == 1
    assert warned == [f"nothing is cached in {tmp_path / 'file' / 'graphs'}: Not a directory"]


def test_full_disk(folder: Path, builds: mock.Mock, warned: list[str]) -> None:
    with mock.patch("sdonnx.folder.folder_cache._seal", side_effect=OSError(28, "No space left on device")):
        _compile()
    assert builds.call_count == 1
    assert warned == [f"nothing is cached in {folder}: No space left on device"]
    assert list(folder.iterdir()) == []


def test_limit_removes_graphs_that_are_not_in_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, builds: mock.Mock
) -> None:
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "1")
    used = sdonnx.compile(small_text_encoder())
    _compile(2)
    assert len(list(folder.iterdir())) == 2
    del used
    _compile(3)
    assert len(list(folder.iterdir())) == 1


def test_limit_of_zero_turns_it_off(folder: Path, monkeypatch: pytest.MonkeyPatch, builds: mock.Mock) -> None:
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")
    _compile()
    assert not folder.exists()
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "plenty")
    with refused(OptionError, "SDONNX_CACHE_LIMIT is 'plenty'", "a size such as 20GB"):
        sdonnx.compile(small_text_encoder())
