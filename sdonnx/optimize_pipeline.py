"""Run `sdonnx optimize` as `python -m sdonnx.optimize_pipeline`, the name of ONNX Runtime's script."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sdonnx import __main__ as command_line

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sdonnx optimize` and return its exit status."""
    return command_line.main(["optimize", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
