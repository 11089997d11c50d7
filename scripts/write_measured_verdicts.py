"""Write `sdonnx/doctor/measured_verdicts.json` from docs/results: `python scripts/write_measured_verdicts.py`.

To add a machine, run this on it and commit both files:

    sdonnx doctor --fresh --json docs/results/doctor-NAME.json
    python scripts/write_measured_verdicts.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.doctor.check_kernels import digest_of
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdict_file

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    paths = sorted((root / "docs" / "results").glob("*.json"))
    records = [(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    MEASURED_VERDICTS_FILE.write_text(measured_verdict_file(records, digest_of()), encoding="utf-8")
