"""The certificate of an optimized folder: the result of `sdonnx verify` and the hashes of the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError
from sdonnx.folder.pipeline_folder import hash_file, read_json

__all__ = ["CERTIFICATE", "CERTIFICATE_PAGE", "FORMAT", "certified_files", "require_certificate"]

CERTIFICATE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"

FORMAT = 1
"""Format of the certificate. Certificates of another format are refused."""

_VERIFY = "run sdonnx verify FOLDER --against ORIGINAL"
_SHOWN = 3


def certified_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and the SHA-256 of every file in a folder by its relative path, with `/` separators.

    The certificate and its page are left out, as are hidden files at the top, such as a partial certificate or the
    files of a file browser.

    Raises:
        FolderError: a file cannot be read.
    """
    paths = sorted(_files(folder))
    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL
        hashes = list(threads.map(hash_file, paths))
    return {
        path.relative_to(folder).as_posix(): {"bytes": size, "sha256": digest}
        for path, (size, digest) in zip(paths, hashes, strict=True)
    }


def require_certificate(folder: Path) -> Mapping[str, Any]:
    """Return the certificate of a folder, after a check that it passed and that the files are unchanged.

    Every file is read, at the speed of the disk or of SHA-256 (about 1 GB/s per core).

    Raises:
        FolderError: there is no certificate, it did not pass, or a file was added, removed or changed since.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise FolderError(f"{folder} has no {CERTIFICATE}", "a folder that was verified", _VERIFY)
    certificate = read_json(path)
    number, files = certificate.get("format"), certificate.get("files")
    if number != FORMAT or not isinstance(files, dict):
        raise FolderError(f"{path} has the format {number!r}", f"format {FORMAT}", _VERIFY)
    if certificate.get("passed") is not True:
        reasons = certificate.get("failures")
        first = f" ({reasons[0]})" if isinstance(reasons, list) and reasons else ""
        raise FolderError(f"{path} says that the folder failed{first}", "a certificate that passed", _VERIFY)
    found = certified_files(folder)
    changes = [
        *(f"{name} is new" for name in found.keys() - files.keys()),
        *(f"{name} is missing" for name in files.keys() - found.keys()),
        *(f"{name} has changed" for name in found.keys() & files.keys() if found[name] != files[name]),
    ]
    if changes:
        shown = ", ".join(sorted(changes)[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise FolderError(f"{folder} has changed since it was verified: {shown}{more}", "the verified files", _VERIFY)
    return certificate


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        place = path.relative_to(folder).parts
        if path.is_file() and not place[0].startswith(".") and place not in ((CERTIFICATE,), (CERTIFICATE_PAGE,)):
            yield path
