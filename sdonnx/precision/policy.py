"""Precision of a pipeline and of each of its components: the type to compute in, and the exceptions.

`Precision` is the user's choice for a whole pipeline. `PrecisionPolicy` is the part of it that concerns one component,
in the types of onnx_ir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

import onnx_ir as ir

from sdonnx.errors import OptionError
from sdonnx.graph.modules import module_paths

__all__ = ["MIN_NORM_SCALE", "Precision", "PrecisionPolicy", "matches", "parse_norm_scales", "parse_overrides"]

MIN_NORM_SCALE = 2.0**-15
"""The smallest factor of the inputs of group norms: below it, most weights of a layer are subnormal in fp16."""

_DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Precision:
    """The types that a pipeline computes in.

    Attributes:
        dtype: the type of everything that `keep_float32` does not match: "float32" or "float16".
        fallback: the type of everything that `keep_float32` matches: "float32", or "bfloat16", which has the range of
            float32 and 8 bits of precision. An operator without a bfloat16 kernel stays in float32.
        keep_float32: operators and modules that stay out of float16, as `COMPONENT:OPERATOR`, such as
            `unet:MultiHeadAttention`, or `COMPONENT:MODULE`, such as `unet:mid_block.*`.
        norm_scale: factors of the values that group norms read, as `COMPONENT:FACTOR`, such as `vae_decoder:1/128`.
            Components that it does not name have the default of their specification.

    Raises:
        OptionError: a type is unknown, or float32 has exceptions.
    """

    dtype: str = "float32"
    fallback: str = "float32"
    keep_float32: tuple[str, ...] = ()
    norm_scale: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16"):
            raise OptionError(f"the precision {self.dtype!r}", "float32 or float16")
        if self.fallback not in ("float32", "bfloat16"):
            raise OptionError(f"the fallback precision {self.fallback!r}", "float32 or bfloat16")
        if self.keep_float32 and not self.is_reduced:
            raise OptionError("--force_fp32_ops without --float16", "both", "add --float16")
        if self.norm_scale and not self.is_reduced:
            raise OptionError("--norm_scale without --float16", "both", "add --float16")
        if self.fallback != "float32" and not self.is_reduced:
            expected = "both, because --bfloat16 applies to nodes that stay out of float16"
            raise OptionError("--bfloat16 without --float16", expected, "add --float16")

    @classmethod
    def from_flags(
        cls,
        float16: bool = False,
        bfloat16: bool = False,
        force_fp32_ops: Sequence[str] = (),
        norm_scale: Sequence[str] = (),
    ) -> Precision:
        """Return the precision that the command line's flags of these names describe.

        Raises:
            OptionError: another flag is given without `float16`.
        """
        dtype, fallback = "float16" if float16 else "float32", "bfloat16" if bfloat16 else "float32"
        return cls(dtype, fallback, tuple(force_fp32_ops), tuple(norm_scale))

    @property
    def is_reduced(self) -> bool:
        """Whether the pipeline computes in less than float32."""
        return self.dtype != "float32"

    def flags(self) -> dict[str, Any]:
        """Return the flags next to `--float16` by their names, as the report of an optimized folder lists them."""
        flags = {"force_fp32_ops": list(self.keep_float32), "bfloat16": self.fallback == "bfloat16"}
        return flags | ({"norm_scale": list(self.norm_scale)} if self.norm_scale else {})

    def policies(self, components: Sequence[str]) -> dict[str, PrecisionPolicy]:
        """Return the policy of each component by its name.

        Raises:
            OptionError: an entry of `keep_float32` or `norm_scale` names none of the components.
        """
        overrides = parse_overrides(self.keep_float32, components)
        scales = parse_norm_scales(self.norm_scale, components)
        dtype, fallback = _DTYPES[self.dtype], _DTYPES[self.fallback]
        return {
            name: PrecisionPolicy(dtype, patterns, fallback, scales.get(name)) for name, patterns in overrides.items()
        }


@dataclass(frozen=True)
class PrecisionPolicy:
    """The types that the nodes of one component compute in.

    Attributes:
        dtype: the type of every node that no pattern matches.
        float32: patterns of nodes that stay out of `dtype`: an operator's exact name (`MultiHeadAttention`), or a
            module path in the syntax of `fnmatch` (`mid_block.*`).
        fallback: the type of nodes that a pattern matches: FLOAT, or BFLOAT16 for operators with a bfloat16 kernel.
        norm_scale: factor of the values that group norms read, a power of two; None for the component's default.

    Raises:
        OptionError: the fallback is another type.
    """

    dtype: ir.DataType = ir.DataType.FLOAT16
    float32: tuple[str, ...] = ()
    fallback: ir.DataType = ir.DataType.FLOAT
    norm_scale: float | None = None

    def __post_init__(self) -> None:
        if self.fallback not in (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
            raise OptionError(f"a fallback of {self.fallback}", "FLOAT or BFLOAT16")

    def override_for(self, node: ir.Node) -> str | None:
        """Return the first pattern of `float32` that matches the node, or None."""
        return next((pattern for pattern in self.float32 if matches(pattern, node)), None)


def matches(pattern: str, node: ir.Node) -> bool:
    """Return whether a pattern names the node's operator or one of the modules that it computes."""
    paths = module_paths(node)
    # With a final dot, so that mid_block.* also matches the module mid_block itself.
    return pattern == node.op_type or any(
        fnmatchcase(path, pattern) or fnmatchcase(f"{path}.", pattern) for path in paths
    )


def parse_overrides(texts: Sequence[str], components: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the patterns of each component from `COMPONENT:OPERATOR` and `COMPONENT:MODULE`.

    Raises:
        OptionError: a text names none of the components.
    """
    overrides: dict[str, list[str]] = {name: [] for name in components}
    for text in texts:
        component, colon, pattern = text.partition(":")
        if not colon or not pattern or component not in overrides:
            raise OptionError(
                f"the override {text!r} names no component",
                f"COMPONENT:OPERATOR or COMPONENT:MODULE with a component of {', '.join(components)}",
                "write for example unet:MultiHeadAttention or unet:mid_block.*",
            )
        overrides[component].append(pattern)
    return {name: tuple(patterns) for name, patterns in overrides.items()}


def parse_norm_scales(texts: Sequence[str], components: Sequence[str]) -> dict[str, float]:
    """Return the factor of each component that `COMPONENT:FACTOR` names.

    Raises:
        OptionError: a text names none of the components, or no power of two from MIN_NORM_SCALE to 1.
    """
    scales: dict[str, float] = {}
    for text in texts:
        component, _, factor = text.partition(":")
        if component not in components:
            raise OptionError(
                f"the factor {text!r} names no component",
                f"COMPONENT:FACTOR with a component of {', '.join(components)}",
                "write for example vae_decoder:1/128",
            )
        try:
            scale = Fraction(factor)
        except (ValueError, ZeroDivisionError):
            scale = Fraction(0)
        # A Fraction is in lowest terms.
        is_power = scale.numerator == 1 and scale.denominator & (scale.denominator - 1) == 0
        if not is_power or scale < MIN_NORM_SCALE:
            raise OptionError(
                f"the factor {factor!r} of {component}",
                f"a power of two from 1/{1 / MIN_NORM_SCALE:.0f} to 1",
                "write for example vae_decoder:1/128",
            )
        scales[component] = float(scale)
    return scales
