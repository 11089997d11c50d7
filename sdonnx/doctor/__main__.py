"""`python -m sdonnx.doctor`: the same as `sdonnx doctor`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
