"""How this installation gets the packages that a command or a public name needs.

The project is not on a package index, so a hint never says `pip install sdonnx`: it names the folder, the file or the
repository that the project was installed from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sdonnx._version import __version__
from sdonnx.errors import PackageError

__all__ = [
    "EXTRAS",
    "cpu_or_cuda",
    "install_command",
    "installed_version",
    "is_importable",
    "kernels_command",
    "requiring",
]

EXTRAS = {
    "benchmark": ("export", "benchmark"),
    "compiler": ("export",),
    "completion": ("completion",),
    "explain": ("optimize",),
    "export": ("export",),
    "lora": ("export",),
    "optimize": ("optimize",),
    "quickstart": ("export", "benchmark"),
    "ray": ("ray",),
    "sample": ("export",),
    "serve": ("serve",),
    "verify": ("export", "benchmark"),
}
"""Extras of setup.cfg that a command, package or module of that name needs. Others need only ONNX Runtime."""


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation.

    The project is installed again from where it came from: the source tree that contains the package, or the place
    that pip recorded in `direct_url.json` (https://packaging.python.org/en/latest/specifications/direct-url/).

    Args:
        extras: names of extras in setup.cfg.
    """
    wanted = f"[{','.join(extras)}]"
    source = _source_tree()
    url, editable, archive, vcs = _direct_url()
    if source is None and not archive and not vcs and url.startswith("file:") and _path(url).is_dir():
        source = _path(url)
    if source is not None:
        editable = editable and _path(url).resolve() == source
        pins = source / "requirements.txt"
        constraints = f"-c {shlex.quote(str(pins))} " if pins.is_file() else ""
        return f"pip install {constraints}{'-e ' if editable else ''}{shlex.quote(f'{source}{wanted}')}"
    if archive and url.startswith("file:") and _path(url).is_file():
        return f"pip install {shlex.quote(f'{_path(url)}{wanted}')}"
    if url and not url.startswith("file:"):
        return f"pip install {shlex.quote(f'sdonnx{wanted} @ {vcs}{url}')}"
    return f"run pip install '.{wanted}' in sdonnx's source folder"


def cpu_or_cuda() -> str:
    """Return the command that installs ONNX Runtime, with the choice between its two builds."""
    return f"{install_command('cuda')}, or [cpu] in place of [cuda] without an NVIDIA GPU"


def kernels_command() -> str:
    """Return what adds our own kernels to this installation: the extra `cuda`, or the wheel next to sdonnx's wheel."""
    url, _, archive, _ = _direct_url()
    if _source_tree() is None and archive and url.endswith(".whl"):
        # A wheel for others names no folder of the machine that built it, see setup.py.
        return f"pip install the wheel of sdonnx-kernels {__version__}"
    return install_command("cuda")


def is_importable(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def installed_version(distribution: str) -> str | None:
    """Return the version of a package by its name for pip, or None if it is not installed."""
    from importlib import metadata  # takes 0.03 s

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _source_tree() -> Path | None:
    """Return the source tree that contains the imported package, or None if it was copied to a site folder."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "setup.cfg").is_file() and (root / "requirements.txt").is_file() else None


def _direct_url() -> tuple[str, bool, bool, str]:
    """Return pip's record of the installation: URL, editable, archive, and prefix of a version control system."""
    from importlib import metadata  # takes 0.03 s, and only messages need it

    try:
        record = json.loads(metadata.distribution("sdonnx").read_text("direct_url.json") or "{}")
        kind, vcs = record.get("dir_info", {}), record.get("vcs_info", {})
        url = str(record.get("url", ""))
        if vcs:
            revision = vcs.get("requested_revision") or vcs.get("commit_id")
            url += f"@{revision}" if revision else ""
        return url, kind.get("editable") is True, "archive_info" in record, f"{vcs['vcs']}+" if vcs else ""
    except (metadata.PackageNotFoundError, OSError, ValueError, AttributeError, KeyError, TypeError):
        return "", False, False, ""


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


@contextlib.contextmanager
def requiring(subject: str, unit: str) -> Iterator[None]:
    """Turn a missing package of another project into a PackageError.

    Args:
        subject: the command or public name that needs it, such as "sdonnx export".
        unit: the command, or the package of this project, that is imported in the block: a key of `EXTRAS`.

    Raises:
        PackageError: a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "sdonnx") or package in sys.stdlib_module_names:
            raise
        extras = EXTRAS.get(unit, ())
        raise PackageError(
            f"{subject} needs the package {package}, which is not installed",
            f"the extra{'s' if len(extras) > 1 else ''} {' and '.join(extras) or 'cpu or cuda'}",
            install_command(*extras) if extras and package != "onnxruntime" else cpu_or_cuda(),
        ) from error
