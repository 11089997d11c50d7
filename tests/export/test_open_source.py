"""Pipelines of the Hugging Face hub that cannot be downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipelines import refused

from sdonnx.errors import FolderError
from sdonnx.export.open_source import is_hub_id, open_source


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("owner/name")
    assert not any(is_hub_id(path) for path in ("name", "./owner/name", "a/b/c", "/owner/name", "~/name", tmp_path))
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
