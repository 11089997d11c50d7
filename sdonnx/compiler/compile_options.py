"""Options of `compile` and `compile_pipe` in the form of OneDiff's nexfort backend.

They are a dictionary or JSON with some of the keys `mode`, `memory_format`, `dynamic`, `options`, `quant_type` and
`quantize_config`; a string that does not begin with a brace is a mode. A mode is a list of words with colons:
"max-optimize:low-precision:cache-all". Of the words, `O3`, `quant` and `freezing` have an effect; unknown ones are an
error, as they may be misspelled. Of `options`, `check_agreement`, `freezing` and `freeze_processors` have one, and a
line in the log names others: nexfort has many.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError
from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Role

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig

__all__ = [
    "CHECK_AGREEMENT",
    "DENOISERS",
    "FREEZE_PROCESSORS",
    "FREEZING",
    "MODES",
    "CompileOptions",
    "check_backend",
    "check_options",
    "named_quantization",
]

_LOGGER = logging.getLogger(__name__)

MODES: Mapping[str, str] = MappingProxyType(
    {
        "O2": "the usual optimizations, in the type of the module",
        "O3": "8 bits in the denoiser where its error stays within the bound, on GPUs with fp8 matmuls",
        "max-optimize": "no effect: graphs are always optimized",
        "max-autotune": "no effect: kernels are chosen by heuristics and short measurements anyway",
        "benchmark": "no effect",
        "cudagraphs": "no effect: graphs on a GPU are captured anyway",
        "freezing": "torch's copy of the weights leaves the GPU after compiling, the default of compile_pipe",
        "low-precision": "no effect: a graph computes in the type of the module",
        "cache-all": "no effect: graphs are cached on disk anyway",
        "quant": "as O3",
        "jit": "no effect: graphs are traced",
        "disable-runtime-fusion": "no effect: ONNX Runtime's fusions stay on",
    }
)
"""The words of a mode, with their effects here."""

CHECK_AGREEMENT = "check_agreement"
"""The key of `options` in the options that requests `sdonnx.compiler.result_checks.ResultCheck`."""

FREEZING = "freezing"
"""The key of `options`, and the word of a mode, that request `sdonnx.compiler.host_weights.HostWeights`."""

FREEZE_PROCESSORS = "freeze_processors"
"""The key of `options` that requests graphs for attention processors of unknown classes, as they are when traced."""

DENOISERS = tuple(dict.fromkeys(family.with_role(Role.DENOISER).name for family in FAMILIES))
"""Names of the components that are quantized."""

_INNER = (CHECK_AGREEMENT, FREEZING, FREEZE_PROCESSORS)


@dataclass(frozen=True)
class CompileOptions:
    """Options that have an effect.

    Attributes:
        check_agreement: Whether the results of each graph at its first two sizes are compared with the module's own.
        freezing: Whether torch's copy of the weights leaves the GPU; None for the default of the function.
        freeze_processors: Whether modules with attention processors of unknown classes have graphs.
        quantizes: Whether denoisers are quantized to fp8 where fp8 matmuls exist, without a named type.
        quantization: The named types; None without any.
    """

    check_agreement: bool = False
    freezing: bool | None = None
    freeze_processors: bool = False
    quantizes: bool = False
    quantization: QuantizationConfig | None = None


_FORMATS = ("preserve_format", "contiguous_format", "channels_last")
_BACKENDS = ("nexfort", "oneflow")
_KEYS = ("mode", "memory_format", "dynamic", "options", "quant_type", "quantize_config")
_QUANTIZING = ("O3", "quant")


def check_backend(backend: str | None) -> None:
    """Raise unless a backend is one of OneDiff's, which have no effect here.

    Raises:
        OptionError: The backend is unknown.
    """
    if backend is not None and backend not in _BACKENDS:
        raise OptionError(f"the backend {backend!r} is unknown", f"one of {', '.join(_BACKENDS)}")


def check_options(options: Mapping[str, Any] | str | None) -> CompileOptions:
    """Return the options that have an effect.

    Raises:
        OptionError: A key, a word of the mode or a value is unknown, or the text is no JSON.
    """
    content = _parsed(options)
    if unknown := sorted(str(key) for key in content.keys() - set(_KEYS)):
        raise OptionError(f"the option {unknown[0]!r} is unknown", f"some of {', '.join(_KEYS)}")
    words = _words(content.get("mode"))
    chosen = content.get("memory_format")
    if chosen is not None and str(chosen).removeprefix("torch.") not in _FORMATS:
        raise OptionError(f"the memory_format {chosen!r} is unknown", f"one of {', '.join(_FORMATS)}")
    if content.get("dynamic") not in (None, True, False):
        raise OptionError(f"dynamic is {content['dynamic']!r}", "true or false")
    inner = content.get("options") or {}
    if not isinstance(inner, Mapping):
        raise OptionError(f"options is {content['options']!r}", "an object")
    for name in _INNER:
        if inner.get(name) not in (None, True, False):
            raise OptionError(f"{name} is {inner[name]!r}", "true or false")
    if idle := sorted(str(key) for key in inner.keys() - set(_INNER)):
        _note_idle(", ".join(idle))
    freezing = inner.get(FREEZING)
    if freezing is None and FREEZING in words:
        freezing = True
    return CompileOptions(
        bool(inner.get(CHECK_AGREEMENT)),
        None if freezing is None else bool(freezing),
        bool(inner.get(FREEZE_PROCESSORS)),
        any(word in words for word in _QUANTIZING),
        named_quantization(content.get("quant_type"), content.get("quantize_config")),
    )


@functools.cache
def _note_idle(names: str) -> None:
    """Log options without effect, once in a process: all components of a pipeline have the same options."""
    _LOGGER.warning("options without effect: %s; those with one are %s", names, ", ".join(_INNER))


def named_quantization(name: Any, config: Any) -> QuantizationConfig | None:
    """Return the quantization that options name, None without a type and a configuration.

    Args:
        name: A type, or None.
        config: A configuration as of `sdonnx optimize --quantize-config`: a dictionary, JSON or a file; or None.

    Raises:
        OptionError: A type is unknown or needs a calibration, or the configuration cannot be used.
    """
    if name is None and config is None:
        return None
    # They import onnx_ir, which loading a cached graph does not need.
    from sdonnx.quantization.quantization_config import QuantizationConfig
    from sdonnx.quantization.quantization_types import NOT_QUANTIZED, quantization_type

    if config is not None and not isinstance(config, Mapping | str):
        raise OptionError(f"quantize_config is {config!r}", "a dictionary, JSON or a file of JSON")
    if name is not None and name != NOT_QUANTIZED:
        quantization_type(name)
    text = json.dumps(dict(config)) if isinstance(config, Mapping) else config
    found = QuantizationConfig.from_flags(name, text)
    assert found is not None  # one of them is given
    if found.needs_calibration:
        static = next(each.name for each in found.types if each.is_static)
        raise OptionError(f"{static}, which needs a calibration", "a dynamic type or one of weights only",
                          "take int8_dynamic or fp8, or quantize a folder with sdonnx optimize")  # fmt: skip
    for pattern, _ in found.modules:
        if pattern.partition(":")[0] not in DENOISERS:
            raise OptionError(
                f"the quantized module {pattern!r}", f"COMPONENT:MODULE with a component of {', '.join(DENOISERS)}",
                "leave it out, or quantize a folder with sdonnx optimize",
            )  # fmt: skip
    return found


def _words(mode: Any) -> list[str]:
    """Return the words of a mode."""
    if mode is None:
        return []
    words = mode.split(":") if isinstance(mode, str) else [repr(mode)]
    if wrong := [word for word in words if word not in MODES]:
        raise OptionError(f"the mode {wrong[0]!r} is unknown", f"some of {', '.join(MODES)}, with colons")
    return words


def _parsed(options: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if options is None or isinstance(options, Mapping):
        return options or {}
    if not isinstance(options, str):
        raise OptionError(f"options are {options!r}", "a dictionary, JSON or a mode")
    if not options.lstrip().startswith("{"):
        return {"mode": options}
    try:
        found = json.loads(options)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"options are no JSON ({error})", "a JSON object") from error
    assert isinstance(found, dict)  # the text begins with a brace
    return found
