"""Build the platform wheel: compile the library with `make`, and tag the wheel for this platform and any Python 3.

The environment variables ARCHITECTURES, NVCC, CUDA_LIB, SDONNX_GLIBC and THREADS are those of the Makefile.
"""

import os
import subprocess
from pathlib import Path

from compiler import compiler_variables, sources_digest
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# Relative, because make cannot build below a folder whose path has a space.
OUT = Path("build", "wheel")


class BuildLibrary(build_py):
    """Compile the library into the package's build folder."""

    def run(self) -> None:
        """Run the command."""
        super().run()
        variables = {"THREADS": str(os.cpu_count() or 1)} | compiler_variables()
        variables |= {name: os.environ[name] for name in ("ARCHITECTURES", "THREADS") if name in os.environ}
        # Always: an earlier build in this folder may have been for other architectures.
        command = ["make", "--always-make", "all", f"OUT={OUT}"]
        command += [f"{name}={value}" for name, value in variables.items()]
        folder = Path(__file__).resolve().parent
        if subprocess.run(command, cwd=folder).returncode:
            raise SystemExit("sdonnx-kernels cannot be compiled; the lines above say why")
        package = Path(self.build_lib, "sdonnx_kernels")
        self.copy_file(str(folder / OUT / "libsdonnx_kernels.so"), str(package))
        (package / "sources.sha256").write_text(sources_digest())


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
