"""The least command that writes a folder: `python -m support.writing -i FOLDER -o OUT` copies one."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from sdonnx.folder.pipeline_folder import atomic_folder
from sdonnx.terminal import add_common, guarded


def run(options: argparse.Namespace) -> int:
    """Copy the folder; with --wait, end only once that file is there."""
    with atomic_folder(options.output, options.overwrite, [options.input]) as partial:
        shutil.copytree(options.input, partial, dirs_exist_ok=True)
        if options.wait is not None:
            options.wait.with_suffix(".waiting").touch()
        while options.wait is not None and not options.wait.exists():
            time.sleep(0.01)
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-i", "--input", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--wait", type=Path)
    add_common(parser)
    return guarded(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
