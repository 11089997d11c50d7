"""Add our own kernels to the extra `cuda`; setup.cfg has all else.

They are a wheel in `dist/` next to this file, or in a folder of PIP_FIND_LINKS, if one for this machine was compiled
from the same sources, and otherwise the folder `kernels/`, which pip compiles. A direct reference can only be absolute,
so it is computed when the package is built. `SDONNX_KERNELS=0` leaves it out, for a wheel that others install and for a
machine that cannot compile. A source distribution has the sources instead.
"""

import os
import platform
import sys
from configparser import ConfigParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from setuptools import setup

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"


def kernels() -> Path:
    """Return the wheel of our own kernels, or the folder to compile."""
    spec = spec_from_file_location("kernels_compiler", KERNELS / "compiler.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    digest = module.sources_digest()
    folders = [ROOT / "dist", *map(Path, os.environ.get("PIP_FIND_LINKS", "").split())]
    for wheel in sorted(path.resolve() for each in folders for path in each.glob("sdonnx_kernels-*.whl")):
        if wheel.stem.endswith(f"_{platform.machine()}"):
            try:
                with ZipFile(wheel) as archive:
                    if archive.read("sdonnx_kernels/sources.sha256").decode() == digest:
                        return wheel
            except (BadZipFile, KeyError, OSError):  # a wheel of another kind
                pass
    return KERNELS


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    found = {name: text.split("\n") for name, text in config["options.extras_require"].items()}
    if (KERNELS / "pyproject.toml").is_file() and "sdist" not in sys.argv and os.environ.get("SDONNX_KERNELS") != "0":
        found["cuda"].append(f"sdonnx-kernels @ {kernels().as_uri()}")
    return {name: [line for line in lines if line] for name, lines in found.items()}


setup(extras_require=extras())
