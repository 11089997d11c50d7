"""Run the benchmark script as a user does, and read the rows that it writes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

__all__ = ["SCRIPT", "read_rows", "run"]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark.py"


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does, in the given folder."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
