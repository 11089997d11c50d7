"""`python -m sdonnx.benchmark`: the same as `sdonnx benchmark`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
