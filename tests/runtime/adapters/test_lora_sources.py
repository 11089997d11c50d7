"""Where `load_lora_weights` takes a LoRA from: files, folders, the hub, and tensors in memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file
from support.pipelines import refused
from support.plain_lora import lora_image, write_plain_lora

from sdonnx.errors import FolderError, OptionError, WeightsError
from sdonnx.runtime.pipeline import OrtDiffusionPipeline


@pytest.fixture
def pipeline(micro_cpu: Path) -> OrtDiffusionPipeline:
    return OrtDiffusionPipeline.from_pretrained(micro_cpu)


def _require_used(pipeline: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path) -> None:
    """Check that the image is that with the file of `write_plain_lora`."""
    other = OrtDiffusionPipeline.from_pretrained(micro_cpu)
    base = lora_image(other)
    other.load_lora_weights(write_plain_lora(micro_cpu, tmp_path / "expected.safetensors"))
    expected = lora_image(other)
    assert np.abs(expected - base).max() > 0.02
    assert np.array_equal(lora_image(pipeline), expected)


def test_folders(pipeline: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_plain_lora(micro_cpu, tmp_path / "a" / "b" / "other.safetensors")
    pipeline.load_lora_weights(str(tmp_path / "a"), subfolder="b", weight_name="other.safetensors")
    _require_used(pipeline, micro_cpu, tmp_path)
    with refused(WeightsError, "0 of the files"):
        pipeline.load_lora_weights(tmp_path / "a")


@pytest.mark.parametrize("kind", ["numpy", "torch", "half"])
def test_tensors(kind: str, pipeline: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = load_file(write_plain_lora(micro_cpu, tmp_path / "plain.safetensors"))
    if kind != "numpy":
        tensors = {name: torch.from_numpy(values) for name, values in tensors.items()}
    if kind == "half":  # bfloat16, which numpy lacks, and float16 round the values
        rounded = {name: values.to(torch.bfloat16) for name, values in tensors.items()}
        pipeline.load_lora_weights(rounded, adapter_name="a")
        save_file({name: each.float().numpy() for name, each in rounded.items()}, tmp_path / "a.safetensors")
        found = lora_image(pipeline)
        pipeline.delete_adapters("a")
        pipeline.load_lora_weights(tmp_path / "a.safetensors")
        assert np.array_equal(lora_image(pipeline), found)
        return
    pipeline.load_lora_weights(tensors)
    _require_used(pipeline, micro_cpu, tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (5, OptionError, ["type int", "an id of the hub"]),
        ({}, WeightsError, ["changes no weight"]),
        ({"a": 1}, OptionError, ["type int", "a tensor"]),
        ({"a": np.array(["b"])}, OptionError, ["a tensor"]),
        ({"unet.a.lora_A.weight": np.full((2, 2), np.inf)}, WeightsError, ["infinite"]),
        ("x" * 5000, WeightsError, ["xxx"]),
        ("./no/such/file.safetensors", WeightsError, ["does not exist"]),
    ],
)
def test_wrong_sources(source: Any, error: Any, words: list[str], pipeline: OrtDiffusionPipeline) -> None:
    with refused(error, *words):
        pipeline.load_lora_weights(source)
    assert pipeline.get_list_adapters() == {}


class _Hub:
    """Answers as the hub does, for one repository."""

    files = ("README.md", "style.safetensors", "deep/other.safetensors")

    def __init__(self, token: Any = None) -> None:
        self.token = token

    def list_repo_files(self, repo_id: str, revision: str | None) -> list[str]:
        return list(self.files)


@pytest.mark.parametrize(
    ("options", "name", "subfolder"),
    [
        ({}, "style.safetensors", None),
        ({"subfolder": "deep"}, "other.safetensors", "deep"),
        ({"weight_name": "named.safetensors"}, "named.safetensors", None),
        ({"local_files_only": True}, "pytorch_lora_weights.safetensors", None),
    ],
)
def test_files_on_the_hub(
    options: dict[str, Any], name: str, subfolder: str | None, pipeline: OrtDiffusionPipeline, micro_cpu: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[Any] = []
    made = write_plain_lora(micro_cpu, tmp_path / "cached.safetensors")

    def download(repo_id: str, file: str, **given: Any) -> str:
        asked.append((repo_id, file, given))
        return str(made)

    monkeypatch.setattr(huggingface_hub, "HfApi", _Hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    pipeline.load_lora_weights("someone/style", adapter_name="style", token="secret", revision="v2", **options)
    ((repo_id, file, given),) = asked
    assert (repo_id, file, given["subfolder"]) == ("someone/style", name, subfolder)
    assert (given["token"], given["revision"]) == ("secret", "v2")
    assert pipeline.get_active_adapters() == ["style"]
    _require_used(pipeline, micro_cpu, tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors"),
         ["4 .safetensors files: a.safetensors, b.safetensors, c.safetensors, ...", "weight_name"]),
        (("a.bin",), ["0 .safetensors files", "pass subfolder"]),
    ],
)  # fmt: skip
def test_unclear_repositories(
    files: tuple[str, ...], words: list[str], pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: SimpleNamespace(list_repo_files=lambda *_, **__: files))
    with refused(FolderError, "someone/style", *words):
        pipeline.load_lora_weights("someone/style")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("offline"), ["offline, and not in the cache", "a LoRA file"]),
        (errors.EntryNotFoundError("no file"), ["has no file a.safetensors"]),
        (ConnectionError("no route"), ["offline"]),
    ],
)
def test_answers_of_the_hub_are_one_line(
    error: Exception, words: list[str], pipeline: OrtDiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with refused(FolderError, "someone/style", *words):
        pipeline.load_lora_weights("someone/style", weight_name="a.safetensors")
    assert pipeline.get_list_adapters() == {}
