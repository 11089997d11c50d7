"""Benchmark a pipeline: `python scripts/benchmark.py -e onnxruntime -v 1.5 -p FOLDER`; see --help."""

import sys
from pathlib import Path

# Measure this checkout, even if another version is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
