"""The configuration of a quantization: which modules get which type, as OneDiff's options and files say it.

A configuration is a JSON object:

- `quant_type`: the type of the denoiser's matmuls and convolutions, but for the modules of `KEPT_MODULES`.
- `modules`: `COMPONENT:MODULE` -> a type, or "none". The first entry that matches a module decides. `MODULE` is a path
  in the syntax of fnmatch, as for `--force_fp32_ops`. It may name the modules of `KEPT_MODULES` and other components.
- `top_percentage`: the share of the modules in the file of `--quant_submodules_config_path` that is quantized, those
  with the highest SSIM; 90 by default.
- `submodules`: instead of that file, the paths or patterns of the denoiser's modules that get `quant_type`.

The file is `{MODULE: {"ssim": x}, ...}` with paths of the denoiser's modules; others then stay as they are.

`calibration.json` has the largest magnitude of the activations that each module reads; scales are computed from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sdonnx.errors import FolderError, OptionError
from sdonnx.folder.pipeline_folder import read_json
from sdonnx.quantization.quantization_types import NOT_QUANTIZED, QuantizationType, quantization_type

__all__ = [
    "CALIBRATION",
    "FP8_CAPABILITY",
    "KEPT_MODULES",
    "QuantizationConfig",
    "QuantizationPolicy",
    "covers",
    "read_calibration",
    "read_submodules",
    "require_fp8_matmuls",
    "write_calibration",
]

KEPT_MODULES = (
    "time_embedding", "time_embedding.*", "*.time_emb_proj", "add_embedding", "add_embedding.*", "adaln_single",
    "adaln_single.*", "conv_in", "conv_out", "*.conv_shortcut", "pos_embed", "pos_embed.*", "proj_out", "norm_out",
    "norm_out.*",
)  # fmt: skip
"""Modules of a denoiser that stay as they are unless `modules` names them.

