"""`python -m sdonnx.optimize_pipeline -i IN -o OUT --float16`: ONNX components to a fast folder.

The options that ONNX Runtime's script of this name has are called as they are there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdonnx.terminal import add_debug, console, guarded, tensor_progress

if TYPE_CHECKING:
    from rich.table import Table

    from sdonnx.optimize import OptimizeReport

__all__ = ["add_arguments", "fusion_table", "main", "run"]

# What a reader of the table looks for, in the order of the stages.
_SHOWN = (
    "MultiHeadAttention",
    "BiasSplitGelu",
    "GroupNorm",
    "SkipGroupNorm",
    "LayerNormalization",
    "SkipLayerNormalization",
    "BiasAdd",
    "NhwcConv",
    "Conv",
    "MatMul",
    "Transpose",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Fuse the graphs of an exported pipeline for ONNX Runtime's kernels."
    parser.add_argument("-i", "--input", required=True, type=Path, help="the exported folder")
    parser.add_argument("-o", "--output", required=True, type=Path, help="the folder to write")
    parser.add_argument("--float16", action="store_true", help="convert to fp16")
    parser.add_argument(
        "--force_fp32_ops",
        nargs="+",
        default=[],
        metavar="COMPONENT:WHAT",
        help="what stays in float32: an operator (unet:MultiHeadAttention) or a module (unet:mid_block.*)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if a pipeline is there")
    parser.add_argument("--provider", default="cuda", help="the provider to optimize for: cuda (default) or cpu")
    parser.add_argument(
        "--attention_layout",
        default="unpacked",
        help="input of MultiHeadAttention: unpacked (default; best from sm_90 on), packed_kv or packed_qkv",
    )
    add_debug(parser)


def fusion_table(report: OptimizeReport) -> Table:
    """Return the counts of fused operators, a column for each component."""
    from rich.table import Table

    table = Table(title=f"operators for {report.provider}, {report.precision}")
    table.add_column("operator")
    for name in report.components:
        table.add_column(name, justify="right")
    for operator in _SHOWN:
        counts = [component.operators_after.get(operator, 0) for component in report.components.values()]
        if any(counts):
            table.add_row(operator, *(str(count) if count else "" for count in counts))
    totals = [
        f"{sum(component.operators_before.values())} -> {sum(component.operators_after.values())}"
        for component in report.components.values()
    ]
    table.add_row("all nodes", *totals, style="bold")
    return table


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from sdonnx.optimize import optimize_folder

    with tensor_progress() as told:
        report = optimize_folder(
            options.input,
            options.output,
            provider=options.provider,
            float16=options.float16,
            force_fp32_ops=options.force_fp32_ops,
            attention_layout=options.attention_layout,
            overwrite=options.overwrite,
            progress=told,
        )
    out = console()
    out.print(fusion_table(report))
    for component in report.components.values():
        for operator, count in component.left.items():
            out.print(f"{component.name}: {count} {operator} not fused; {options.output}/sdonnx.json says why")
    out.print(f"optimized to {options.output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m sdonnx.optimize_pipeline")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
