"""`python -m sdonnx.export`: the same as `sdonnx export`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
