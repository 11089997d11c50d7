"""Build the platform wheel: compile the library with `make`, and tag the wheel for this platform and any Python 3.

The environment variables ARCHITECTURES, NVCC, CUDA_LIB and THREADS are those of the Makefile.
"""

import os
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_VARIABLES = ("ARCHITECTURES", "NVCC", "CUDA_LIB", "THREADS")


class BuildLibrary(build_py):
    """Compile the library into the package's build folder."""

    def run(self) -> None:
        """Run the command."""
        super().run()
        target = Path(self.build_lib).resolve() / "sdonnx_kernels"
        given = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
        subprocess.run(["make", "all", f"OUT={target}", *given], cwd=Path(__file__).resolve().parent, check=True)


class PlatformWheel(bdist_wheel):
    """A wheel with machine code that does not depend on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """A distribution with machine code, although it has no extension module."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel depends on the platform."""
        return True


setup(cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
