"""What a machine has of what drawing needs, what is missing, and how to mend it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from sdonnx.doctor.gpu import Gpu, cuda_driver_version, driver_version, gpus

__all__ = ["Facts", "Finding", "facts", "findings", "wanted_provider"]

_CUDA = "CUDAExecutionProvider"
_INSTALL = {"cuda": "pip install 'sdonnx[cuda]'", "cpu": "pip install 'sdonnx[cpu]'"}

# The oldest drivers for Linux, by CUDA's major version: CUDA toolkit release notes, "minor version compatibility".
_OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}

# CUDA 13 has no code for GPUs before Turing (CUDA 13.0 release notes), CUDA 12 none before Maxwell.
_OLDEST_GPU = {12: (5, 0), 13: (7, 5)}

# Library -> the wheel that has it, for CUDA 13, and whether the CUDA provider or cuDNN cannot do without it
# (onnxruntime.preload_dlls names the same ones). Before CUDA 13 every wheel's name ends in -cu12.
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
    """What was found on a machine.

    Attributes:
        distributions: version by name of the installed builds of ONNX Runtime.
        import_error: why the module onnxruntime cannot be imported, "" where it can.
        providers: the execution providers of the module.
        built_for: the CUDA version that the module is built for, "" for none.
        driver: the driver's version, "" where it is not told.
        driver_cuda: the newest CUDA that the driver runs, None where there is no driver.
        gpus: the GPUs that CUDA shows.
        missing: libraries of CUDA and cuDNN that cannot be loaded.
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
    """One thing that was looked at.

    Attributes:
        subject: what it is.
        found: what was found.
        state: "fine", "missing" where drawing cannot go without it, or "note".
        expected: what would be right, "" where it is.
        remedy: what mends it, "" where nothing needs mending.
    """

    subject: str
    found: str
    state: str = "fine"
    expected: str = ""
    remedy: str = ""


def facts() -> Facts:
    """Look at this machine. CUDA's libraries are loaded where ONNX Runtime is built for them."""
    error, providers, built_for = "", (), ""
    module: Path | None = None
    try:
        import onnxruntime

        module = Path(onnxruntime.__file__ or "").parent
        providers = tuple(onnxruntime.get_available_providers())
        built_for = str(getattr(onnxruntime, "cuda_version", "") or "")
        if _CUDA in providers:
            onnxruntime.set_default_logger_severity(4)
    except Exception as caught:  # a broken installation fails in many ways, AttributeError among them
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
    """Return version by name of the distributions that hold the module onnxruntime: onnxruntime-gpu, ort-nightly...

    Those in other folders of the path than the module's are hidden by it, and count where the module is in none.
    """
    others = ("onnxruntime-extensions", "onnxruntime-genai", "onnxruntime-tools")
    named = [(re.sub(r"[-_.]+", "-", str(found.metadata["Name"])).lower(), found) for found in distributions]
    builds = [
        (name, found)
        for name, found in named
        if (name == "onnxruntime" or name.startswith(("onnxruntime-", "ort-"))) and not name.startswith(others)
    ]
    folder = None if module is None else module.resolve()
    beside = [each for each in builds if Path(str(each[1].locate_file("onnxruntime"))).resolve() == folder]
    # Of a name that is there twice, the first on the path.
    return {name: found.version for name, found in reversed(beside or builds)}


