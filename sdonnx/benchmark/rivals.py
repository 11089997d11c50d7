"""Parse the engine names of `-e` and `--compiler`, including how an engine is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sdonnx.benchmark.engines import ENGINES, OnnxRuntimeEngine, SdonnxCompileEngine, TorchEngine, find_engine
from sdonnx.benchmark.engines.pytorch import COMPILE_MODES
from sdonnx.compiler.compile_options import check_options
from sdonnx.errors import OptionError

__all__ = ["COMPILERS", "NAMES", "Rival", "chosen_engines", "parse_rivals"]

_COMPILED, _REGIONAL, _XFORMERS = "torch-compile", "torch-regional", "torch-xformers"

NAMES = (*ENGINES, _XFORMERS, _COMPILED, _REGIONAL)
"""Values of `-e`, next to FILE.py:NAME; the last two also accept a mode, as in `torch-compile:max-autotune`."""

COMPILERS: Mapping[str, str] = MappingProxyType(
    {
        "none": TorchEngine.name,
        "sdonnx": SdonnxCompileEngine.name,
        "torch": _COMPILED,
        "compile": f"{_COMPILED}:default",
        "compile-max-autotune": f"{_COMPILED}:max-autotune",
    }
)
"""Values of `--compiler`, and their engines. The last two are OneDiff's names."""

_BACKENDS = ("nexfort", "oneflow")  # of OneDiff

_TORCH_KEYS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"mode": (str,), "dynamic": (bool, type(None)), "fullgraph": (bool,)}
)


@dataclass(frozen=True)
class Rival:
    """A configured engine of a comparison.

    Attributes:
        title: title in tables.
        engine: key in `ENGINES`, or FILE.py:NAME.
        compile_mode: mode of torch.compile; None to compile nothing.
        regional: compile only the denoiser's repeated blocks.
        xformers: use xformers' attention.
        compiler_config: see `EngineOptions`.
    """

    title: str
    engine: str
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False
    compiler_config: str | None = None

    @property
    def compiles(self) -> bool:
        """Whether the engine compiles, so that its first image depends on the content of a cache."""
        return self.compile_mode is not None or self.engine == SdonnxCompileEngine.name


def chosen_engines(names: Sequence[str] | None, compilers: Sequence[str] | None) -> list[str]:
    """Return the values of `-e`, or the engines that `--compiler` selects; without both the engine onnxruntime.

    Raises:
        OptionError: both are given, or a compiler is unknown.
    """
    if names and compilers:
        raise OptionError("--compiler and --engine, which both select engines", "one of them")
    for name in compilers or ():
        if name in _BACKENDS:
            raise OptionError(
                f"--compiler {name}, a backend of OneDiff", "one of none, sdonnx, torch",
                "pass --compiler sdonnx, whose --compiler-config accepts the options of nexfort",
            )  # fmt: skip
        if name not in COMPILERS:
            raise OptionError(f"--compiler {name} is unknown", f"one of {', '.join(COMPILERS)}")
    return [COMPILERS[name] for name in compilers] if compilers else list(names or [OnnxRuntimeEngine.name])


