"""`python -m sdonnx.optimize_pipeline -i IN -o OUT --float16`: ONNX components to a fast folder.

The options that ONNX Runtime's script of this name has are called as they are there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx.automatic import AUTO
from sdonnx.errors import OptionError
from sdonnx.prompts import read_prompts
from sdonnx.terminal import add_debug, console, guarded, tensor_progress

if TYPE_CHECKING:
    from rich.table import Table

    from sdonnx.optimize import OptimizeReport, OptimizeRequest, Progress

__all__ = ["add_arguments", "automatic_lines", "fusion_table", "main", "run"]

# What a reader of the table looks for, in the order of the stages.
_SHOWN = (
    "MultiHeadAttention",
    "BiasSplitGelu",
    "GroupNorm",
    "SkipGroupNorm",
    "LayerNormalization",
    "SkipLayerNormalization",
    "RMSNormalization",
    "SkipSimplifiedLayerNormalization",
    "FastGelu",
    "BiasAdd",
    "NhwcConv",
    "Conv",
    "MatMul",
    "FusedMatMul",
    "Transpose",
)


# The fusion that an option leaves out, and what it then says.
_DISABLE = {
    "attention": "make no MultiHeadAttention",
    "group_norm": "make no GroupNorm (and no SkipGroupNorm)",
    "skip_group_norm": "make no SkipGroupNorm",
    "skip_layer_norm": "make no SkipLayerNormalization (and none of RMS norms)",
    "bias_splitgelu": "make no BiasSplitGelu",
    "bias_add": "make no BiasAdd",
    "fast_gelu": "make no FastGelu",
    "modulation": "leave scales and shifts behind their norms, where PixArt has them",
    "gates": "multiply results by gates, not weights, where PixArt has them",
    "residual_gemm": "add a residual behind a product by BiasAdd, where PixArt has it",
    "key_lengths": "mask padding by a bias on all scores, not by the number of keys",
    "attention_biases": "add the biases of keys and values where they are",
    "nhwc_conv": "make no NhwcConv",
    "packed_qkv": "with packed_qkv: pack self attention's keys and values alone",
    "packed_kv": "with packed_kv or packed_qkv: pack no keys and values alone, as cross attention's are",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Fuse the graphs of an exported pipeline for ONNX Runtime's kernels."
    folders = parser.add_argument_group("folders")
    folders.add_argument("-i", "--input", required=True, type=Path, help="the exported folder, whoever exported it")
    folders.add_argument("-o", "--output", required=True, type=Path, help="the folder to write")
    folders.add_argument("--overwrite", action="store_true", help="replace the output if a pipeline is there")
    folders.add_argument(
        "-e",
        "--use_external_data_format",
        action="store_true",
        help="keep weights in a file beside each graph; they always are, the option is accepted for old command lines",
    )
    folders.add_argument(
        "--inspect",
        action="store_true",
        help="also write what ONNX Runtime itself makes of each graph, as inspect.onnx beside it",
    )
    precision = parser.add_argument_group("precision")
    precision.add_argument("--float16", action="store_true", help="convert to fp16")
    precision.add_argument(
        "--force_fp32_ops",
        nargs="+",
        default=[],
        metavar="COMPONENT:WHAT",
        help="what stays in float32: an operator (unet:MultiHeadAttention) or a module (unet:mid_block.*); auto finds "
        "the smallest set that draws what float32 does",
    )
    precision.add_argument("--auto_prompts", type=Path, metavar="FILE", help="with auto: what to draw, a prompt a line")
    precision.add_argument("--auto_steps", type=int, metavar="N", help="with auto: denoising steps of each (4)")
    precision.add_argument("--auto_size", type=int, metavar="PIXELS", help="with auto: their size (the pipeline's own)")
    precision.add_argument(
        "--bfloat16",
        action="store_true",
        help="with --float16: what is named by --force_fp32_ops computes in bfloat16, where kernels exist",
    )
    target = parser.add_argument_group("target")
    target.add_argument("--provider", default="cuda", help="the provider to optimize for: cuda (default) or cpu")
    target.add_argument(
        "--attention_layout",
        default="unpacked",
        help="input of MultiHeadAttention: unpacked (default; best from sm_90 on), packed_kv or packed_qkv",
    )
    fusions = parser.add_argument_group("fusions to leave out")
    for name, left_out in _DISABLE.items():
        fusions.add_argument(f"--disable_{name}", action="store_true", help=left_out)
    fusions.add_argument(
        "--use_group_norm_channels_first",
        action="store_true",
        help="not offered: the CUDA provider's GroupNorm kernels read channels last alone",
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


def automatic_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `--force_fp32_ops auto` keeps out of fp16, why, and what it costs."""
    for name, each in found["components"].items():
        nodes, of = each["nodes"]
        errors = f"error {each['error']['relative']:.1e}, of fp16's precision alone {each['ideal']['relative']:.1e}"
        if not each["kept"]:
            yield f"{name}: nothing; {errors}"
            continue
        cost = "{1:.2f} -> {0:.2f} ms a call, ".format(*each["milliseconds"]) if each["milliseconds"] else ""
        most = "" if each["smallest"] else "; the trials came to an end, a smaller set may do"
        yield f"{name}: {nodes} of {of} nodes, {cost}{errors}{most}"
        for kept in each["kept"]:
            reason = kept["reason"]
            seen = "" if reason["most"] is None else f" of {reason['value']}, up to {reason['most']:.2g}"
            yield f"  {name}:{kept['pattern']} ({kept['nodes']}): {reason['kind']}{seen}"
    decibels = [value for value in found["psnr_db"] if value is not None]
    images = f"{min(decibels):.1f} dB and more from float32" if decibels else "the pixels of float32"
    how = "in fp16 that was emulated on the CPU" if found["emulated"] else "on the GPU"
    yield f"{len(found['psnr_db'])} images {how}: {images}; {found['seconds']:.0f} s in all"


