"""`sdonnx cache ls|size|clear|prune`: list and remove compiled graphs of the user's cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime

from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from sdonnx.errors import OptionError, OutputError
from sdonnx.folder.folder_cache import (
    CACHE_LIMIT,
    CacheEntry,
    FolderCache,
    cache_limit,
    graph_folder,
    parse_size,
    shown_size,
)
from sdonnx.terminal import add_common, add_option, console

__all__ = ["add_arguments", "run"]

_ACTIONS = ("ls", "list", "size", "clear", "prune")
_COLUMNS = ("class", "method", "precision", "size", "last use", "key")
_SHOWN_KEY = 8  # characters; keys have 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "List or remove the graphs that sdonnx.compile has cached. ls, list: a table; size: their size in bytes; "
        "clear: remove all; prune: remove the least recently used ones above a limit. "
        "The results of checked kernels in the same folder stay."
    )
    parser.add_argument("action", choices=_ACTIONS, help=", ".join(_ACTIONS))
    add_option(
        parser,
        "--limit",
        metavar="SIZE",
        help=f"for prune: the size to keep, such as 20GB (default: ${CACHE_LIMIT}, or 50GB)",
    )
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.limit is not None and options.action != "prune":
        raise OptionError(f"--limit with {options.action}", "--limit with prune")
    try:
        cache = FolderCache(graph_folder())
    except RuntimeError as error:  # Path.expanduser, where there is no home
        raise OutputError(str(error), "a home folder", "set SDONNX_CACHE to a path without ~") from error
    if options.action == "prune":
        limit_bytes = cache_limit() if options.limit is None else parse_size(options.limit, "--limit")
        _print_removed(cache.prune(limit_bytes))
    elif options.action == "clear":
        _print_removed(cache.clear())
    elif options.action == "size":
        console().print(sum(entry.size_bytes for entry in cache.entries()))
    else:
        _print_entries(cache)
    return 0


def _print_removed(entries: Sequence[CacheEntry]) -> None:
    size_bytes = sum(entry.size_bytes for entry in entries)
    console().print(f"removed {len(entries)} graphs, {shown_size(size_bytes)}")


def _print_entries(cache: FolderCache) -> None:
    """Print a table of the graphs, the most recently used ones first.

    In a terminal that is too narrow, cells wrap, first in the widest column. Elsewhere, each graph is one line.
    """
    out = console()
    title = f"graphs in {escape(str(cache.root))}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for entry in reversed(cache.entries()):
        named = [escape(str(entry.info.get(name, ""))) for name in ("class", "method", "precision")]
        used = datetime.fromtimestamp(entry.last_use).strftime("%Y-%m-%d %H:%M")
        table.add_row(*named, shown_size(entry.size_bytes), used, escape(entry.key[:_SHOWN_KEY]))
    if out.soft_wrap:
        table.width = Measurement.get(out, out.options.update(width=sys.maxsize), table).maximum
    out.print(table)