def parse_rivals(
    names: Sequence[str],
    *,
    compiled: bool = False,
    mode: str | None = None,
    xformers: bool = False,
    config: str | None = None,
    types: Mapping[str, Any] = MappingProxyType({}),
) -> list[Rival]:
    """Return the engines that `-e` and related options select, without duplicates.

    Args:
        names: elements of `NAMES`, the compiled ones with or without ":MODE".
        compiled: `--enable_torch_compile`: compile the engine torch.
        mode: `--compile_mode`, for compiled engines without a mode. Default, as is common with torch: reduce-overhead
            for a whole model; default for its blocks, which are too many to capture one by one.
        xformers: `--use_xformers`: the engine torch becomes torch-xformers.
        config: `--compiler_config`: the options of sdonnx-compile or, without that engine, `mode`, `dynamic` and
            `fullgraph` of torch.compile; as JSON, or as a mode.
        types: `mode`, `quant_type` and `quantize_config` of the options of sdonnx-compile, of `--quantize`. The mode is
            added to the mode in `config`; the others replace it.

    Raises:
        OptionError: a name, a mode or a key is unknown, or an option applies to none of the engines.
    """
    settings: dict[str, Any] = {}
    if config is not None and SdonnxCompileEngine.name not in names:
        settings = _torch_settings(config)
        mode = mode or settings.pop("mode", None)
    rivals = [_rival(name, compiled, mode, xformers) for name in names]
    rivals = [_configured(rival, config, settings, types) for rival in rivals]
    if compiled and "torch" not in names:
        raise OptionError(
            "--enable_torch_compile without the engine torch", "both", f"omit the option, or add {_COMPILED}"
        )
    if config is not None and not any(rival.compiles for rival in rivals):
        raise OptionError(
            "--compiler_config for engines that compile nothing", "a compiler",
            f"omit the option, or add -e {SdonnxCompileEngine.name} or {_COMPILED}",
        )  # fmt: skip
    if mode is not None and not any(rival.compile_mode for rival in rivals):
        raise OptionError("--compile_mode without --enable_torch_compile", "both", "add --enable_torch_compile")
    if xformers and compiled:
        # Compiled models fuse the QKV projections, which replaces xformers' attention.
        raise OptionError("--use_xformers and --enable_torch_compile", "one of them")
    if xformers and "torch" not in names:
        raise OptionError("--use_xformers without the engine torch", "both", "omit the option, or add -e torch")
    return list(dict.fromkeys(rivals))


def _rival(name: str, compiled: bool, mode: str | None, xformers: bool) -> Rival:
    if ".py:" in name:
        return Rival(find_engine(name).name, name)
    base, _, own = name.partition(":")
    if base == "torch":
        base = _COMPILED if compiled else _XFORMERS if xformers else base
    if base not in NAMES or (own and base not in (_COMPILED, _REGIONAL)):
        expected = f"one of {', '.join(NAMES)}, or FILE.py:NAME"
        raise OptionError(f"the engine {name!r} is unknown", expected)
    if base in (_COMPILED, _REGIONAL):
        regional = base == _REGIONAL
        chosen = own or mode or ("default" if regional else "reduce-overhead")
        if chosen not in COMPILE_MODES:
            raise OptionError(f"the compile mode {chosen!r} is unknown", f"one of {', '.join(COMPILE_MODES)}")
        return Rival(f"{base}:{chosen}", "torch", chosen, regional)
    return Rival(base, "torch", xformers=True) if base == _XFORMERS else Rival(base, base)


def _configured(rival: Rival, config: str | None, settings: Mapping[str, Any], types: Mapping[str, Any]) -> Rival:
    """Return a rival with the configuration of its compiler.

    Args:
        rival: the rival.
        config: the options of sdonnx-compile.
        settings: arguments of torch.compile other than the mode.
        types: options of sdonnx-compile that quantize.
    """
    if rival.engine == SdonnxCompileEngine.name:
        check_options(config)
        if types:
            is_mode = config is not None and not config.lstrip().startswith("{")
            given: dict[str, Any] = {"mode": config} if is_mode else json.loads(config or "{}")
            modes = [each["mode"] for each in (given, types) if each.get("mode")]
            config = json.dumps({**given, **types} | ({"mode": ":".join(modes)} if modes else {}))
            check_options(config)
        return replace(rival, compiler_config=config)
    return replace(rival, compiler_config=json.dumps(settings)) if rival.compile_mode and settings else rival


def _torch_settings(config: str) -> dict[str, Any]:
    """Return the arguments of torch.compile that a JSON object or a mode describes."""
    if not config.lstrip().startswith("{"):
        return {"mode": config}
    try:
        settings: dict[str, Any] = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--compiler_config is no JSON ({error})", "a JSON object, or a mode") from error
    for name, value in settings.items():
        if name not in _TORCH_KEYS:
            raise OptionError(f"the key {name!r} of --compiler_config is unknown", f"some of {', '.join(_TORCH_KEYS)}")
        if not isinstance(value, _TORCH_KEYS[name]):
            expected = "a mode" if name == "mode" else "true or false"
            raise OptionError(f"{name} of --compiler_config is {value!r}", expected)
    return settings
