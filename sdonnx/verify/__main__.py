"""`python -m sdonnx.verify`: the same as `sdonnx verify`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
