"""Time and memory of an export or an optimization in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["measured"]

_MEASURED = """
import json, sys, time
from pathlib import Path
start = time.monotonic()
if sys.argv[1] == "export":
    from sdonnx.export.export_pipeline import export_pipeline
    export_pipeline(sys.argv[2], Path(sys.argv[3]), ip_adapters=[Path(path) for path in sys.argv[4:]])
else:
    from sdonnx.optimize.optimizer import optimize_folder
    optimize_folder(Path(sys.argv[2]), Path(sys.argv[3]), float16=True)
# Not ru_maxrss, which a child process inherits from its parent.
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"seconds": time.monotonic() - start, "peak_bytes": peak}))
"""


def measured(command: str, source: Path, out: Path, *adapters: Path) -> dict[str, float]:
    words = [sys.executable, "-c", _MEASURED, command, str(source), str(out), *map(str, adapters)]
    result = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))