def _major(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _libraries(built_for: str) -> dict[str, tuple[str, bool]]:
    """Return the libraries by their file names, each with its wheel and whether it is needed."""
    major = _major(built_for)
    names = {"cuda": str(major), "cufft": "12" if major >= 13 else "11"}
    suffix = "" if major >= 13 else f"-cu{major}"
    return {
        library.format(**names): (wheel.format(**names) + ("" if "{" in wheel else suffix), needed)
        for library, (wheel, needed) in _LIBRARIES.items()
    }


def _missing(built_for: str) -> tuple[str, ...]:
    """Return the libraries that cannot be loaded, after ONNX Runtime has loaded those of the wheels."""
    import contextlib
    import io

    import onnxruntime

    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
        onnxruntime.preload_dlls()
    found = []
    for library in _libraries(built_for):
        try:
            ctypes.CDLL(library)
        except OSError:
            found.append(library)
    return tuple(found)


def wanted_provider(seen: Facts) -> str:
    """Return the provider that a machine is looked at for: "cuda" where a GPU or a build for one is there."""
    return "cuda" if seen.gpus or seen.driver_cuda or _CUDA in seen.providers else "cpu"


def findings(seen: Facts, provider: str) -> list[Finding]:
    """Return what the facts mean for a provider, "cuda" or "cpu"."""
    found = [_onnxruntime(seen, provider)]
    if provider == "cpu":
        names = ", ".join(gpu.name for gpu in seen.gpus)
        return [*found, Finding("GPU", names or "none: images are drawn on the CPU", "fine" if names else "note")]
    if not seen.import_error:
        found.append(_provider(seen))
    return [*found, _driver(seen), _gpu(seen), *_cuda_libraries(seen)]


def _onnxruntime(seen: Facts, provider: str) -> Finding:
    subject = "ONNX Runtime"
    installed = ", ".join(f"{name} {version}" for name, version in seen.distributions.items())
    wanted = "onnxruntime-gpu" if provider == "cuda" else "onnxruntime"
    if len(seen.distributions) > 1:
        names = " ".join(seen.distributions)
        remedy = f"pip uninstall -y {names} && {_INSTALL[provider]}"
        return Finding(subject, f"{installed}: each overwrites the other", "missing", f"{wanted} alone", remedy)
    if seen.import_error:
        found = f"{installed or 'not installed'} ({seen.import_error})"
        return Finding(subject, found, "missing", wanted, _INSTALL[provider])
    return Finding(subject, installed or "a build that pip does not know")


def _provider(seen: Facts) -> Finding:
    if _CUDA in seen.providers:
        return Finding("CUDA provider", f"built for CUDA {seen.built_for or 'unknown'}")
    names = " ".join(seen.distributions)
    return Finding(
        "CUDA provider",
        f"not in this build, which has {', '.join(seen.providers) or 'none'}",
        "missing",
        "onnxruntime-gpu",
        (f"pip uninstall -y {names} && " if names else "") + _INSTALL["cuda"],
    )


def _driver(seen: Facts) -> Finding:
    major = _major(seen.built_for)
    oldest = _OLDEST_DRIVER.get(major, _OLDEST_DRIVER[max(_OLDEST_DRIVER)])
    if seen.driver_cuda is None:
        return Finding(
            "driver", "no NVIDIA driver (libcuda.so.1)", "missing", f"driver {oldest} or newer",
            "install NVIDIA's driver; in a container, start it with --gpus all"
        )  # fmt: skip
    found = f"{seen.driver or 'of unknown version'}, up to CUDA {'.'.join(map(str, seen.driver_cuda))}"
    if seen.driver_cuda[0] < major:
        return Finding(
            "driver", found, "missing", f"driver {oldest} or newer, for CUDA {seen.built_for}",
            "update NVIDIA's driver"
        )  # fmt: skip
    return Finding("driver", found)


def _gpu(seen: Facts) -> Finding:
    if not seen.gpus:
        return Finding(
            "GPU", "none that CUDA shows", "missing", "an NVIDIA GPU",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass --provider cpu"
        )  # fmt: skip
    names = ", ".join(f"{gpu.name} (sm_{''.join(map(str, gpu.compute_capability))})" for gpu in seen.gpus)
    oldest = _OLDEST_GPU.get(_major(seen.built_for), (0, 0))
    if all(gpu.compute_capability < oldest for gpu in seen.gpus):
        expected = f"sm_{''.join(map(str, oldest))} or newer, for CUDA {seen.built_for}"
        return Finding("GPU", names, "missing", expected, "use another GPU, or pass --provider cpu")
    return Finding("GPU", names)


def _cuda_libraries(seen: Facts) -> list[Finding]:
    if _CUDA not in seen.providers:
        return []
    known = _libraries(seen.built_for)
    missing = [library for library in seen.missing if library in known]
    if not missing:
        return [Finding("CUDA libraries", "CUDA's and cuDNN's are found")]
    needed = any(known[library][1] for library in missing)
    wheels = sorted({known[library][0] for library in missing})
    return [
        Finding(
            "CUDA libraries", f"not found: {', '.join(missing)}", "missing" if needed else "note",
            f"those of CUDA {seen.built_for} and cuDNN 9", f"pip install {' '.join(wheels)}"
        )
    ]  # fmt: skip
