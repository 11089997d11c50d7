"""The environment of a measurement, for its record: packages, this project's commit, the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import uuid
from pathlib import Path
from typing import Any

import sdonnx
from sdonnx.errors import ProviderError
from sdonnx.installation import install_command, installed_version

__all__ = ["environment", "first_gpu", "git_commit", "open_gpu"]

_PACKAGES = (
    "diffusers", "jinja2", "lpips", "numpy", "onnxruntime", "onnxruntime-gpu", "onnxscript", "optimum-onnx", "rich",
    "scikit-image", "tokenizers", "torch", "transformers", "triton", "xformers",
)  # fmt: skip

_ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Return the environment for JSON. Packages that are not installed have the version None."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "sdonnx": sdonnx.__version__}
    return {
        "packages": versions | {name: installed_version(name) for name in _PACKAGES},
        # SDONNX_COMMIT sets the commit for copies of the files without this repository's history.
        "git": {"commit": commit} if (commit := os.environ.get("SDONNX_COMMIT")) else git_commit(_ROOT),
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu_name(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": _gpu(),
        },
    }


def git_commit(root: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout at `root`, and whether files differ from it; None without a checkout."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        # Without optional locks, reading the status cannot interfere with a concurrent commit.
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    """Return the processor's name; on Linux it is only in /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    """Return the properties of CUDA device 0, or None if there is no GPU or NVML is not installed."""
    try:
        gpu = open_gpu()
    except ProviderError:
        return None
    import pynvml

    return {
        "name": pynvml.nvmlDeviceGetName(gpu),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
    }


def first_gpu() -> str | None:
    """Return the UUID of CUDA device 0 in NVML's format, or None if CUDA finds no GPU.

    CUDA and NVML number GPUs differently: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER affect only CUDA.
    Source: the CUDA driver API (cuInit, cuDeviceGet, cuDeviceGetUuid). No context is created.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, identifier = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceGetUuid_v2(identifier, device):
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(identifier))}"


def open_gpu() -> Any:
    """Return NVML's handle of CUDA device 0.

    Raises:
        ProviderError: there is no GPU, or NVML is missing or does not list the GPU.
    """
    try:
        import pynvml
    except ImportError:
        raise ProviderError("NVML's Python package is missing", "nvidia-ml-py", install_command("benchmark")) from None
    identifier = first_gpu()
    if identifier is None:
        raise ProviderError("CUDA finds no GPU", "a GPU and its driver", "check nvidia-smi, or pass -r cpu")
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(identifier)
    except pynvml.NVMLError as error:
        raise ProviderError(
            f"NVML does not list the GPU {identifier} ({error})", "the driver's NVML", "check nvidia-smi"
        ) from error
