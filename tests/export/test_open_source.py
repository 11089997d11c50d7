"""Pipelines of the Hugging Face hub: those that cannot be downloaded, and the variant that is."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipelines import refused

from sdonnx.errors import FolderError, WeightsError
from sdonnx.export.open_source import is_hub_id, open_source


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("owner/name")
    assert not any(is_hub_id(path) for path in ("name", "./owner/name", "a/b/c", "/owner/name", "~/name", tmp_path))
    assert not is_hub_id("folder/model.safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id("owner/name")


def test_hub_id_offline_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with refused(FolderError, "nobody/nothing", "not in the local cache, and HF_HUB_OFFLINE is set", "check the name"):
        open_source("nobody/nothing")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "no such repository"),
        ("ConnectError", "huggingface.co cannot be reached"),
        ("SomethingElse", "first line"),
    ],
)
def test_reasons_of_a_failed_download(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline

    def download(*_: object, **__: object) -> str:
        try:
            raise type(name, (Exception,), {})("of the client")
        except Exception as error:
            raise OSError("first line\nPlease check out the root cause in the stacktrace above.") from error

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    with refused(FolderError, words):
        open_source("nobody/nothing")


UNET, TEXT = "unet/diffusion_pytorch_model", "text_encoder/model"


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ([f"{UNET}.safetensors", f"{UNET}.fp16.safetensors", f"{TEXT}.safetensors"], None),
        ([f"{UNET}.fp16.safetensors", f"{TEXT}.fp16.safetensors", "all.safetensors", "model_index.json"], "fp16"),
        ([f"{UNET}.fp16.safetensors", f"{TEXT}.safetensors"], "fp16"),
        ([f"{UNET}.safetensors.index.fp16.json", f"{UNET}.fp16-00001-of-00002.safetensors"], "fp16"),
        ([f"{UNET}.safetensors.index.json", f"{UNET}-00001-of-00002.safetensors"], None),
        ([f"{UNET}.fp16.safetensors", f"{UNET}.bf16.safetensors", f"{TEXT}.fp16.safetensors"], "fp16"),
        ([f"{UNET}.bin", f"{TEXT}.bin"], None),
        ([], None),
    ],
)
def test_the_only_variant_of_a_repository_is_downloaded(
    files: list[str],
    chosen: str | None,
    micro: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = _hub(monkeypatch, files, micro)
    with caplog.at_level("INFO", logger="sdonnx"):
        assert open_source("owner/name").path == micro
        assert open_source("owner/name", "bf16").path == micro
    assert asked == [chosen, "bf16"]
    assert ("downloading the variant fp16 of owner/name" in caplog.text) == (chosen == "fp16")


def test_several_variants_of_a_repository_are_listed(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _hub(monkeypatch, [f"{UNET}.fp16.safetensors", f"{UNET}.bf16.safetensors"], micro)
    with refused(WeightsError, "owner/name has only the variants bf16, fp16", "--variant bf16"):
        open_source("owner/name")
    assert asked == []


def _hub(monkeypatch: pytest.MonkeyPatch, files: list[str], folder: Path) -> list[str | None]:
    """Replace the hub by a repository with these files; return the list of variants that are downloaded."""
    from diffusers import DiffusionPipeline
    from huggingface_hub import HfApi

    asked: list[str | None] = []

    def download(_: str, *, use_safetensors: bool, variant: str | None) -> str:
        assert use_safetensors
        asked.append(variant)
        return str(folder)

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: files)
    return asked
