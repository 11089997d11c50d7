"""Write `sdonnx/doctor/corners.json` from the contract table: `python scripts/write_corners.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.doctor.kernels import CORNERS_FILE
from sdonnx.graph.corner_graphs import corner_file

if __name__ == "__main__":
    CORNERS_FILE.write_text(corner_file(), encoding="utf-8")
