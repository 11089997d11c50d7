"""Open the pipeline to export: a local folder, or a pipeline on the Hugging Face hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from sdonnx.errors import FolderError, SdonnxError
from sdonnx.export.weight_files import only_variant
from sdonnx.folder.folder_version import require_diffusers
from sdonnx.folder.pipeline_folder import PipelineFolder
from sdonnx.models.registry import family_of

__all__ = ["PICKLES", "download_files", "is_hub_id", "is_single_file", "open_source"]

PICKLES = (".ckpt", ".pt", ".pth", ".bin")
"""Suffixes of single-file checkpoints that are pickles."""

_SUFFIXES = (".safetensors", *PICKLES)

_LOGGER = logging.getLogger(__name__)

# Class of an exception of huggingface_hub, httpx or requests -> what it means. The first match in the chain counts.
_REASONS = {
    "OfflineModeIsEnabled": "it is not in the local cache, and HF_HUB_OFFLINE is set",
    "GatedRepoError": "access to it must be requested on its page, and this machine must log in: hf auth login",
    "RepositoryNotFoundError": "there is no such repository, or it is private",
    "RevisionNotFoundError": "the repository has no such revision",
    "LocalEntryNotFoundError": "it is not in the local cache, and HF_HUB_OFFLINE is set or the hub cannot be reached",
    "EntryNotFoundError": "the repository is not a pipeline in diffusers' layout",
    "ConnectError": "it is not in the local cache, and huggingface.co cannot be reached",
    "ConnectionError": "it is not in the local cache, and huggingface.co cannot be reached",
    "TimeoutException": "huggingface.co does not answer",
}


def is_hub_id(source: str | Path) -> bool:
    """Return whether a source is the id of a pipeline on the hub, such as "owner/name", and not a local path."""
    text = str(source)
    named = text.count("/") == 1 and not text.startswith((".", "/", "~")) and not text.endswith(_SUFFIXES)
    return named and not Path(source).exists()


def is_single_file(source: str | Path) -> bool:
    """Return whether a source is an existing file of weights, and not a folder or the id of a pipeline."""
    path = Path(source)
    return path.suffix in _SUFFIXES and path.is_file()


def open_source(source: str | Path, variant: str | None = None) -> PipelineFolder:
    """Open a diffusers pipeline, after downloading it if it is the id of one on the hub.

    Args:
        source: a local pipeline folder, or the id of a pipeline on the hub.
        variant: variant of the weights to download, such as "fp16". By default the weights without a variant or, where
            there are none, the only variant's.

    Raises:
        FolderError: there is no such pipeline, it is not a diffusers pipeline, or its class is not supported.
        WeightsError: the pipeline on the hub has several variants to choose from.
    """
    folder = PipelineFolder.open(_downloaded(str(source), variant) if is_hub_id(source) else Path(source))
    require_diffusers(folder.path)
    family_of(folder)
    return folder


def _downloaded(name: str, variant: str | None) -> Path:
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it announces on two lines that it will look into the cache
    try:
        if variant is None and (variant := only_variant(name, _files(name))) is not None:
            _LOGGER.info("downloading the variant %s of %s, which has no other weights", variant, name)
        folder = Path(DiffusionPipeline.download(name, use_safetensors=True, variant=variant))
        _LOGGER.info("%s is in %s", name, folder)
        return folder
    except SdonnxError:
        raise
    except Exception as error:  # the hub's client raises many kinds of exceptions
        raise FolderError(
            f"{name} is not a local folder and cannot be downloaded ({_reason(error)})",
            "a pipeline folder, or the id of a pipeline on the hub that this machine can reach",
            "check the name, the network and your access to the repository",
        ) from error
    finally:
        logging.set_verbosity(before)


def download_files(name: str, patterns: list[str], remedy: str, found: str | None = None) -> Path:
    """Download some files of a repository on the hub, unless they are in the cache; return their folder.

    Args:
        name: id of the repository.
        patterns: patterns of the files' paths.
        remedy: for the message, the next step if the files cannot be downloaded.
        found: for the message, the beginning of its first part.

    Raises:
        FolderError: the files are not in the cache, and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds of exceptions
        raise FolderError(
            f"{found or name} cannot be downloaded ({_reason(error)})",
            "a repository that this machine can reach",
            remedy,
        ) from error


def _files(name: str) -> list[str]:
    """Return the files of a repository on the hub; none if the hub cannot be reached, where only the cache counts."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name)
    except Exception:  # the hub's client raises many kinds; the download says why if the cache does not have it
        return []


def _reason(error: BaseException) -> str:
    chain = list(_chain(error))
    for each in chain:
        for kind in type(each).__mro__:
            if kind.__name__ in _REASONS:
                return _REASONS[kind.__name__]
    text = str(chain[0]).strip()
    return text.splitlines()[0] if text else type(chain[0]).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
