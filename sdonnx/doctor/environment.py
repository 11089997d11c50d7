"""Find the requirements for generating images that this machine lacks, and the command that installs them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from sdonnx.doctor.gpu import Gpu, cuda_driver_version, driver_version, gpus, load_cuda_libraries
from sdonnx.installation import install_command

__all__ = ["Facts", "Finding", "collect_facts", "default_provider", "findings"]

_CUDA = "CUDAExecutionProvider"

# The oldest drivers for Linux, by CUDA's major version: CUDA toolkit release notes, "minor version compatibility".
_OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}

# CUDA 13 has no code for GPUs before Turing (CUDA 13.0 release notes), CUDA 12 none before Maxwell.
_OLDEST_GPU = {12: (5, 0), 13: (7, 5)}

# Library -> its wheel for CUDA 13, and whether the CUDA provider or cuDNN requires it (the libraries that
# onnxruntime.preload_dlls loads). Before CUDA 13, the name of every wheel ends in -cu12.
_LIBRARIES = {
    "libcudart.so.{cuda}": ("nvidia-cuda-runtime", True),
    "libcublasLt.so.{cuda}": ("nvidia-cublas", True),
    "libcublas.so.{cuda}": ("nvidia-cublas", True),
    "libnvrtc.so.{cuda}": ("nvidia-cuda-nvrtc", True),
    "libcudnn.so.9": ("nvidia-cudnn-cu{cuda}", True),
    "libcufft.so.{cufft}": ("nvidia-cufft", False),
    "libcurand.so.10": ("nvidia-curand", False),
}


@dataclass(frozen=True)
class Facts:
    """The environment of a machine.

    Attributes:
        distributions: the versions of the installed builds of ONNX Runtime, by name.
        import_error: the reason why the module onnxruntime cannot be imported, "" where it can.
        providers: the execution providers of the module.
        built_for: the CUDA version that the module is built for, "" for a build without CUDA.
        driver: the version of the driver, "" where it is unknown.
        driver_cuda: the newest CUDA version that the driver supports, None without a driver.
        gpus: the GPUs that are visible to CUDA.
        missing: the libraries of CUDA and cuDNN that cannot be loaded.
    """

    distributions: Mapping[str, str] = field(default_factory=dict)
    import_error: str = ""
    providers: tuple[str, ...] = ()
    built_for: str = ""
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One requirement.

    Attributes:
        subject: the name of the requirement.
        found: the state of this machine.
        state: "fine", "missing" where images cannot be generated without it, or "note".
        expected: the expected state, "" if it is met.
        remedy: the way to fix it, "" if there is nothing to fix.
    """

    subject: str
    found: str
    state: str = "fine"
    expected: str = ""
    remedy: str = ""


def collect_facts() -> Facts:
    """Inspect this machine. This loads CUDA's libraries if ONNX Runtime is built for them."""
    error, providers, built_for = "", (), ""
    module: Path | None = None
    try:
        import onnxruntime

        module = Path(onnxruntime.__file__ or "").parent
        providers = tuple(onnxruntime.get_available_providers())
        built_for = str(getattr(onnxruntime, "cuda_version", "") or "")
        if _CUDA in providers:
            onnxruntime.set_default_logger_severity(4)
    except Exception as caught:  # broken installations raise various exceptions, such as AttributeError
        error = " ".join(f"{type(caught).__name__}: {caught}".split())
    return Facts(
        _builds(metadata.distributions(), module),
        error,
        providers,
        built_for,
        driver_version(),
        cuda_driver_version(),
        gpus(),
        _missing(built_for) if _CUDA in providers else (),
    )


def _builds(distributions: Iterable[metadata.Distribution], module: Path | None) -> dict[str, str]:
    """Return the versions of the distributions of the module onnxruntime, such as onnxruntime-gpu or ort-nightly.

    The module hides distributions in other folders of the path. They count only where the module is in none of them.
    """
    others = ("onnxruntime-extensions", "onnxruntime-genai", "onnxruntime-tools")
    named = [(re.sub(r"[-_.]+", "-", str(found.metadata["Name"])).lower(), found) for found in distributions]
    builds = [
        (name, found)
        for name, found in named
        if (name == "onnxruntime" or name.startswith(("onnxruntime-", "ort-"))) and not name.startswith(others)
    ]
    folder = None if module is None else module.resolve()
    visible = [each for each in builds if Path(str(each[1].locate_file("onnxruntime"))).resolve() == folder]
    # Of two distributions with the same name, the first on the path.
    return {name: found.version for name, found in reversed(visible or builds)}


