"""The record of a fusion: the single place for every fact about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from sdonnx.fusions.channels_last import Converter
from sdonnx.graph.match import PassOutcome, Rule, WalkRule
from sdonnx.models.spec import Role

__all__ = ["ATTENTION_LAYOUTS", "PROVIDERS", "Flag", "Fusion", "LayerKind"]

PROVIDERS = ("cuda", "cpu")
ATTENTION_LAYOUTS = ("unpacked", "packed_kv", "packed_qkv")


@dataclass(frozen=True)
class Flag:
    """An option that leaves fusions out: `--disable_<name>`.

    Attributes:
        name: its name.
        help: its line in `--help` and in the documentation.
    """

    name: str
    help: str

    @property
    def option(self) -> str:
        """The option of the command line."""
        return f"--disable_{self.name}"


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer that is counted before and after fusing, and compared with the architecture.

    Attributes:
        name: its name, of `sdonnx.models.layer_counts.KINDS`.
        exported_as: the operators that exporters write it with.
        standard: operators that count as fused although no fusion emits them.
        counted_by: the stage and rule with the firings to count, where emitted operators also have other sources.
    """

    name: str
    exported_as: tuple[str, ...]
    standard: tuple[str, ...] = ()
    counted_by: tuple[str, str] | None = None


@dataclass(frozen=True)
class Fusion:
    """One fusion: its rules, its provider, and how it is disabled and reported.

    A fusion has rules, walk rules or both; or a pass; or an operator that the channels-last pass converts.

    Attributes:
        name: its name.
        rules: the rules, each applied once to every node.
        commute: also match commutative operators of the rules with their operands swapped.
        walk_rules: the walk rules, applied until none fires.
        run: the pass.
        converts: the operator that the channels-last pass converts for this fusion, and how.
        stage: the stage of the report that it belongs to, by default its name. Neighbouring fusions of one stage run
            together.
        canonicalizes: it rewrites an exporter's idiom to standard operators. Shapes are inferred again after it.
        flag: the option that disables it; None for a fusion that is always on.
        emits: the contrib operators that it emits.
        cpu: whether it also runs for the CPU provider, which then has kernels for `emits`.
        attention_layouts: the input layouts of MultiHeadAttention that it is for.
        fuses: the kind of layer that it turns into `emits`.
        extends: the kind of layer, already fused or standard, that it replaces by `emits`.
        occurs_with: the kinds of layers that it occurs with, by default the kind that it fuses or extends.
        depends_on: the fusions without which it may have nothing to do.
        leaves_none: the standard operators that no longer occur after it; those left are reported.
        leaves_none_in: the roles for which `leaves_none` holds; None for all.
        expected_in: the roles of components in which it must fire; where it does not, the report warns.
    """

    name: str
    rules: tuple[type[Rule], ...] = ()
    commute: bool = False
    walk_rules: tuple[type[WalkRule], ...] = ()
    run: Callable[[ir.Model], PassOutcome] | None = None
    converts: tuple[str, Converter] | None = None
    stage: str = ""
    canonicalizes: bool = False
    flag: Flag | None = None
    emits: tuple[str, ...] = ()
    cpu: bool = False
    attention_layouts: tuple[str, ...] = ATTENTION_LAYOUTS
    fuses: LayerKind | None = None
    extends: LayerKind | None = None
    occurs_with: tuple[LayerKind, ...] = ()
    depends_on: tuple[str, ...] = ()
    leaves_none: tuple[str, ...] = ()
    leaves_none_in: frozenset[Role] | None = None
    expected_in: frozenset[Role] = frozenset()

    @property
    def stage_name(self) -> str:
        """The stage of the report that it belongs to."""
        return self.stage or self.name

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that it occurs with."""
        return self.occurs_with or tuple(kind for kind in (self.fuses, self.extends) if kind is not None)

    def runs_for(self, provider: str) -> bool:
        """Return whether it runs for a provider, "cuda" or "cpu"."""
        return self.cpu or provider == "cuda"
