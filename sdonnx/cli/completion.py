"""`sdonnx completion bash`: print a script with which a shell completes commands, options and file names."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdonnx.cli.command_line import COMMANDS, top_parser
from sdonnx.terminal import add_common

__all__ = ["SHELLS", "add_arguments", "run"]

SHELLS = ("bash", "zsh", "fish")
"""Shells that a script is printed for."""

# Options with a path that is read as text: a hub id or standard output is accepted as well.
_PATHS = ("model", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Print a completion script. bash: source <(sdonnx completion bash), in ~/.bashrc. "
        "zsh: sdonnx completion zsh > a folder of $fpath, as _sdonnx. "
        "fish: sdonnx completion fish > ~/.config/fish/completions/sdonnx.fish."
    )
    parser.add_argument("shell", choices=SHELLS, help=", ".join(SHELLS))
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import shtab

    parser = top_parser(list(_importable()))
    for command in _subparsers(parser):
        for action in command._actions:
            if action.type is Path or action.dest in _PATHS or action.dest.endswith("_image"):
                setattr(action, "complete", shtab.FILE)  # noqa: B010  shtab's way to ask for file names
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _importable() -> Iterator[str]:
    """Yield the commands that can be imported with the installed packages; the others are completed without options."""
    for name, (module, _) in COMMANDS.items():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
            yield name


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
