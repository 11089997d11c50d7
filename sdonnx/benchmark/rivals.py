"""Parse the engine names of `-e`, including how an engine is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdonnx.benchmark.engines import COMPILE_MODES, ENGINES
from sdonnx.errors import OptionError

__all__ = ["NAMES", "Rival", "parse_rivals"]

_COMPILED, _REGIONAL, _XFORMERS = "torch-compile", "torch-regional", "torch-xformers"

NAMES = (*ENGINES, _XFORMERS, _COMPILED, _REGIONAL)
"""Values of `-e`; the last two also accept a mode, as in `torch-compile:max-autotune`."""


@dataclass(frozen=True)
class Rival:
    """A configured engine of a comparison.

    Attributes:
        title: title in tables.
        engine: key in `ENGINES`.
        compile_mode: mode of torch.compile; None to compile nothing.
        regional: compile only the denoiser's repeated blocks.
        xformers: use xformers' attention.
    """

    title: str
    engine: str
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False


def parse_rivals(
    names: Sequence[str], *, compiled: bool = False, mode: str | None = None, xformers: bool = False
) -> list[Rival]:
    """Return the engines that `-e` and related options select, without duplicates.

    Args:
        names: elements of `NAMES`, the compiled ones with or without ":MODE".
        compiled: `--enable_torch_compile`: compile the engine torch.
        mode: `--compile_mode`, for compiled engines without a mode. Default, as is common with torch: reduce-overhead
            for a whole model; default for its blocks, which are too many to capture one by one.
        xformers: `--use_xformers`: the engine torch becomes torch-xformers.

    Raises:
        OptionError: a name or a mode is unknown, or an option applies to none of the engines.
    """
    rivals = [_rival(name, compiled, mode, xformers) for name in names]
    if compiled and "torch" not in names:
        raise OptionError(
            "--enable_torch_compile without the engine torch", "both", f"omit the option, or add {_COMPILED}"
        )
    if mode is not None and not any(rival.compile_mode for rival in rivals):
        raise OptionError("--compile_mode without --enable_torch_compile", "both", "add --enable_torch_compile")
    if xformers and compiled:
        # Compiled models fuse the QKV projections, which replaces xformers' attention.
        raise OptionError("--use_xformers and --enable_torch_compile", "one of them", "omit one")
    if xformers and "torch" not in names:
        raise OptionError("--use_xformers without the engine torch", "both", "omit the option, or add -e torch")
    return list(dict.fromkeys(rivals))


def _rival(name: str, compiled: bool, mode: str | None, xformers: bool) -> Rival:
    base, _, own = name.partition(":")
    if base == "torch":
        base = _COMPILED if compiled else _XFORMERS if xformers else base
    if base not in NAMES or (own and base not in (_COMPILED, _REGIONAL)):
        raise OptionError(f"the engine {name!r} is unknown", f"one of {', '.join(NAMES)}", "pass one")
    if base in (_COMPILED, _REGIONAL):
        regional = base == _REGIONAL
        chosen = own or mode or ("default" if regional else "reduce-overhead")
        if chosen not in COMPILE_MODES:
            raise OptionError(
                f"the compile mode {chosen!r} is unknown", f"one of {', '.join(COMPILE_MODES)}", "pass one"
            )
        return Rival(f"{base}:{chosen}", "torch", chosen, regional)
    return Rival(base, "torch", xformers=True) if base == _XFORMERS else Rival(base, base)
