"""Write a certificate in the same way as `verify`: `python -m support.certifying FOLDER TEXT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdonnx.cli.verify import write_certificate
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.terminal import guarded


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
