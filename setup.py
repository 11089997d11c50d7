"""Add our own kernels to the extra `cuda`, as the folder `kernels/` next to this file; setup.cfg has all else.

A direct reference can only be absolute, so it is computed when the package is built. `SDONNX_KERNELS=0` leaves it out,
for a wheel that others install and for a machine that cannot compile. A source distribution has the sources instead.
"""

import os
import sys
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {name: text.split("\n") for name, text in config["options.extras_require"].items()}
    if (KERNELS / "pyproject.toml").is_file() and "sdist" not in sys.argv and os.environ.get("SDONNX_KERNELS") != "0":
        found["cuda"].append(f"sdonnx-kernels @ {KERNELS.as_uri()}")
    return {name: [line for line in lines if line] for name, lines in found.items()}


setup(extras_require=extras())
