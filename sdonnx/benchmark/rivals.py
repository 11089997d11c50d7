"""The engines by the names that `-e` takes, with how they are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdonnx.benchmark.engines import COMPILE_MODES, ENGINES
from sdonnx.errors import OptionError

__all__ = ["NAMES", "Rival", "rivals_of"]

_COMPILED, _REGIONAL, _XFORMERS = "torch-compile", "torch-regional", "torch-xformers"

NAMES = (*ENGINES, _XFORMERS, _COMPILED, _REGIONAL)
"""What `-e` takes; the last two also with a mode, as in `torch-compile:max-autotune`."""


@dataclass(frozen=True)
class Rival:
    """An engine as a comparison knows it.

    Attributes:
        title: what the table calls it.
        engine: its key in `ENGINES`.
        compile_mode: torch.compile's; None to compile nothing.
        regional: compile the denoiser's repeated blocks alone.
        xformers: use xformers' attention.
    """

    title: str
    engine: str
    compile_mode: str | None = None
    regional: bool = False
    xformers: bool = False


def rivals_of(
    names: Sequence[str], *, compiled: bool = False, mode: str | None = None, xformers: bool = False
) -> list[Rival]:
    """Return the engines that `-e` and its companions name, each once.

    Args:
        names: of `NAMES`, the compiled ones with or without ":MODE".
        compiled: `--enable_torch_compile`: compile the engine torch.
        mode: `--compile_mode`, for those that name none; by default what torch's users take: reduce-overhead
            for a whole model, default for its blocks, which are too many to record one by one.
        xformers: `--use_xformers`: the engine torch becomes torch-xformers.

    Raises:
        OptionError: a name or a mode is unknown, or an option suits none of the engines.
    """
    rivals = [_rival(name, compiled, mode, xformers) for name in names]
    if compiled and "torch" not in names:
        raise OptionError(
            "--enable_torch_compile without the engine torch", "both", f"leave it out, or add {_COMPILED}"
        )
    if mode is not None and not any(rival.compile_mode for rival in rivals):
        raise OptionError("--compile_mode without --enable_torch_compile", "both", "add --enable_torch_compile")
    if xformers and compiled:
        # Fusing the QKV projections, as compiled models have it, takes the place of xformers' attention.
        raise OptionError("--use_xformers and --enable_torch_compile", "one of them", "leave one out")
    if xformers and "torch" not in names:
        raise OptionError("--use_xformers without the engine torch", "both", "leave it out, or add -e torch")
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
