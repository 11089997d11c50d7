"""Run `sdonnx optimize` as `python -m sdonnx.optimize_pipeline`, the name of ONNX Runtime's script."""

from __future__ import annotations

import sys

from sdonnx.cli.optimize import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
