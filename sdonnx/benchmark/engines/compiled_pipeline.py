"""diffusers' pipeline with components that `sdonnx.compile_pipe` compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sdonnx.benchmark.engines.patching import patched
from sdonnx.benchmark.engines.pytorch import TorchEngine
from sdonnx.benchmark.workload import Workload
from sdonnx.errors import OptionError
from sdonnx.installation import cpu_or_cuda, install_command

__all__ = ["SdonnxCompileEngine"]


class SdonnxCompileEngine(TorchEngine):
    """diffusers' pipeline, loaded as the engine torch loads it, with the components that `compile_pipe` can compile.

    The others stay in torch.
    """

    name = "sdonnx-compile"
    distributions = (("onnxruntime-gpu", "onnxruntime"), *TorchEngine.distributions)
    modules = (*TorchEngine.modules, "onnxruntime", "onnxscript")
    compile_modes = ()

    @classmethod
    def installation(cls) -> str:
        """Return how to install the packages of the engine."""
        return f"{cpu_or_cuda()}, and {install_command('export')}"

    def load(self, workload: Workload) -> None:
        """Load the modules and compile them."""
        super().load(workload)
        # Imported here, because it imports torch, which counts towards the load time of the pipeline.
        from sdonnx.compiler.compile_pipe import compile_pipe

        with self._memory_errors():
            self._pipeline = compile_pipe(self._pipeline, options=self.options.compiler_config)

    def allocator_bytes(self) -> int | None:
        """Return None: the peak of ONNX Runtime's allocator, which has most of the memory, is unknown."""
        return None

    def replaced(
        self, module: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> AbstractContextManager[None]:
        """Replace a method of a drop-in in its class: another attribute of a module would be a change of the module."""
        from sdonnx.compiler.compile_module import CompiledModule

        return patched(type(module) if isinstance(module, CompiledModule) else module, name, change)

    def kernels(self, prompt: str, workload: Workload) -> tuple[dict[str, float], int, str]:
        """Profile with torch on a GPU.

        Raises:
            OptionError: on a CPU, where torch's profiler does not see the operators of ONNX Runtime.
        """
        if self.device == "cpu":
            raise OptionError(f"--profile for the engine {self.name} on a CPU", "a GPU", "use -e onnxruntime")
        return super().kernels(prompt, workload)
