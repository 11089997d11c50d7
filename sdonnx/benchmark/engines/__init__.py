"""The engines. All generate the same images from the same weights, seeds and sampler.

`-e FILE.py:NAME` measures an engine from outside this package: a class derived from `Engine` with that name, in the
dictionary ENGINES of the file. Its process loads the file again, by the same rule.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path

from sdonnx.benchmark.engine import Engine
from sdonnx.benchmark.engines.optimized_folder import OnnxRuntimeEngine
from sdonnx.benchmark.engines.pytorch import SdonnxCompileEngine, TorchEngine
from sdonnx.errors import OptionError

__all__ = ["ENGINES", "OnnxRuntimeEngine", "SdonnxCompileEngine", "TorchEngine", "find_engine"]

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (OnnxRuntimeEngine, TorchEngine, SdonnxCompileEngine)
}


@functools.cache
def find_engine(name: str) -> type[Engine]:
    """Return an engine by its key in ENGINES, or by FILE.py:NAME.

    Raises:
        OptionError: the file cannot be loaded, or has no such engine.
    """
    if name in ENGINES:
        return ENGINES[name]
    file, _, key = name.rpartition(":")
    module = types.ModuleType(f"_engines_{Path(file).stem}")
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), vars(module))
        engines: dict[str, type[Engine]] = module.ENGINES
    except Exception as error:  # any, because the file is a program
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        raise OptionError(f"{file} cannot be loaded ({reason})", "a Python file with ENGINES") from error
    if key not in engines:
        raise OptionError(f"the engine {name!r} is unknown", f"one of {', '.join(engines)} in {file}")
    return engines[key]
