"""Write a graph as ONNX Runtime's own optimizations leave it, for inspection."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sdonnx.errors import ProviderError
from sdonnx.installation import install_command

__all__ = ["Inspector"]

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_DISABLED_OPTIMIZERS = ["QDQSelectorActionTransformer"]  # as in sdonnx.runtime.device.session
_MODEL, _WEIGHTS = "inspect.onnx", "inspect.onnx.data"


class Inspector:
    """Load graphs into ONNX Runtime and save the optimized graphs.

    Args:
        provider: execution provider, "cuda" or "cpu".

    Raises:
        ProviderError: ONNX Runtime is not installed, or lacks the provider.
    """

    def __init__(self, provider: str) -> None:
        try:
            self._runtime: Any = importlib.import_module("onnxruntime")
        except ImportError:
            raise ProviderError(
                "--inspect needs ONNX Runtime, which is not installed", "onnxruntime", install_command(provider)
            ) from None
        self._provider = _PROVIDERS[provider]
        available = self._runtime.get_available_providers()
        if self._provider not in available:
            raise ProviderError(
                f"--inspect needs the {self._provider}, ONNX Runtime has {', '.join(available)}",
                "an ONNX Runtime that can load the optimized graphs",
                f"leave out --inspect, or {install_command(provider)}",
            )
        if provider == "cuda":
            # Finds the CUDA and cuDNN wheels, which the dynamic loader does not.
            self._runtime.preload_dlls()

    def inspect(self, model: Path) -> None:
        """Write `inspect.onnx` and its weights next to the graph.

        Raises:
            ProviderError: ONNX Runtime refuses the graph, or cannot use the provider.
        """
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(model.with_name(_MODEL))
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        try:
            session = self._runtime.InferenceSession(
                str(model), options, providers=[self._provider], disabled_optimizers=_DISABLED_OPTIMIZERS
            )
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ProviderError(
                f"ONNX Runtime cannot load {model.name} for --inspect ({str(error).splitlines()[0]})",
                f"a graph that the {self._provider} supports",
                "leave out --inspect, or optimize for the other provider",
            ) from error
        if self._provider not in session.get_providers():
            raise ProviderError(
                f"--inspect could not load the {self._provider}",
                "a GPU, its driver and the CUDA libraries",
                "check nvidia-smi, or leave out --inspect",
            )
