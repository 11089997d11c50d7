"""Write the benchmark's report from records of `--json`, and optionally a picture of its top.

The picture of docs/lab/benchmarks.md:

    python scripts/write_report.py docs/results/benchmark-sd15-h200.json --commit c6925bb --height 512 -b 1 \
        -o report.html --picture docs/lab/report.png
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdonnx.benchmark.record import read_comparison
from sdonnx.benchmark.report.report_page import write_report

_WIDTH, _HEIGHT = 1120, 990  # pixels of the picture


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="a file that --json wrote")
    parser.add_argument("--commit", default="", help="only records of this commit, or of commits that start with it")
    parser.add_argument("--height", type=int, help="only records of this image height")
    parser.add_argument("-b", "--batch_size", type=int, help="only records of this batch size")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the page")
    parser.add_argument("--picture", type=Path, help="also a PNG file of its top; requires playwright and Chromium")
    options = parser.parse_args(arguments)
    lines = options.records.read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if _is_wanted(record, options)]
    if not records:
        print(f"error: {options.records} has no such records; expected at least one; omit an option", file=sys.stderr)
        return 2
    write_report(read_comparison(records), options.output)
    if options.picture is not None:
        _write_picture(options.output, options.picture)
    return 0


def _is_wanted(record: dict[str, Any], options: argparse.Namespace) -> bool:
    workload = record["workload"]
    return (
        record["environment"]["git"]["commit"].startswith(options.commit)
        and options.height in (None, workload["height"])
        and options.batch_size in (None, workload["batch_size"])
    )


def _write_picture(page: Path, picture: Path) -> None:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
        shown.goto(page.resolve().as_uri())
        shown.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
