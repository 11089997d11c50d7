"""What an optimized folder was made by and for, and what to say to whom opens it with something else.

`format` in `sdonnx.json` is raised when a folder of before cannot be drawn with any more; the rules are in
docs/decisions.md.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sdonnx
from sdonnx.errors import FolderError, ProviderError
from sdonnx.folder import REPORT, read_json

__all__ = ["FORMAT", "RebuildWarning", "command_for", "notices", "read_report", "require_provider"]

FORMAT = 1

# Folders of before had no number; they hold the same graphs.
_UNNUMBERED = 0

# The first generation of GPUs on which attention is fastest unpacked (docs/decisions.md, measured on an H200).
_UNPACKED_FROM = (9, 0)

_WORD = re.compile(r"[\w.:*,/=-]+")


class RebuildWarning(UserWarning):
    """A folder opens and draws, and another command would have made a better one for this version or this GPU."""


def read_report(folder: Path) -> dict[str, Any]:
    """Return what `sdonnx.json` says of an optimized folder.

    Raises:
        FolderError: it is missing or broken, or the folder has a format that this version does not know.
    """
    if not (folder / REPORT).is_file():
        raise FolderError(
            f"{folder} has no {REPORT}", "an optimized pipeline", "run python -m sdonnx.optimize_pipeline on it"
        )
    report = read_json(folder / REPORT)
    found = report.get("format", _UNNUMBERED)
    if isinstance(found, bool) or not isinstance(found, int) or not _UNNUMBERED <= found <= FORMAT:
        raise FolderError(
            f"{folder} has format {found!r} of sdonnx {report.get('sdonnx')}",
            f"one up to {FORMAT}, which sdonnx {sdonnx.__version__} reads",
            f"install the newer sdonnx, or rebuild it: {command_for(report)}",
        )
    return report


def require_provider(folder: Path, report: Mapping[str, Any], provider: str) -> None:
    """Raise unless the folder was made for a provider.

    Raises:
        ProviderError: it was made for another.
    """
    if (made_for := report.get("provider")) != provider:
        raise ProviderError(
            f"{folder} was optimized for {made_for}",
            f"a folder for {provider}",
            f"rebuild it: {command_for(report, provider=provider)}",
        )


def notices(report: Mapping[str, Any], capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield a line for each thing that another command would do better.

    Args:
        report: what `read_report` gave.
        capability: the compute capability of the GPU, major and minor; None for the CPU.
    """
    if (version := report.get("sdonnx")) != sdonnx.__version__:
        yield (
            f"written by sdonnx {version}, and this is {sdonnx.__version__}: it draws as it did; to have what is new, "
            f"rebuild it: {command_for(report)}"
        )
    layout = report.get("attention_layout")
    if capability is not None and isinstance(layout, str):
        best = "unpacked" if capability >= _UNPACKED_FROM else "packed_qkv"
        if (layout == "unpacked") != (best == "unpacked"):
            yield (
                f"made with the attention layout {layout}, and this GPU is sm_{capability[0]}{capability[1]}: it draws "
                f"the same images; to try what is faster there, rebuild it: {command_for(report, layout=best)}"
            )


def command_for(report: Mapping[str, Any], provider: str | None = None, layout: str | None = None) -> str:
    """Return the command that makes the folder again, with the options that it was made with.

    Args:
        report: the content of `sdonnx.json`, whoever wrote it: what is no option is left out.
        provider: another provider; None for the folder's.
        layout: another attention layout.
    """
    chosen = _word(provider or report.get("provider"))
    words = ["python", "-m", "sdonnx.optimize_pipeline", "-i", "EXPORTED", "-o", "OUT"]
    options = report.get("options")
    options = options if isinstance(options, Mapping) else {}
    if chosen != "cpu" and report.get("precision") == "float16":
        words.append("--float16")
        kept = [word for word in map(_word, _listed(options.get("force_fp32_ops"))) if word]
        words += ["--force_fp32_ops", *kept] if kept else []
        words += ["--bfloat16"] if options.get("bfloat16") is True else []
    if chosen:
        words += ["--provider", chosen]
    if chosen != "cpu" and (reads := _word(layout or report.get("attention_layout"))) not in ("", "unpacked"):
        words += ["--attention_layout", reads]
    words += [f"--disable_{word}" for word in map(_word, _listed(report.get("disabled"))) if word]
    return shlex.join(words)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _word(value: object) -> str:
    """Return a word that can stand in a command, "" for anything else that a file may say."""
    return value if isinstance(value, str) and len(value) < 200 and _WORD.fullmatch(value) else ""
