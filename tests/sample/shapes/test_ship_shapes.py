"""Weights of the trained samples: reading them, and the checks of lab/ship_shapes.py before they ship."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipelines import refused
from support.scripts import load_script

from sdonnx.errors import FolderError, OptionError, SdonnxError, WeightsError
from sdonnx.sample import write_sample as sample
from sdonnx.sample.sample_weights import read_weights, seeded_weights
from sdonnx.sample.shapes.shape_architectures import SHIPPED, TRAINED
from sdonnx.sample.shapes.shape_judge import wilson_interval
from sdonnx.sample.write_sample import build_network, write_sample

SCRIPT = load_script("ship_shapes")
NAMES = tuple(TRAINED)
WEIGHT_FILE = "diffusion_pytorch_model.safetensors"


def counted(right: int, count: int) -> dict[str, Any]:
    low, high = wilson_interval(right, count)
    return {"right": right, "count": count, "share": right / count, "low": low, "high": high}


def result(name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    accuracy = {
        "colour": counted(1980, 2000), "shape": counted(1940, 2000), "relation": counted(1700, 1800),
        "right": counted(1800, 2000),
    } | changes  # fmt: skip
    return {"command": ["train_shapes.py"], "pipelines": {name: {"accuracy": accuracy}}, "curve": [{"part": "vae"}]}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as the training writes them, with random weights and accurate results. Do not write to them."""
    root = tmp_path_factory.mktemp("trained")
    for name, architecture in TRAINED.items():
        folder = root / name / name
        folder.mkdir(parents=True)
        (folder / "model_index.json").write_text(json.dumps({"_class_name": architecture.pipeline}))
        for component, spec in architecture.networks.items():
            (folder / component).mkdir()
            weights = seeded_weights(component, build_network(spec), 0)
            halves = {key: value.half() for key, value in weights.items()}
            save_file(halves, folder / component / spec.weight_file)
        (root / name / "result.json").write_text(json.dumps(result(name), indent=1))
    return {name: root / name / name for name in TRAINED}


@pytest.fixture
def folders(trained: dict[str, Path], tmp_path: Path) -> list[Path]:
    """The same folders, which a test may change."""
    root = shutil.copytree(trained[NAMES[0]].parents[1], tmp_path / "trained")
    return [root / name / name for name in NAMES]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces the package's own weights."""
    weights = tmp_path / "weights"
    moved = {
        name: replace(
            architecture,
            weights={
                part: weights / (f"{part}.safetensors" if part == "vae" else f"{name}/{part}.safetensors")
                for part in architecture.networks
            },
        )
        for name, architecture in TRAINED.items()
    }
    monkeypatch.setattr(SCRIPT, "TRAINED", moved)
    monkeypatch.setattr(sample, "ARCHITECTURES", moved)
    return weights


def test_weights_and_records_are_written(folders: list[Path], package: Path, tmp_path: Path) -> None:
    accuracy = SCRIPT.ship(folders, [], tmp_path / "record.json")
    assert accuracy["shapes"]["relation"] == counted(1700, 1800)
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.safetensors"))
    assert files == [
        "shapes-dit/text_encoder.safetensors", "shapes-dit/transformer.safetensors",
        "shapes/text_encoder.safetensors", "shapes/unet.safetensors", "vae.safetensors",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in package.rglob("*.safetensors")) < 24e6
    assert lines(tmp_path / "record.json") == [result(name) for name in NAMES]


def test_a_sample_has_the_weights_that_ship(folders: list[Path], package: Path, tmp_path: Path) -> None:
    SCRIPT.ship(folders, [], tmp_path / "record.json")
    write_sample("shapes-dit", tmp_path / "sample")
    file = WEIGHT_FILE
    for component in ("transformer", "vae"):
        shipped = load_file(folders[1] / component / file)
        written = load_file(tmp_path / "sample" / component / file)
        assert written.keys() == shipped.keys()
        assert all(value.dtype == torch.float32 and value.equal(shipped[key].float()) for key, value in written.items())
    assert (package / "vae.safetensors").is_file()
    with refused(OptionError, "whose weights are trained"):
        write_sample("shapes-dit", tmp_path / "other", seed=1)
    (package / "vae.safetensors").unlink()
    with refused(WeightsError, "vae.safetensors cannot be read"):
        write_sample("shapes-dit", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def change_tensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[list[Path]], None]:
    def apply(folders: list[Path]) -> None:
        path = folders[1] / "vae" / WEIGHT_FILE
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    return apply


def change_result(**changes: Any) -> Callable[[list[Path]], None]:
    def apply(folders: list[Path]) -> None:
        path = folders[1].parent / "result.json"
        path.write_text(json.dumps(result("shapes-dit", **changes)))

    return apply


def set_infinite(weights: dict[str, torch.Tensor]) -> None:
    weights["decoder.conv_in.weight"].view(-1)[3] = torch.inf


