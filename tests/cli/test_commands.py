"""Commands of the command line."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.pipelines import refused, snapshot
from support.preloaded import python

from sdonnx import optimize_pipeline
from sdonnx.__main__ import main
from sdonnx.cli import optimize
from sdonnx.cli.command_line import COMMANDS
from sdonnx.cli.generate import _option_names
from sdonnx.errors import OptionError


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert "expected" in error
    return error


def test_sample_command_writes_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--arch", "tiny", "-o", str(tmp_path / "tiny"), "--seed", "3"]) == 0
    assert (tmp_path / "tiny" / "model_index.json").is_file()
    capsys.readouterr()
    assert main(["sample", "--arch", "tiny", "-o", str(tmp_path / "tiny")]) == 2
    assert "--overwrite" in one_line_error(capsys)


def test_optimize_command_reports_the_counts(
    tiny_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-i", str(tiny_exported), "-o", str(tmp_path / "fast"), "--float16"]
    assert optimize_pipeline.main([*arguments, "--force_fp32_ops", "unet:MultiHeadAttention", "unet:mid_block.*"]) == 0
    shown = capsys.readouterr().out
    assert "MultiHeadAttention" in shown
    report = json.loads((tmp_path / "fast" / "sdonnx.json").read_text())
    unet = report["components"]["unet"]
    assert unet["operators_after"]["MultiHeadAttention"] == 8
    assert unet["float32"]["MultiHeadAttention"] == 8
    assert unet["float32"]["mid_block.*"] > 10
    assert unet["left"] == {}
    assert unet["inputs"]["sample"].startswith("float16")
    assert unet["inputs"]["timestep"].startswith("float[")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--provider", "tpu"], "cuda, cpu"),
        (["--provider", "cpu", "--float16"], "float32"),
        (["--float16", "--force_fp32_ops", "unet:Nonsense"], "MultiHeadAttention"),
        (["--float16", "--force_fp32_ops", "unett:Conv"], "vae_decoder"),
        (["--force_fp32_ops", "unet:Conv"], "--float16"),
        (["--attention_layout", "sideways"], "packed_qkv"),
    ],
)
def test_invalid_optimize_options_are_refused(
    extra: list[str], named: str, micro_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(micro_exported)
    assert optimize_pipeline.main(["-i", str(micro_exported), "-o", str(tmp_path / "out"), *extra]) == 2
    assert named in one_line_error(capsys)
    assert list(tmp_path.iterdir()) == []
    assert snapshot(micro_exported) == before


def test_generate_writes_png_with_parameters(micro_cpu: Path, tmp_path: Path) -> None:
    arguments = ["generate", "-m", str(micro_cpu), "-p", "a red fox", "-s", "2", "--height", "64", "--width", "72"]
    assert main([*arguments, "-o", str(tmp_path / "one.png"), "--seed", "7"]) == 0
    image: Any = Image.open(tmp_path / "one.png")
    assert image.size == (72, 64)
    parameters = json.loads(image.text["sdonnx"])
    assert parameters["prompt"] == "a red fox"
    assert parameters["seed"] == 7
    assert parameters["steps"] == 2
    assert np.asarray(image).std() > 1


@pytest.mark.parametrize("start", ["noise", "image", "mask"])
def test_each_of_several_images_can_be_repeated_alone(
    start: str, micro_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    picture.save(tmp_path / "photo.png")
    Image.fromarray(np.repeat(np.array([0, 255], np.uint8), 32)[:, None].repeat(64, 1)).save(tmp_path / "mask.png")
    given = {
        "noise": ["--scheduler", "euler_a"],
        "image": ["--image", str(tmp_path / "photo.png"), "--strength", "0.6"],
        "mask": ["--image", str(tmp_path / "photo.png"), "--mask_image", str(tmp_path / "mask.png")],
    }[start]
    usual = ["generate", "-m", str(micro_cpu), *given, "-s", "2", "--height", "64", "--width", "64"]
    assert main([*usual, "-p", "a fox", "an owl", "-n", "2", "--seed", "7", "-o", str(tmp_path / "x.png")]) == 0
    assert [line.rpartition("seed ")[2] for line in capsys.readouterr().out.splitlines()] == ["7", "8", "9", "10"]
    assert main([*usual, "-p", "an owl", "--seed", "9", "-o", str(tmp_path / "one.png")]) == 0
    with (
        Image.open(tmp_path / "x-3.png") as image,
        Image.open(tmp_path / "one.png") as again,
        Image.open(tmp_path / "x-4.png") as other,
    ):
        assert json.loads(image.info["sdonnx"])["seed"] == json.loads(again.info["sdonnx"])["seed"] == 9
        pixels = [np.asarray(each, np.int16) for each in (image, again, other)]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1
    assert np.abs(pixels[0] - pixels[2]).max() > 8


@pytest.mark.parametrize(
    ("provider", "providers", "noted"),
    [
        ("cuda", ["CPUExecutionProvider"], True),
        ("cuda", ["CUDAExecutionProvider", "CPUExecutionProvider"], False),
        ("cuda", None, False),  # ONNX Runtime is not installed: images are generated on another machine
        ("cpu", ["CPUExecutionProvider"], False),
    ],
)
def test_optimize_says_that_this_machine_cannot_run_the_folder(
    provider: str,
    providers: list[str] | None,
    noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import onnxruntime

    report = SimpleNamespace(components={}, automatic=None)
    monkeypatch.setattr(optimize, "_optimize", lambda _: report)
    monkeypatch.setattr(optimize, "fusion_table", lambda _: "")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    if providers is None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["optimize", "-i", "in", "-o", str(tmp_path), "--provider", provider]) == 0
    said = " ".join(capsys.readouterr().out.split())
    note = "note: made for cuda, and ONNX Runtime has no CUDA provider here"
    assert (note in said) == noted
    assert ("optimize again with --provider cpu" in said) == noted


def test_generate_with_memory_options(micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options set arguments of `from_pretrained` and call the pipeline's methods."""
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    seen: list[Any] = []
    call = OrtDiffusionPipeline.__call__

    def noted(self: OrtDiffusionPipeline, *args: Any, **options: Any) -> Any:
        splits = self._cache.splits
        seen.append((self._graphs._low_memory, splits.slicing, splits.tiling, splits.tile * self.vae_scale_factor))
        return call(self, *args, **options)

    monkeypatch.setattr(OrtDiffusionPipeline, "__call__", noted)
    usual = ["generate", "-m", str(micro_cpu), "-p", "fox", "-s", "1", "--height", "64", "--width", "64", "--seed", "1"]
    options = [
        [],
        ["--offload", "--vae-slicing", "--vae_tiling"],
        ["--cpu_offload", "--vae_tiling", "32", "--max_batch_size", "1", "--max_pixels", "4096"],
        ["--low_memory"],
    ]
    for index, given in enumerate(options):
        assert main([*usual, *given, "-o", str(tmp_path / f"{index}.png")]) == 0
    default = seen[0][3]
    assert seen == [
        (False, False, False, default),
        ("offload", True, True, default),
        ("offload", False, True, 32),
        (True, False, False, default),
    ]
    whole, offloaded = (np.asarray(Image.open(tmp_path / f"{index}.png")) for index in (0, 3))
    np.testing.assert_array_equal(whole, offloaded)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max_batch_size", "1", "-n", "2"], "a batch of 2 images; expected at most 1"),
        (["--max_pixels", "4095"], "images of 4096 pixels; expected at most 4095"),
        (["--max_batch_size", "0"], "--max_batch_size is 0; expected at least 1"),
        (["--vae_tiling", "20"], "--vae_tiling is 20; expected a multiple of"),
        (["--vae_tiling", "-8"], "--vae_tiling is -8"),
    ],
)
def test_generate_refuses_what_exceeds_its_limits(
    given: list[str], message: str, micro_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["generate", "-m", str(micro_cpu), "-p", "fox", "-s", "1", "--height", "64", "--width", "64"]
    assert main([*usual, *given, "-o", str(tmp_path / "x.png")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_generate_from_an_image(micro_cpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source.png", tmp_path / "out.png"
    Image.new("RGB", (64, 72), (90, 30, 160)).save(source)
    Image.new("L", (64, 72), 0).save(tmp_path / "mask.png")
    given = ["generate", "-m", str(micro_cpu), "-p", "fox", "-s", "4", "--seed", "1", "-o", str(out)]
    assert main([*given, "--image", str(source), "--strength", "0.5"]) == 0
    with Image.open(out) as generated:
        assert generated.size == (64, 72)
    sized = ["--height", "72", "--width", "64", "--overwrite"]
    assert main([*given, *sized, "--image", str(source), "--mask_image", str(tmp_path / "mask.png")]) == 0
    assert main([*given, "--overwrite", "--image", str(tmp_path / "nowhere.png")]) == 2
    assert "nowhere.png cannot be read" in capsys.readouterr().err


def test_generate_writes_a_batch(micro_cpu: Path, tmp_path: Path) -> None:
    arguments = ["generate", "-m", str(micro_cpu), "-p", "fox", "(owl)", "-s", "1", "--height", "64", "--width", "64"]
    arguments += ["--prompt-weighting", "a1111"]
    more = ["-n", "2", "-o", str(tmp_path / "some.png"), "--negative_prompt", "ugly", "--scheduler", "euler"]
    assert main([*arguments, *more]) == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"some-{index}.png" for index in (1, 2, 3, 4)]
    images: list[Any] = [Image.open(file) for file in files]
    parameters = [json.loads(image.text["sdonnx"]) for image in images]
    assert [each["prompt"] for each in parameters] == ["fox", "fox", "(owl)", "(owl)"]
    assert {each["prompt_weighting"] for each in parameters} == {"a1111"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-m", "/nowhere", "-o", "x.png"], "/nowhere"),
        (["-m", "{tiny}", "-o", "x.gif"], ".png"),
        (["-m", "{tiny}", "-o", "/nowhere/x.png"], "/nowhere"),
        (["-m", "{tiny}", "-o", "x.png", "--height", "65"], "multiple of 8"),
        (["-m", "{tiny}", "-o", "x.png", "--provider", "tpu"], "cuda, cpu"),
        (["-m", "{tiny}", "-o", "x.png", "--scheduler", "magic"], "magic"),
        (["-m", "{tiny}", "-o", "x.png", "-s", "0"], "--steps is 0; expected at least 1"),
        (["-m", "{tiny}", "-o", "x.png", "-g", "nan"], "--guidance_scale is nan"),
        (["-m", "{tiny}", "-o", "x.png", "-n", "0"], "--num_images is 0"),
        (["-m", "{tiny}", "-o", "x.png", "--prompt-weighting", "compel"], "prompt_weighting is 'compel'"),
        (["-m", "{tiny}", "-o", "x.png", "--quality", "90"], "--quality for PNG"),
        (["-m", "{tiny}", "-o", "x.jpg", "--quality", "101"], "--quality is 101; expected 1 to 100"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", "999,a"], "--timesteps is '999,a'; expected numbers"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", ""], "--timesteps is ''; expected numbers"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", "9,99"], "--timesteps is (9, 99); expected numbers that fall"),
        (["-m", "{tiny}", "-o", "x.png", "--sigmas", "3,nan"], "--sigmas is (3, nan); expected a list of numbers"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", "9", "-s", "1"], "--steps and --timesteps; expected one of"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", "9", "--sigmas", "1"], "--timesteps and --sigmas"),
        (["-m", "{tiny}", "-o", "x.png", "--timesteps", "9"], "--timesteps given, which PNDMScheduler does not accept"),
        (["-m", "{tiny}", "-o", "x.png", "--scheduler", "lcm", "--timesteps", "1000"], "--timesteps start at 1000"),
        (["-m", "{tiny}", "-o", "x.png", "--scheduler", "lcm", "--sigmas", "3,1"], "--sigmas given, which LCMSche"),
        (["-m", "{tiny}", "-o", "x.png", "--eta", "1.5"], "--eta is 1.5; expected a number from 0 to 1"),
        (["-m", "{tiny}", "-o", "x.png", "--eta", "nan"], "--eta is nan; expected a number from 0 to 1"),
        (["-m", "{tiny}", "-o", "-", "-n", "2"], "2 images for standard output"),
        (["-m", "{tiny}", "-o", "nowhere/new/"], "nowhere is not a folder"),
    ],
)
def test_generate_errors(
    arguments: list[str],
    named: str,
    micro_cpu: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [argument.format(tiny=micro_cpu) for argument in arguments]
    assert main(["generate", "-p", "fox", *given]) == 2
    assert named in one_line_error(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "arguments", "steps"),
    [
        (["--scheduler", "tcd", "--timesteps", "800", "--eta", "0.7"], {"timesteps": [800], "eta": 0.7}, 1),
        (["--scheduler", "tcd", "--timesteps", "999,499", "--eta", "1"], {"timesteps": [999, 499], "eta": 1}, 2),
        (["--scheduler", "euler", "--sigmas", "14.6,2.5,0"], {"sigmas": [14.6, 2.5, 0]}, 2),
        (["--scheduler", "ddim sgm_uniform", "-s", "3", "--eta", "0.5"], {"eta": 0.5, "num_inference_steps": 3}, 3),
    ],
)
def test_generate_with_a_custom_schedule(
    given: list[str], arguments: dict[str, Any], steps: int, micro_cpu: Path, tmp_path: Path
) -> None:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

    usual = ["-m", str(micro_cpu), "-p", "fox", "--height", "64", "--width", "64", "--seed", "1", "-g", "0"]
    assert main(["generate", *usual, *given, "-o", str(tmp_path / "x.png")]) == 0
    with Image.open(tmp_path / "x.png") as opened:
        written, parameters = np.asarray(opened), json.loads(opened.info["sdonnx"])
    assert parameters["steps"] == steps
    own = {name: value for name, value in arguments.items() if name != "num_inference_steps"}
    assert {name: parameters[name] for name in ("timesteps", "sigmas", "eta") if name in parameters} == own
    with OrtDiffusionPipeline.from_pretrained(micro_cpu) as pipeline:
        pipeline.scheduler = given[1]
        expected = pipeline("fox", 64, 64, seed=1, guidance_scale=0, **arguments).images[0]
    np.testing.assert_array_equal(written, np.asarray(expected))


def test_messages_name_the_options() -> None:
    found = "num_inference_steps is 0, not num_inference_steps_2"
    words = ("--steps is 0, not num_inference_steps_2", "--height is a --clip_skip", "a height of 8")
    with refused(OptionError, *words), _option_names():
        raise OptionError(found, "height is a clip_skip", "pass a height of 8")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="/nowhere"):
        main(["generate", "-m", "/nowhere", "-p", "fox", "-o", "x.png", "--debug"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sdonnx.__main__", "sdonnx"),
        ("sdonnx.optimize_pipeline", "sdonnx optimize"),
        ("sdonnx.export.__main__", "sdonnx export"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_modules_run_as_commands(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_python_m_runs_the_commands() -> None:
    command = [sys.executable, "-m", "sdonnx", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert COMMANDS.keys() <= set(shown.split())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_export_leaves_nothing(sent: signal.Signals, nano: Path, tmp_path: Path) -> None:
    before = snapshot(nano)
    command = python("-m", "sdonnx.export", "-m", str(nano), "-o", str(tmp_path / "out"))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as run:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob(".out.*.partial/text_encoder/model.onnx.data")):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(sent)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 128 + sent
    assert error.strip().splitlines()[-1].startswith("interrupted")
    assert list(tmp_path.iterdir()) == []
    assert snapshot(nano) == before