def _major(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _libraries(built_for: str) -> dict[str, tuple[str, bool]]:
    """Return the wheel of each library, and whether the library is required, by file name."""
    major = _major(built_for)
    names = {"cuda": str(major), "cufft": "12" if major >= 13 else "11"}
    suffix = "" if major >= 13 else f"-cu{major}"
    return {
        library.format(**names): (wheel.format(**names) + ("" if "{" in wheel else suffix), needed)
        for library, (wheel, needed) in _LIBRARIES.items()
    }


def _missing(built_for: str) -> tuple[str, ...]:
    """Return the libraries that cannot be loaded, after ONNX Runtime has loaded the libraries of the wheels."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # it prints the libraries that it does not find
        load_cuda_libraries()
    found = []
    for library in _libraries(built_for):
        try:
            ctypes.CDLL(library)
        except OSError:
            found.append(library)
    return tuple(found)


def default_provider(facts: Facts) -> str:
    """Return "cuda" for a machine that has a GPU or a build of ONNX Runtime for CUDA, else "cpu"."""
    return "cuda" if facts.gpus or facts.driver_cuda or _CUDA in facts.providers else "cpu"


def findings(facts: Facts, provider: str) -> list[Finding]:
    """Return the requirements of a provider, "cuda" or "cpu", and whether a machine meets them."""
    found = [_onnxruntime(facts, provider)]
    if provider == "cpu":
        names = ", ".join(gpu.name for gpu in facts.gpus)
        return [*found, Finding("GPU", names or "none: images are generated on the CPU", "fine" if names else "note")]
    if not facts.import_error:
        found.append(_provider(facts))
    return [*found, _driver(facts), _gpu(facts), *_cuda_libraries(facts)]


def _onnxruntime(facts: Facts, provider: str) -> Finding:
    subject = "ONNX Runtime"
    installed = ", ".join(f"{name} {version}" for name, version in facts.distributions.items())
    wanted = "onnxruntime-gpu" if provider == "cuda" else "onnxruntime"
    if len(facts.distributions) > 1:
        names = " ".join(facts.distributions)
        remedy = f"pip uninstall -y {names} && {install_command(provider)}"
        return Finding(subject, f"{installed}: each overwrites the other", "missing", f"only {wanted}", remedy)
    if facts.import_error:
        found = f"{installed or 'not installed'} ({facts.import_error})"
        return Finding(subject, found, "missing", wanted, install_command(provider))
    return Finding(subject, installed or "a build that pip does not know")


def _provider(facts: Facts) -> Finding:
    if _CUDA in facts.providers:
        return Finding("CUDA provider", f"built for CUDA {facts.built_for or 'unknown'}")
    names = " ".join(facts.distributions)
    return Finding(
        "CUDA provider",
        f"not in this build, which has {', '.join(facts.providers) or 'none'}",
        "missing",
        "onnxruntime-gpu",
        (f"pip uninstall -y {names} && " if names else "") + install_command("cuda"),
    )


def _driver(facts: Facts) -> Finding:
    major = _major(facts.built_for)
    oldest = _OLDEST_DRIVER.get(major, _OLDEST_DRIVER[max(_OLDEST_DRIVER)])
    if facts.driver_cuda is None:
        return Finding(
            "driver", "no NVIDIA driver (libcuda.so.1)", "missing", f"driver {oldest} or newer",
            "install NVIDIA's driver; in a container, start it with --gpus all"
        )  # fmt: skip
    found = f"{facts.driver or 'of unknown version'}, up to CUDA {'.'.join(map(str, facts.driver_cuda))}"
    if facts.driver_cuda[0] < major:
        return Finding(
            "driver", found, "missing", f"driver {oldest} or newer, for CUDA {facts.built_for}",
            "update NVIDIA's driver"
        )  # fmt: skip
    return Finding("driver", found)


def _gpu(facts: Facts) -> Finding:
    if not facts.gpus:
        return Finding(
            "GPU", "none that is visible to CUDA", "missing", "an NVIDIA GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass --provider cpu"
        )  # fmt: skip
    names = ", ".join(f"{gpu.name} (sm_{''.join(map(str, gpu.compute_capability))})" for gpu in facts.gpus)
    oldest = _OLDEST_GPU.get(_major(facts.built_for), (0, 0))
    if all(gpu.compute_capability < oldest for gpu in facts.gpus):
        expected = f"sm_{''.join(map(str, oldest))} or newer, for CUDA {facts.built_for}"
        return Finding("GPU", names, "missing", expected, "use another GPU, or pass --provider cpu")
    return Finding("GPU", names)


def _cuda_libraries(facts: Facts) -> list[Finding]:
    if _CUDA not in facts.providers:
        return []
    known = _libraries(facts.built_for)
    missing = [library for library in facts.missing if library in known]
    if not missing:
        return [Finding("CUDA libraries", "the libraries of CUDA and cuDNN are found")]
    needed = any(known[library][1] for library in missing)
    wheels = sorted({known[library][0] for library in missing})
    return [
        Finding(
            "CUDA libraries", f"not found: {', '.join(missing)}", "missing" if needed else "note",
            f"the libraries of CUDA {facts.built_for} and cuDNN 9", f"pip install {' '.join(wheels)}"
        )
    ]  # fmt: skip