They are embeddings of time and sizes, first and last layers, and shortcuts, which NVIDIA's Model Optimizer and
TheStage's entry to MLPerf 5.1 also keep. All of them compute little.
"""

_ENTRIES = ("quant_type", "modules", "top_percentage", "submodules")

_TOP_PERCENTAGE = 90.0  # OneDiff's default

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class QuantizationPolicy:
    """The types of one component's modules.

    Attributes:
        modules: patterns of module paths with their types; None for no quantization. The first that matches decides.
        default: the type of other modules; None for no quantization.
        only: patterns of the modules that `default` is for; None for all but `KEPT_MODULES`.
    """

    modules: tuple[tuple[str, QuantizationType | None], ...] = ()
    default: QuantizationType | None = None
    only: tuple[str, ...] | None = None

    @property
    def is_active(self) -> bool:
        """Whether any module may be quantized."""
        return self.default is not None or any(found is not None for _, found in self.modules)

    def type_of(self, paths: Collection[str]) -> QuantizationType | None:
        """Return the type of a matmul, None if it stays as it is.

        Args:
            paths: the modules that the matmul computes; none if they are unknown. A matmul that computes several
                modules is quantized if all of them are, with the type of the first.
        """
        found = [self._type_of_module(path) for path in paths or ("",)]
        return None if None in found else found[0]

    def names(self, paths: Collection[str]) -> bool:
        """Return whether entries of `modules` decide the type of a matmul, whatever `only` says.

        Args:
            paths: the modules that the matmul computes.
        """
        return all(any(covers(pattern, path) for pattern, _ in self.modules) for path in paths)

    def _type_of_module(self, path: str) -> QuantizationType | None:
        for pattern, found in self.modules:
            if covers(pattern, path):
                return found
        if self.only is not None:
            return self.default if any(covers(pattern, path) for pattern in self.only) else None
        return None if any(fnmatchcase(path, pattern) for pattern in KEPT_MODULES) else self.default


@dataclass(frozen=True)
class QuantizationConfig:
    """What to quantize in a pipeline, and how.

    Attributes:
        default: the type of the denoiser's modules; None for those in `modules` only.
        modules: `COMPONENT:MODULE` with a type, None for no quantization. The first that matches a module decides.
        only: the denoiser's modules that `default` is for; None for all but `KEPT_MODULES`.
    """

    default: QuantizationType | None = None
    modules: tuple[tuple[str, QuantizationType | None], ...] = field(default=())
    only: tuple[str, ...] | None = None

    @property
    def types(self) -> tuple[QuantizationType, ...]:
        """The types that modules may get, each once."""
        named = [self.default, *(kind for _, kind in self.modules)]
        return tuple(dict.fromkeys(kind for kind in named if kind is not None))

    @classmethod
    def from_flags(
        cls, quantize: str | None, config: str | None = None, submodules: Path | None = None
    ) -> QuantizationConfig | None:
        """Return the configuration that the command line describes; None if it asks for no quantization.

        Args:
            quantize: the value of `--quantize`: a type; "" for the flag without a value; None without the flag.
            config: the value of `--quantize_config`: a JSON object, or a file that contains one.
            submodules: the file of `--quant_submodules_config_path`.

        Raises:
            OptionError: a value cannot be used.
        """
        if quantize is None and config is None:
            if submodules is not None:
                found = "--quant_submodules_config_path without --quantize"
                raise OptionError(found, "both", "add --quantize with a type")
            return None
        content = {} if config is None else _parsed(config)
        unknown = sorted(content.keys() - set(_ENTRIES))
        if unknown:
            found = f"the quantization configuration has the entry {unknown[0]!r}"
            raise OptionError(found, f"some of {', '.join(_ENTRIES)}")
        modules = _module_types(content.get("modules", {}))
        name = quantize or content.get("quant_type") or (None if modules else "fp8")
        if quantize and content.get("quant_type", quantize) != quantize:
            found = f"--quantize {quantize} and a quant_type of {content['quant_type']!r}"
            raise OptionError(found, "one type", "leave one of them out")
        default = None if name in (None, NOT_QUANTIZED) else quantization_type(name)
        if submodules is None:
            if "top_percentage" in content:
                found = "top_percentage without --quant_submodules_config_path"
                raise OptionError(found, "both", "leave out top_percentage")
            return cls(default, modules, _listed(content.get("submodules")))
        if "submodules" in content:
            found = "submodules in the configuration and --quant_submodules_config_path"
            raise OptionError(found, "one of them")
        return cls(default, modules, read_submodules(submodules, content.get("top_percentage", _TOP_PERCENTAGE)))

    @property
    def needs_calibration(self) -> bool:
        """Whether a type has scales of activations that are calibrated."""
        types = (self.default, *(found for _, found in self.modules))
        return any(found is not None and found.is_static for found in types)

    def policies(self, components: Collection[str], denoiser: str) -> dict[str, QuantizationPolicy]:
        """Return the policy of each component by its name.

        Args:
            components: the names of all components.
            denoiser: the name of the denoiser.

        Raises:
            OptionError: an entry of `modules` names none of the components.
        """
        named: dict[str, list[tuple[str, QuantizationType | None]]] = {name: [] for name in components}
        for text, found in self.modules:
            component, colon, pattern = text.partition(":")
            if not colon or not pattern or component not in named:
                raise OptionError(
                    f"the quantized module {text!r} names no component",
                    f"COMPONENT:MODULE with a component of {', '.join(components)}",
                    f"write for example {denoiser}:*.attn1.*",
                )
            named[component].append((pattern, found))
        return {
            name: QuantizationPolicy(tuple(patterns), *((self.default, self.only) if name == denoiser else ()))
            for name, patterns in named.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as JSON values, which `from_flags` reads; modules of a file become entries."""
        name = NOT_QUANTIZED if self.default is None else self.default.name
        modules = {pattern: NOT_QUANTIZED if found is None else found.name for pattern, found in self.modules}
        found = {"quant_type": name, "modules": modules}
        return found if self.only is None else found | {"submodules": list(self.only)}


def covers(pattern: str, path: str) -> bool:
    """Return whether a pattern names a module; `mid_block.*` also names `mid_block` itself."""
    return fnmatchcase(path, pattern) or fnmatchcase(f"{path}.", pattern)


