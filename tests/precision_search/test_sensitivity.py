"""`--quantize auto`: the effect of each module, the largest set within a bound, and OneDiff's file of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skimage import metrics
from support.pipeline_cache import PipelineCache
from support.pipelines import copied, refused

from sdonnx.__main__ import main
from sdonnx.errors import OptionError, PrecisionError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.metrics import relative_error, structural_similarity
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.precision_search.record_inputs import run_probe
from sdonnx.precision_search.search_options import Bounds, ProbeSettings
from sdonnx.precision_search.sensitivity import Choice, _largest, choose_modules
from sdonnx.quantization.quantization_config import QuantizationConfig, read_submodules
from sdonnx.quantization.quantization_types import TYPES
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph

CPU = Device("cpu")
SETTINGS = ProbeSettings(("a red circle",), steps=2, size=64, calls=2)


def request(name: str = "fp8_e4m3_e4m3_dynamic", **options: Any) -> OptimizeRequest:
    return OptimizeRequest(**{"provider": "cpu", "quantization": QuantizationConfig(TYPES[name]), **options})


@pytest.fixture(scope="module")
def choice(micro_exported: Path) -> Choice:
    return choose_modules(micro_exported, request(), SETTINGS, Bounds(0.05))


def test_modules_are_sorted_by_their_effect(choice: Choice) -> None:
    errors = [each.error for each in choice.sensitivities]
    assert errors == sorted(errors)
    assert len(errors) == 40, "the products of the image"
    assert 0 < errors[0] < errors[-1] < 0.2
    assert all(0.9 < each.ssim <= 1 for each in choice.sensitivities)
    assert all(each.bytes_saved > 0 for each in choice.sensitivities)


def test_the_largest_set_within_the_bound_is_chosen(choice: Choice) -> None:
    assert choice.config.only is not None
    assert 0 < len(choice.config.only) < 40
    by_size = {trial.modules: trial for trial in choice.trials}
    assert by_size[len(choice.config.only)].error <= 0.05
    larger = [trial for trial in choice.trials if trial.modules > len(choice.config.only)]
    assert larger
    assert all(trial.error > 0.05 for trial in larger)
    first = tuple(module for each in choice.sensitivities for module in each.modules)[: len(choice.config.only)]
    assert choice.config.only == first


def test_trials_have_the_error_of_the_folder(
    choice: Choice, pipelines: PipelineCache, micro_exported: Path, micro_cpu: Path, tmp_path: Path
) -> None:
    """Weights that nodes of a trial round are those that the optimizer stores."""
    folder = pipelines.optimized(micro_exported, provider="cpu", quantization=choice.config)
    recorded = run_probe(copied(micro_cpu, tmp_path / "folder"), "cpu", SETTINGS)
    errors = []
    for feeds in recorded.feeds["unet"]:
        ours, wide = (Graph(each / "unet" / ONNX_MODEL, CPU).run(feeds)["out_sample"] for each in (folder, micro_cpu))
        errors.append(relative_error(ours, wide))
    trial = next(each for each in choice.trials if each.modules == len(choice.config.only or ()))
    assert max(errors) == pytest.approx(trial.error, rel=0.02)


@pytest.mark.parametrize("name", [pytest.param("int8_weightonly", marks=pytest.mark.weekly), "fp8_static"])
@pytest.mark.weekly
def test_other_types(name: str, nano_exported: Path) -> None:
    scales: Any = None
    if name == "fp8_static":
        from sdonnx.precision_search.calibrate import calibrate

        scales = calibrate(nano_exported, request(name, scales={}), SETTINGS)
    found = choose_modules(nano_exported, request(name, scales=scales), SETTINGS, Bounds(0.5))
    assert len(found.trials) == 1
    assert {module for each in found.sensitivities for module in each.modules} == set(found.config.only or ())


@pytest.mark.weekly
def test_named_modules_are_in_every_set(pipelines: PipelineCache, nano_exported: Path, tmp_path: Path) -> None:
    kind = TYPES["fp8_e5m2_weightonly"]
    config = QuantizationConfig(kind, (("unet:mid_block.*", None), ("unet:up_blocks.*", kind)))
    choice = choose_modules(nano_exported, request(quantization=config), SETTINGS, Bounds(0.5))
    assert {module for each in choice.sensitivities for module in each.modules} == {
        f"down_blocks.0.resnets.0.conv{number}" for number in (1, 2)
    }
    folder = pipelines.optimized(nano_exported, provider="cpu", quantization=choice.config)
    plain = pipelines.optimized(nano_exported, provider="cpu")
    recorded = run_probe(copied(plain, tmp_path / "folder"), "cpu", SETTINGS)
    errors = []
    for feeds in recorded.feeds["unet"]:
        ours, wide = (Graph(each / "unet" / ONNX_MODEL, CPU).run(feeds)["out_sample"] for each in (folder, plain))
        errors.append(relative_error(ours, wide))
    (trial,) = choice.trials
    assert max(errors) == pytest.approx(trial.error, rel=0.02)
    named = replace(config, modules=(("unet:*", kind),))
    with refused(OptionError, "no module of unet to choose from", "does not name"):
        choose_modules(nano_exported, request(quantization=named), SETTINGS, Bounds(0.5))


@pytest.mark.weekly
def test_a_bound_that_excludes_all_is_refused(nano_exported: Path) -> None:
    with refused(PrecisionError, "with its least sensitive modules quantized", "raise --max_error"):
        choose_modules(nano_exported, request(), SETTINGS, Bounds(1e-7))


@pytest.mark.weekly
def test_the_command_writes_a_file_that_is_read_again(
    nano_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, listed = tmp_path / "out", tmp_path / "modules.json"
    options = ["optimize", "-i", str(nano_exported), "--provider", "cpu", "--calibration_size", "64"]
    options += ["--quantize", "auto", "--max_error", "0.02", "--sensitivity", str(listed), "-o", str(out)]
    options += ["--quantize_config", '{"quant_type": "int8_weightonly"}']
    assert main(options) == 0
    assert "chosen" in capsys.readouterr().out
    content = json.loads(listed.read_text())
    assert all(entry.keys() == {"ssim", "error"} for entry in content.values())
    report = json.loads((out / "sdonnx.json").read_text())
    (quantized,) = report["components"]["unet"]["quantized"].values()
    assert set(quantized["modules"]) == set(report["options"]["quantize"]["submodules"])
    similar = read_submodules(listed, 100)
    assert set(similar) == set(content)
    assert [content[name]["ssim"] for name in similar] == sorted(
        (each["ssim"] for each in content.values()), reverse=True
    )


def test_auto_excludes_a_file_of_modules(
    nano_exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "ssim.json"
    listed.write_text('{"a": {"ssim": 1}, "b": {"ssim": 1}}')
    options = ["--quantize", "auto", "--quant_submodules_config_path", str(listed)]
    assert main(["optimize", "-i", str(nano_exported), "-o", str(tmp_path / "out"), *options]) == 2
    assert "both choose the modules" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("limit", range(12))
def test_search_of_the_largest_number(limit: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert _largest(10, fits) == min(limit, 10)
    assert len(asked) == len(set(asked)) <= 5
    assert _largest(0, fits) == 0


@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x + 0.1, lambda x: -x, np.flip], ids=["same", "+", "-", "turned"]
)
def test_structural_similarity_is_that_of_scikit_image(change: Callable[[Any], Any]) -> None:
    reference = np.random.default_rng(0).standard_normal((2, 4, 9, 13)).astype(np.float32)
    image = np.ascontiguousarray(change(reference) + 0.2 * np.random.default_rng(1).standard_normal(reference.shape))
    span = float(reference.max() - reference.min())
    similarity: Any = metrics.structural_similarity
    expected = [
        similarity(a.astype(np.float64), b.astype(np.float64), data_range=span)
        for a, b in zip(image.reshape(8, 9, 13), reference.reshape(8, 9, 13), strict=True)
    ]
    # scikit-image leaves out the same border.
    assert structural_similarity(image, reference) == pytest.approx(np.mean(expected), abs=2e-3)
    assert structural_similarity(reference, reference) == 1


def test_similarity_of_other_shapes() -> None:
    assert structural_similarity(np.zeros((2, 4)), np.ones((2, 4))) == 1
    assert structural_similarity(np.zeros((1, 4, 6, 8)), np.ones((1, 4, 6, 8))) == 1
    with pytest.raises(OptionError):
        QuantizationConfig.from_flags("auto")