def without_autoencoder(folders: list[Path]) -> None:
    for name, folder in zip(NAMES, folders, strict=True):
        (folder.parent / "result.json").write_text(json.dumps(result(name) | {"curve": []}))


BAD: dict[str, tuple[Callable[[list[Path]], object], type[SdonnxError], str]] = {
    "another class": (
        lambda folders: (folders[0] / "model_index.json").write_text('{"_class_name": "FluxPipeline"}'),
        OptionError, "folders of FluxPipeline, PixArtAlphaPipeline; expected at most one of each of Stable",
    ),
    "two of a class": (lambda folders: folders.append(folders[0]), OptionError, "one of each of"),
    "float32": (change_tensor(lambda w: w.update({k: v.float() for k, v in w.items()})), WeightsError, "float32"),
    "infinity": (change_tensor(set_infinite), WeightsError, "NaN or infinity"),
    "a tensor is missing": (change_tensor(lambda w: w.popitem()), WeightsError, "other tensors than Auto"),
    "a tensor is new": (change_tensor(lambda w: w.update(x=torch.ones(1).half())), WeightsError, "such as x"),
    "another autoencoder": (
        change_tensor(lambda w: w["decoder.conv_in.weight"].mul_(2)), WeightsError, "one autoencoder"
    ),
    "damaged": (
        lambda folders: (folders[0] / "vae" / WEIGHT_FILE).write_bytes(b"no"), WeightsError, "be read"
    ),
    "no result": (lambda folders: (folders[1].parent / "result.json").unlink(), FolderError, "has no result.json"),
    "not accurate": (change_result(relation=counted(1619, 1800)), WeightsError, "relation of shapes-dit: 89.94%"),
    "few captions": (
        change_result(right=counted(200, 240)), WeightsError, "evaluated on 240 captions; expected at least 2000"
    ),
    "other numbers": (
        change_result(shape=counted(1940, 2000) | {"share": 0.98}), FolderError, "are not those of 1940 of 2000"
    ),
    "no autoencoder": (without_autoencoder, FolderError, "without the training of the autoencoder"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_other_weights_and_results_do_not_ship(
    name: str, folders: list[Path], package: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, error, words = BAD[name]
    change(folders)
    monkeypatch.setattr(SCRIPT, "RECORD", tmp_path / "record.json")
    with refused(error, words):
        SCRIPT.ship(folders, [], tmp_path / "record.json")
    assert SCRIPT.main([str(folder) for folder in folders]) == 2
    assert words in capsys.readouterr().err
    assert not package.exists()
    assert not (tmp_path / "record.json").exists()


def test_large_weights_do_not_ship(folders: list[Path], package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, words in (("MAX_BYTES", "shapes has 116"), ("MAX_TOTAL_BYTES", "the weights have 217")):
        with monkeypatch.context() as changed:
            changed.setattr(SCRIPT, limit, 11_000_000)
            with refused(WeightsError, words):
                SCRIPT.ship(folders, [])
    assert not package.exists()


def test_a_second_pipeline_needs_the_autoencoder_and_the_record_of_the_first(
    folders: list[Path], package: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    SCRIPT.ship(folders[:1], [], record)
    before = {path: path.read_bytes() for path in (record, *package.rglob("*.safetensors"))}
    change_tensor(lambda weights: weights["decoder.conv_in.weight"].mul_(2))(folders)
    with refused(WeightsError, "vae of shapes-dit has other weights than that of another pipeline"):
        SCRIPT.ship(folders[1:], [], record)
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(package.rglob("*.safetensors"))) == 3
    change_tensor(lambda weights: weights["decoder.conv_in.weight"].div_(2))(folders)
    record.unlink()
    with refused(FolderError, "record.json cannot be read", "the training of shapes, which ships already"):
        SCRIPT.ship(folders[1:], [], record)
    record.write_text("3\n")
    with refused(FolderError, "record.json cannot be read"):
        SCRIPT.ship(folders[1:], [], record)
    assert len(list(package.rglob("*.safetensors"))) == 3


def test_the_pipelines_that_are_offered_are_those_with_weights_and_a_record() -> None:
    complete = [name for name, each in TRAINED.items() if all(path.is_file() for path in each.weights.values())]
    assert list(SHIPPED) == complete
    accuracy = SCRIPT.check_results(lines(SCRIPT.RECORD), SHIPPED)
    assert list(accuracy) == list(SHIPPED)
    shipped = SCRIPT.join_pipelines(SCRIPT.shipped_pipelines(()))
    folder = TRAINED["shapes"].weights["vae"].parent
    stored = {path for path in folder.rglob("*") if path.is_file()}
    assert stored == shipped.keys()


def test_missing_weights_are_named(tmp_path: Path) -> None:
    network = build_network(TRAINED["shapes"].networks["vae"])
    with refused(WeightsError, "none.safetensors cannot be read"):
        read_weights(tmp_path / "none.safetensors", network)