def read_submodules(path: Path, top_percentage: object = _TOP_PERCENTAGE) -> tuple[str, ...]:
    """Return the modules with the highest SSIM in a file of OneDiff's form, the highest first.

    Args:
        path: a file with `{MODULE: {"ssim": x}, ...}`.
        top_percentage: the share of the modules to return, in percent, rounded down.

    Raises:
        OptionError: the file cannot be read or has another form, or the share is none.
    """
    if isinstance(top_percentage, bool) or not isinstance(top_percentage, int | float) or not 0 < top_percentage <= 100:
        raise OptionError(f"a top_percentage of {top_percentage!r}", "a number above 0 and at most 100")
    content = _object(_text_of(path), str(path))
    similarity = {}
    for name, entry in content.items():
        number = entry.get("ssim") if isinstance(entry, Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            expected = '{"MODULE": {"ssim": a number}, ...}'
            raise OptionError(f"{path} says {entry!r} for {name!r}", expected)
        similarity[name] = float(number)
    ordered = sorted(similarity, key=lambda name: similarity[name], reverse=True)
    chosen = tuple(ordered[: int(len(ordered) * top_percentage / 100)])
    if not chosen:
        found = f"{top_percentage:g} % of the {len(ordered)} modules in {path} are none"
        raise OptionError(found, "at least one module", "list more modules, or raise top_percentage")
    return chosen


def _parsed(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is, or that the file of that name contains."""
    if text.lstrip().startswith("{"):
        return _object(text, "--quantize_config")
    return _object(_text_of(Path(text)), text)


def _text_of(path: Path) -> str:
    try:
        if not path.is_file() and path.exists():  # reading from a pipe would block
            raise OSError("it is not a file")
        if path.stat().st_size > _MAX_BYTES:
            raise OSError(f"it has more than {_MAX_BYTES >> 20} MB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path} cannot be read ({reason})", "a file with a JSON object") from None


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is no JSON ({error})", 'an object such as {"quant_type": "int8_weightonly"}',
                          "correct it, with double quotes around names") from None  # fmt: skip
    if not isinstance(content, dict):
        raise OptionError(f"{name} holds a {type(content).__name__}", "a JSON object")
    return content


def _listed(entries: object) -> tuple[str, ...] | None:
    if entries is None:
        return None
    if not isinstance(entries, list) or not entries or not all(isinstance(each, str) for each in entries):
        found = f"submodules of the quantization configuration is {entries!r}"
        raise OptionError(found, "a list of modules", "correct it, or leave it out")
    return tuple(entries)


def _module_types(entries: object) -> tuple[tuple[str, QuantizationType | None], ...]:
    if not isinstance(entries, Mapping):
        found = f"modules of the quantization configuration is a {type(entries).__name__}"
        raise OptionError(found, 'an object {"COMPONENT:MODULE": TYPE, ...}')
    return tuple(
        (str(pattern), None if name in (None, NOT_QUANTIZED) else quantization_type(name))
        for pattern, name in entries.items()
    )


FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply numbers of fp8 (NVIDIA, cuBLAS documentation, cublasLtMatmul())."""


def require_fp8_matmuls(config: QuantizationConfig, capability: tuple[int, int] | None, also: str = "") -> None:
    """Raise if a GPU has no matmuls of a type's factors in fp8.

    Args:
        config: the types.
        capability: compute capability of the GPU, major and minor; None if matmuls do not depend on a GPU.
        also: what else the user can do; it follows the types that the GPU has.

    Raises:
        OptionError: it has none.
    """
    if capability is None or capability >= FP8_CAPABILITY:
        return
    for kind in config.types:
        if kind.activations is not None and kind.activations.name != "int8":
            raise OptionError(
                f"{kind.name} on a GPU of compute capability {capability[0]}.{capability[1]}",
                f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer, which has fp8 matmuls",
                f"take int8_dynamic or fp8_e4m3_weightonly{also}",
            )


CALIBRATION = "calibration.json"
"""The file in an optimized folder that is quantized to types with calibrated scales."""


def write_calibration(folder: Path, scales: Mapping[str, Mapping[str, float]]) -> None:
    """Write the magnitudes by component and module into a folder."""
    (folder / CALIBRATION).write_text(json.dumps({"components": scales}, indent=2) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> dict[str, dict[str, float]]:
    """Return the magnitudes by component and module from a file, or from the file in an optimized folder.

    Raises:
        OptionError: the file is missing or has another form, or a magnitude is zero, infinite or no number.
    """
    path = path / CALIBRATION if path.is_dir() else path
    try:
        components = read_json(path).get("components")
    except FolderError as error:
        expected = f"{CALIBRATION} of a folder that was calibrated"
        raise OptionError(error.found, expected, "calibrate with --calibration_prompts") from None
    if not isinstance(components, Mapping) or not all(isinstance(each, Mapping) for each in components.values()):
        expected = '{"components": {COMPONENT: {MODULE: a magnitude}}}'
        raise OptionError(f"{path} holds no magnitudes by component", expected, "calibrate with --calibration_prompts")
    for component, modules in components.items():
        for module, most in modules.items():
            is_number = isinstance(most, int | float) and not isinstance(most, bool)
            if not is_number or not math.isfinite(most) or most <= 0:
                raise OptionError(
                    f"{path} says {most!r} for {component}:{module}, whose scale would be zero or infinite",
                    "a positive number",
                    "calibrate with --calibration_prompts",
                )
    return {name: {module: float(most) for module, most in modules.items()} for name, modules in components.items()}
