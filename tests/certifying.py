"""What verify writes in the end, as a command whose faults can be tried quickly: `python -m certifying FOLDER TEXT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdonnx.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.terminal import guarded
from sdonnx.verify.command import write_certificate


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("text")
    options = parser.parse_args()

    def run(_: argparse.Namespace) -> int:
        write_certificate(options.folder, {CERTIFICATE_PAGE: options.text, CERTIFICATE: options.text})
        return 0

    return guarded(run, options)


if __name__ == "__main__":
    sys.exit(main())
