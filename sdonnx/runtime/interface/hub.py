"""Optimized folders and LoRA files on the Hugging Face hub: download one, upload a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OutputError, SdonnxError
from sdonnx.folder.pipeline_folder import REPORT

__all__ = ["download", "download_lora", "is_hub_id", "upload"]

_WEIGHTS = ".safetensors"
_LORA = "pytorch_lora_weights.safetensors"  # the name that diffusers writes
_SHOWN = 3

# NAMESPACE/NAME; the hub allows these characters, up to 96 of them.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(folder: Path | str) -> bool:
    """Return whether text is an id of the hub, such as "someone/sd15-cuda", and not a path into an existing folder."""
    if not isinstance(folder, str) or _HUB_ID.fullmatch(folder) is None:
        return False
    return not os.path.isdir(os.path.dirname(folder))


def download(repo_id: str, options: Mapping[str, Any]) -> Path:
    """Return the folder of a repository in the hub's cache, downloaded if necessary.

    Args:
        repo_id: id of the repository, NAMESPACE/NAME.
        options: `token`, `revision`, `local_files_only`, `cache_dir` and `force_download`, as in `snapshot_download`
            of huggingface_hub.

    Raises:
        FolderError: the repository cannot be reached or read, or holds no optimized folder.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _one_line(repo_id):
        try:
            # A small file first: an original pipeline has many GB, which would be downloaded for nothing.
            hf_hub_download(repo_id, REPORT, **options)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise FolderError(
                f"{repo_id} on the hub has no {REPORT}",
                "a repository with an optimized folder",
                f"export the pipeline and optimize it (sdonnx export -m {repo_id} -o EXPORTED), then pass that folder",
            ) from None
        return Path(snapshot_download(repo_id, **options))


def download_lora(repo_id: str, name: str | None, subfolder: str | None, options: Mapping[str, Any]) -> Path:
    """Return a LoRA file of a repository in the hub's cache, downloaded if necessary.

    Args:
        repo_id: id of the repository, NAMESPACE/NAME.
        name: name of the file; None for the only safetensors file of the folder, or that which diffusers writes.
        subfolder: folder in the repository; None for its root.
        options: see `download`.

    Raises:
        FolderError: the repository cannot be reached or read, or it is not clear which file is meant.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _one_line(repo_id, "a LoRA file, or the id of a repository that contains one"):
        if name is None and not options.get("local_files_only"):
            listed = HfApi(token=options.get("token")).list_repo_files(repo_id, revision=options.get("revision"))
            start = f"{subfolder}/" if subfolder else ""
            inside = [file.removeprefix(start) for file in listed if file.startswith(start)]
            found = [file for file in inside if "/" not in file and file.endswith(_WEIGHTS)]
            if _LORA not in found and len(found) != 1:
                shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
                raise FolderError(
                    f"{repo_id} on the hub has {len(found)} {_WEIGHTS} files" + (f": {shown}" if found else ""),
                    "one of them",
                    "pass its name as weight_name" if found else "pass subfolder, or another repository",
                )
            name = _LORA if _LORA in found else found[0]
        try:
            return Path(hf_hub_download(repo_id, name or _LORA, subfolder=subfolder, **options))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            raise FolderError(
                f"{repo_id} on the hub has no file {name or _LORA}", "a file of the repository", "check weight_name"
            ) from None


@contextmanager
def _one_line(
    repo_id: str, expected: str = "an optimized folder, or the id of a repository that contains one"
) -> Iterator[None]:
    """Convert errors of huggingface_hub in the block to one line.

    Args:
        repo_id: id of the repository.
        expected: what it should be, for the message.

    Raises:
        FolderError: an error of huggingface_hub, or of the connection, was raised.
    """
    try:
        yield
    except SdonnxError:
        raise
    except (OSError, ValueError) as error:  # the classes of huggingface_hub.errors, and of its HTTP library
        reason, remedy = _reason_of(error)
        raise FolderError(
            f"{repo_id} is no folder here, and the hub's repository of that name cannot be read ({reason})",
            expected,
            remedy,
        ) from error


def _reason_of(error: Exception) -> tuple[str, str]:
    """Return what is wrong with the hub or a repository, and what to do."""
    from huggingface_hub import errors

    token = "pass token=..., or log in with `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return "access to it must be granted", f"ask for access on its page, then {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision", "pass another revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is none, or it is private", f"check the id, or {token}"
    if isinstance(error, errors.HFValidationError):
        return "the id is not valid", "pass NAMESPACE/NAME"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)):
        return (
            "offline, and not in the cache",
            "check the path; or connect to the network, without local_files_only and HF_HUB_OFFLINE",
        )
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}", "try again later, or download the repository and pass its folder"


def upload(
    folder: Path,
    replaced: Mapping[str, bytes],
    left_out: frozenset[str],
    repo_id: str,
    *,
    token: str | bool | None,
    private: bool | None,
    commit_message: str,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Upload a folder in one commit, and return the commit's address.

    Args:
        folder: the folder.
        replaced: content of files that differ from `folder`, by path with `/`.
        left_out: files that are not uploaded.
        repo_id: id of the repository, which is created if it does not exist.
        token: token of the hub; None for the one that `hf auth login` stored.
        private: whether a new repository is private; None for the default of the account.
        commit_message: message of the commit.
        revision: branch; None for the default one.
        create_pr: whether to open a pull request instead of a commit to the branch.

    Raises:
        OutputError: the hub does not accept the upload.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=replaced.get(name, path))
        for name, path in _files(folder)
        if name not in left_out
    ]
    try:
        api = HfApi(token=token)
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.create_commit(
            repository, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise OutputError(
            f"uploading to {repo_id} failed ({type(error).__name__}: {text[:200]})",
            "a connection to the hub and a token with write access",
            "pass token=..., or log in with `hf auth login`; or upload the folder of save_pretrained",
        ) from error
    return str(commit.commit_url)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder with their relative paths; hidden files at the top are left out."""
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_file() and not place.parts[0].startswith("."):
            yield place.as_posix(), path
