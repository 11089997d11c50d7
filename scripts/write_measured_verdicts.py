"""Write `sdonnx/doctor/measured_verdicts.json` from docs/results: `python scripts/write_measured_verdicts.py`.

To add a machine, run this on it and commit both files:

    sdonnx doctor --fresh --json docs/results/doctor-NAME.json
    python scripts/write_measured_verdicts.py

No verdict on our own kernels holds after an edit of kernels/src. They can be checked without ONNX Runtime's:

    export SDONNX_KERNELS=kernels/build/libsdonnx_kernels.so
    python -m pytest tests/gpu/test_kernels_gpu.py -k test_whole_check --results docs/results/own-kernels-NAME.json

`--check` writes nothing. It reports whether verdicts ship for the kernels as they are now; status 1 if not.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.doctor.check_kernels import OWN_KERNEL_CASES_FILE, digest_of
from sdonnx.doctor.measured_verdicts import MEASURED_VERDICTS_FILE, measured_verdict_file

ROOT = Path(__file__).resolve().parent.parent


def content() -> str:
    """Return the file's content for the results of this checkout."""
    paths = sorted((ROOT / "docs" / "results").glob("*.json"))
    records = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return measured_verdict_file(records, digest_of(), digest_of(OWN_KERNEL_CASES_FILE))


def source_digest() -> str:
    """Return the digest of the kernels' sources in this checkout."""
    command = ["make", "-C", str(ROOT / "kernels"), "--silent", "--no-print-directory", "digest"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def missing(text: str, sources: str) -> list[str]:
    """Return a line for each kind of kernels on which no verdict ships.

    Args:
        text: the content of the file of verdicts.
        sources: the digest of the kernels' sources.
    """
    keys = [entry["verdict"]["key"] for entry in json.loads(text)["verdicts"]]
    named = sorted({key["kernel_sources"] for key in keys if "kernel_sources" in key})
    lines = []
    if len(named) == len(keys):
        lines.append("ONNX Runtime's kernels: no verdict ships; expected one; run sdonnx doctor --json on a GPU")
    if sources not in named:
        lines.append(
            f"our own kernels: verdicts ship for the sources {', '.join(named) or 'none'}; expected {sources}, "
            "those of kernels/src; run test_whole_check of tests/gpu/test_kernels_gpu.py on a GPU"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="Write the verdicts that ship with the package.")
    parser.add_argument("--check", action="store_true", help="only report whether the kernels have a verdict")
    if not parser.parse_args(arguments).check:
        MEASURED_VERDICTS_FILE.write_text(content(), encoding="utf-8")
        return 0
    sources = source_digest()
    lines = missing(MEASURED_VERDICTS_FILE.read_text(encoding="utf-8"), sources)
    print("\n".join(lines) or f"verdicts ship for all kernels; the sources of our own are {sources}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
