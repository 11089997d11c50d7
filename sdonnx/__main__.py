"""The command line `sdonnx`, also `python -m sdonnx`.

This module imports almost nothing, so that Ctrl-C during the imports of a command ends with one line and status 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130  # sdonnx.terminal.INTERRUPTED; importing that module takes 0.1 s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the command and its arguments; by default `sys.argv[1:]`.
    """
    try:
        from sdonnx.cli.command_line import run_command_line

        return run_command_line(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        if arguments is not None and "--debug" in arguments:
            raise
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
