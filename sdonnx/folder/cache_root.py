"""The user's cache: its folder, and its limit in bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from sdonnx.errors import OptionError

__all__ = ["CACHE", "CACHE_LIMIT", "DEFAULT_LIMIT", "cache_folder", "cache_limit", "parse_size", "shown_size"]

CACHE = "SDONNX_CACHE"
"""The environment variable for the folder of the cache."""

CACHE_LIMIT = "SDONNX_CACHE_LIMIT"
"""The environment variable for the bytes that compiled graphs may take, such as 20GB; 0 turns their cache off."""

DEFAULT_LIMIT = "50GB"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache folder: $SDONNX_CACHE, or `sdonnx` in $XDG_CACHE_HOME or in ~/.cache.

    `~` at the start of $SDONNX_CACHE is the home folder, also where no shell has replaced it.

    Raises:
        RuntimeError: The user has no home folder.
    """
    if environment.get(CACHE):
        return Path(environment[CACHE]).expanduser()
    base = environment.get("XDG_CACHE_HOME") or ""
    # The XDG base directory specification: a relative path must be ignored.
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "sdonnx"


def cache_limit(environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes that compiled graphs may take: $SDONNX_CACHE_LIMIT, or 50 GB.

    Raises:
        OptionError: The variable is no size.
    """
    return parse_size(environment.get(CACHE_LIMIT) or DEFAULT_LIMIT, CACHE_LIMIT)


def parse_size(text: str, name: str) -> int:
    """Return a number of bytes, from text such as "20GB" (powers of 1000), "20GiB" (powers of 1024) or "1000000".

    Args:
        text: The text.
        name: Name of the option or the variable, for the error.

    Raises:
        OptionError: The text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{name} is {text!r}", "a size such as 20GB, 512MB or 0")
    number, unit, binary = match[1], match[2] or "", match[3]
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])


def shown_size(size_bytes: int) -> str:
    """Return a size with its unit, in powers of 1000: "1.7 GB"."""
    power = next(each for each in (4, 3, 2, 1, 0) if size_bytes >= 1000**each or each == 0)
    unit = next(name for name, each in _POWERS.items() if each == power)
    return f"{size_bytes} B" if power == 0 else f"{size_bytes / 1000**power:.1f} {unit}B"
