"""`sdonnx generate --lora` and tags in prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.pipelines import refused
from support.plain_lora import write_plain_lora

from sdonnx.__main__ import main
from sdonnx.cli.generate_options import LoraFile, read_lora_files, read_lora_tags
from sdonnx.errors import OptionError
from sdonnx.runtime.pipeline import OrtDiffusionPipeline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of empty files: names are read before files are."""
    for name in ("style.safetensors", "more/face 2.safetensors", "a:1.safetensors", "one/twice.safetensors"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "twice.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("value", "name", "weight"),
    [
        ("style.safetensors", "style.safetensors", 1.0),
        ("style.safetensors:0.8", "style.safetensors", 0.8),
        ("style.safetensors:-1e-1", "style.safetensors", -0.1),
        ("a:1.safetensors", "a:1.safetensors", 1.0),
        ("a:1.safetensors:2", "a:1.safetensors", 2.0),
        ("more", "more", 1.0),
    ],
)
def test_files_and_weights(value: str, name: str, weight: float, folder: Path) -> None:
    assert read_lora_files([str(folder / value)]) == [LoraFile(folder / name, weight)]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("none.safetensors", "none.safetensors, which does not exist"),
        ("none.safetensors:0.5", "none.safetensors, which does not exist"),
        ("style.safetensors:much", "'much'"),
        ("style.safetensors:nan", "'nan'"),
        ("style.safetensors:", "style.safetensors:, which does not exist"),
        ("x" * 5000, "does not exist"),
    ],
)
def test_wrong_files(value: str, part: str, folder: Path) -> None:
    with refused(OptionError, part):
        read_lora_files([str(folder / value)])


@pytest.mark.parametrize(
    ("prompt", "text", "files"),
    [
        ("a fox", "a fox", []),
        ("a fox <lora:style>", "a fox", [("style.safetensors", 1.0, None)]),
        ("<lora:style:0.5> a <lora:face 2:-1:0.25> fox", "a fox",
         [("style.safetensors", 0.5, None), ("more/face 2.safetensors", 0.25, -1.0)]),
        ("a <lora> b <lora:>", "a <lora> b <lora:>", []),
    ],
)  # fmt: skip
def test_tags(prompt: str, text: str, files: list[Any], folder: Path) -> None:
    expected = [LoraFile(folder / name, weight, of_text) for name, weight, of_text in files]
    assert read_lora_tags([prompt, prompt], folder) == ([text, text], expected)
    assert read_lora_tags([prompt], None) == ([prompt], [])


@pytest.mark.parametrize(
    ("prompts", "parts"),
    [
        (["<lora:none>"], ["<lora:none> matches 0 files"]),
        (["<lora:twice:1>"], ["<lora:twice> matches 2 files"]),
        (["<lora:../style>"], ["matches 0 files"]),
        (["<lora:style:much>"], ["'much'"]),
        (["<lora:style:1:inf>"], ["'inf'"]),
        (["<lora:style>", "a fox"], ["different <lora:...> tags", "run the command once for each"]),
    ],
)
def test_wrong_tags(prompts: list[str], parts: list[str], folder: Path) -> None:
    with refused(OptionError, *parts):
        read_lora_tags(prompts, folder)
    with refused(OptionError, "is no folder"):
        read_lora_tags(["a fox"], folder / "nowhere")


def test_text_weight() -> None:
    file = LoraFile(Path("a.safetensors"), 0.25, -1)
    components = ["unet", "text_encoder", "text_encoder_2"]
    assert file.by_component(components) == {"unet": 0.25, "text_encoder": -1, "text_encoder_2": -1}
    assert str(file) == "a.safetensors:-1:0.25"
    assert LoraFile(Path("a.safetensors"), 0.5).by_component(["unet", "text_encoder"]) == {
        "unet": 0.5,
        "text_encoder": 0.5,
    }


@pytest.fixture(scope="module")
def style(micro_cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain_lora(micro_cpu, tmp_path_factory.mktemp("lora") / "style.safetensors")


@pytest.mark.filterwarnings("default:<lora")
def test_generate(micro_cpu: Path, style: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "-m", str(micro_cpu), "-s", "2", "--height", "64", "--width", "64", "--seed", "7"]
    by_option = [*arguments, "-p", "a red fox", "--lora", f"{style}:0.5", str(style), "-o", str(tmp_path / "a.png")]
    assert main(by_option) == 0
    prompt = "a red fox <lora:style:0.5> <lora:style:1:1>"
    by_tag = [*arguments, "-p", prompt, "--lora_folder", str(style.parent), "-o", str(tmp_path / "b.png")]
    assert main(by_tag) == 0
    pipeline = OrtDiffusionPipeline.from_pretrained(micro_cpu)
    base = np.asarray(pipeline("a red fox", 64, 64, 2, seed=7).images[0])
    pipeline.load_lora_weights(style, adapter_name="style")
    pipeline.set_adapters("style", 1.5)
    expected = np.asarray(pipeline("a red fox", 64, 64, 2, seed=7).images[0]).astype(int)
    assert np.abs(expected - base).max() > 8
    capsys.readouterr()
    assert main([*arguments, "-p", prompt, "-n", "2", "-o", str(tmp_path / "c.png")]) == 0
    assert capsys.readouterr().err.count("warning: <lora:...> in a prompt is read as text") == 1
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as image:
            assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1, name
            parameters = json.loads(image.info["sdonnx"])
        assert len(parameters["lora"]) == 2
    assert parameters["prompt"] == prompt
    assert parameters["lora"] == ["style.safetensors:0.5", "style.safetensors:1:1"]
