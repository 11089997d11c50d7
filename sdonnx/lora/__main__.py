"""`python -m sdonnx.lora`: the same as `sdonnx lora`."""

from __future__ import annotations

import sys

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["lora", *sys.argv[1:]]))
