"""Find the requirements for generating images that this machine lacks, and the command that installs them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from io import StringIO
from pathlib import Path

from sdonnx.doctor.gpu import Gpu, cuda_driver_version, driver_version, gpus, load_cuda_libraries
from sdonnx.installation import install_command

__all__ = ["Facts", "Finding", "collect_facts", "default_provider", "findings"]

_CUDA = "CUDAExecutionProvider"

_RELEASE = 13  # of CUDA: the extra `cuda` brings its libraries

# The oldest driver for Linux: CUDA toolkit 13.0 release notes, "minor version compatibility". It has no code for GPUs
# before Turing.
_OLDEST_DRIVER = "580.65.06"
_OLDEST_GPU = (7, 5)

# Library -> its wheel, and whether the CUDA provider or cuDNN requires it (the libraries that onnxruntime.preload_dlls
# loads).
_LIBRARIES = {
    "libcudart.so.13": ("nvidia-cuda-runtime", True),
    "libcublasLt.so.13": ("nvidia-cublas", True),
    "libcublas.so.13": ("nvidia-cublas", True),
    "libnvrtc.so.13": ("nvidia-cuda-nvrtc", True),
    "libcudnn.so.9": ("nvidia-cudnn-cu13", True),
    "libcufft.so.12": ("nvidia-cufft", False),
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
        _builds(module),
        error,
        providers,
        built_for,
        driver_version(),
        cuda_driver_version(),
        gpus(),
        _missing() if _CUDA in providers else (),
    )


def _builds(module: Path | None) -> dict[str, str]:
    """Return the versions of the distributions of the module onnxruntime, such as onnxruntime-gpu or ort-nightly.

    The module hides distributions in other folders of the path. They count only where the module is in none of them.
    """
    builds = [metadata.distribution(name) for name in {*metadata.packages_distributions().get("onnxruntime", ())}]
    folder = None if module is None else module.resolve()
    visible = [each for each in builds if Path(str(each.locate_file("onnxruntime"))).resolve() == folder]
    return dict(sorted((each.name, each.version) for each in visible or builds))


def _missing() -> tuple[str, ...]:
    """Return the libraries that cannot be loaded, after ONNX Runtime has loaded the libraries of the wheels."""
    with redirect_stdout(StringIO()):  # it prints the libraries that it does not find
        load_cuda_libraries()
    found = []
    for library in _LIBRARIES:
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
    installed = ", ".join(f"{name} {version}" for name, version in facts.distributions.items())
    wanted = "onnxruntime-gpu" if provider == "cuda" else "onnxruntime"
    if len(facts.distributions) > 1:
        names = " ".join(facts.distributions)
        remedy = f"pip uninstall -y {names} && {install_command(provider)}"
        return Finding("ONNX Runtime", f"{installed}: each overwrites the other", "missing", f"only {wanted}", remedy)
    if facts.import_error:
        found = f"{installed or 'not installed'} ({facts.import_error})"
        return Finding("ONNX Runtime", found, "missing", wanted, install_command(provider))
    return Finding("ONNX Runtime", installed or "a build that pip does not know")


def _provider(facts: Facts) -> Finding:
    found = f"built for CUDA {facts.built_for or 'unknown'}"
    if _CUDA in facts.providers and facts.built_for.partition(".")[0] == str(_RELEASE):
        return Finding("CUDA provider", found)
    if _CUDA not in facts.providers:
        found = f"not in this build, which has {', '.join(facts.providers) or 'none'}"
    names = " ".join(facts.distributions)
    remedy = (f"pip uninstall -y {names} && " if names else "") + install_command("cuda")
    return Finding("CUDA provider", found, "missing", f"onnxruntime-gpu for CUDA {_RELEASE}", remedy)


def _driver(facts: Facts) -> Finding:
    expected = f"driver {_OLDEST_DRIVER} or newer, for CUDA {_RELEASE}"
    if facts.driver_cuda is None:
        remedy = "install NVIDIA's driver; in a container, start it with --gpus all"
        return Finding("driver", "no NVIDIA driver (libcuda.so.1)", "missing", expected, remedy)
    found = f"{facts.driver or 'of unknown version'}, up to CUDA {'.'.join(map(str, facts.driver_cuda))}"
    if facts.driver_cuda[0] < _RELEASE:
        return Finding("driver", found, "missing", expected, "update NVIDIA's driver")
    return Finding("driver", found)


def _gpu(facts: Facts) -> Finding:
    if not facts.gpus:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass --provider cpu"
        return Finding("GPU", "none that is visible to CUDA", "missing", "an NVIDIA GPU", remedy)
    names = ", ".join(f"{gpu.name} (sm_{''.join(map(str, gpu.compute_capability))})" for gpu in facts.gpus)
    if all(gpu.compute_capability < _OLDEST_GPU for gpu in facts.gpus):
        expected = f"sm_{''.join(map(str, _OLDEST_GPU))} or newer, for CUDA {_RELEASE}"
        return Finding("GPU", names, "missing", expected, "use another GPU, or pass --provider cpu")
    return Finding("GPU", names)


def _cuda_libraries(facts: Facts) -> list[Finding]:
    if _CUDA not in facts.providers:
        return []
    if not facts.missing:
        return [Finding("CUDA libraries", "the libraries of CUDA and cuDNN are found")]
    needed = any(_LIBRARIES[library][1] for library in facts.missing)
    found, state = f"not found: {', '.join(facts.missing)}", "missing" if needed else "note"
    expected = f"the libraries of CUDA {_RELEASE} and cuDNN 9"
    wheels = " ".join(sorted({_LIBRARIES[library][0] for library in facts.missing}))
    return [Finding("CUDA libraries", found, state, expected, f"pip install {wheels}")]
