"""Time a pipeline: `python scripts/benchmark.py -e onnxruntime -v 1.5 -p FOLDER`; see --help."""

import sys
from pathlib import Path

# The checkout that this script lies in is what it measures, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