def _optimized(options: argparse.Namespace) -> OptimizeReport:
    from sdonnx.optimize import OptimizeRequest, optimize_request

    request = OptimizeRequest(
        provider=options.provider,
        float16=options.float16,
        force_fp32_ops=tuple(options.force_fp32_ops),
        bfloat16=options.bfloat16,
        attention_layout=options.attention_layout,
        disabled=tuple(sorted(name for name in _DISABLE if getattr(options, f"disable_{name}"))),
        inspect=options.inspect,
    )
    asked = {name: getattr(options, f"auto_{name}") for name in ("prompts", "steps", "size")}
    with tensor_progress() as told:
        if AUTO in options.force_fp32_ops:
            return _automatic(options, request, asked, told)
        for name, value in asked.items():
            if value is not None:
                raise OptionError(f"--auto_{name} without --force_fp32_ops auto", "both", f"leave out --auto_{name}")
        return optimize_request(options.input, options.output, request, options.overwrite, told)


def _automatic(
    options: argparse.Namespace, request: OptimizeRequest, asked: Mapping[str, Any], told: Progress
) -> OptimizeReport:
    from sdonnx.automatic.optimizer import optimize_automatically
    from sdonnx.automatic.recording import Drawing

    usual = Drawing()
    for name in ("steps", "size"):
        if asked[name] is not None and asked[name] < 1:
            raise OptionError(f"--auto_{name} {asked[name]}", "a number from 1 on", "pass another")
    drawing = Drawing(
        None if asked["prompts"] is None else read_prompts(asked["prompts"]),
        asked["steps"] or usual.steps,
        asked["size"],
    )
    return optimize_automatically(
        options.input,
        options.output,
        request,
        drawing,
        overwrite=options.overwrite,
        progress=told,
        told=lambda text: told(text, 0, 0),
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.use_group_norm_channels_first:
        raise OptionError(
            "--use_group_norm_channels_first was asked for",
            "channels last, the only order that GroupNorm's CUDA kernels read",
            "leave it out; --disable_group_norm keeps the norms as they are",
        )
    report = _optimized(options)
    out = console()
    out.print(fusion_table(report))
    if report.automatic is not None:
        out.print("kept out of fp16:")
        for line in automatic_lines(report.automatic):
            out.print(line, markup=False, highlight=False)
    for component in report.components.values():
        for warning in component.warnings:
            out.print(f"[yellow]warning[/yellow]: {component.name}: {escape(warning)}")
    if any(component.warnings for component in report.components.values()):
        out.print(f"python -m sdonnx explain {escape(str(options.output))} says where and why")
    out.print(f"optimized to {options.output}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m sdonnx.optimize_pipeline")
    add_arguments(parser)
    return guarded(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
