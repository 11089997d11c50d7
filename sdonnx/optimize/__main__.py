"""`python -m sdonnx.optimize`: the same as `sdonnx optimize`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["optimize", *sys.argv[1:]]))
