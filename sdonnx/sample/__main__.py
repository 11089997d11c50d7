"""`python -m sdonnx.sample`: the same as `sdonnx sample`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
