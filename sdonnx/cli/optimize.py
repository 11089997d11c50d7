"""`sdonnx optimize -i IN -o OUT --float16`: optimize an exported folder.

Options that ONNX Runtime's script `optimize_pipeline` also has keep their names.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from sdonnx.cli.quantization_options import add_quantization_arguments, quantization_lines, quantized_request
from sdonnx.errors import OptionError
from sdonnx.folder.prompt_file import read_prompts
from sdonnx.fusions.derived_tables import FLAGS, SHOWN_OPERATORS
from sdonnx.precision_search.search_options import AUTO, ProbeSettings
from sdonnx.terminal import add_common, add_option, console, tensor_progress

if TYPE_CHECKING:
    from rich.table import Table

    from sdonnx.optimize.optimize_request import OptimizeRequest
    from sdonnx.optimize.report import OptimizeReport

__all__ = ["add_arguments", "automatic_lines", "fusion_table", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Fuse the graphs of an exported pipeline for the kernels of ONNX Runtime."
    folders = parser.add_argument_group("folders")
    add_option(folders, "-i", "--input", required=True, type=Path, help="exported folder, of any exporter")
    add_option(folders, "-o", "--output", required=True, type=Path, help="folder to write")
    add_option(folders, "--overwrite", action="store_true", help="replace the output if it contains a pipeline")
    add_option(
        folders,
        "-e",
        "--use_external_data_format",
        action="store_true",
        help="store weights in a separate file; always on, accepted for compatibility with older command lines",
    )
    add_option(
        folders,
        "--inspect",
        action="store_true",
        help="also write inspect.onnx next to each graph: the graph after ONNX Runtime's own optimizations",
    )
    precision = parser.add_argument_group("precision")
    add_option(precision, "--float16", action="store_true", help="convert to fp16")
    add_option(
        precision,
        "--force_fp32_ops",
        nargs="+",
        default=[],
        metavar="COMPONENT:PATTERN",
        help="operators (unet:MultiHeadAttention) or modules (unet:mid_block.*) that stay in float32; auto searches "
        "for the smallest set that generates the same images as float32",
    )
    add_option(precision, "--auto_prompts", type=Path, metavar="FILE", help="with auto: file with one prompt per line")
    add_option(precision, "--auto_steps", type=int, metavar="N", help="with auto: denoising steps (default: 4)")
    add_option(
        precision,
        "--auto_size",
        type=int,
        metavar="PIXELS",
        help="with auto: height and width (default: the pipeline's)",
    )
    add_option(
        precision,
        "--bfloat16",
        action="store_true",
        help="with --float16: compute the nodes of --force_fp32_ops in bfloat16, where kernels exist",
    )
    add_option(
        precision,
        "--norm_scale",
        nargs="+",
        default=[],
        metavar="COMPONENT:FACTOR",
        help="with --float16: factor of the values that group norms read, a power of two such as 1/64, so that large "
        "values fit into fp16; default: 1/128 for autoencoders with force_upcast, which stay in float32 with 1",
    )
    add_quantization_arguments(parser)
    target = parser.add_argument_group("target")
    add_option(target, "--provider", default="cuda", help="execution provider to target: cuda (default) or cpu")
    add_option(
        target,
        "--attention_layout",
        default="unpacked",
        help="layout of the inputs of MultiHeadAttention: unpacked (default; fastest from sm_90 on), packed_kv or "
        "packed_qkv",
    )
    add_option(
        target,
        "--kernels",
        default="auto",
        help="auto (default): with --float16 for cuda, also write each graph with the operators of the package "
        "sdonnx-kernels, which are used where it is installed and the GPU has kernels for them; none: only ONNX "
        "Runtime's operators",
    )
    fusions = parser.add_argument_group("fusions to leave out")
    for flag in FLAGS.values():
        add_option(fusions, flag.option, action="store_true", help=flag.help)
    add_option(
        fusions,
        "--use_group_norm_channels_first",
        action="store_true",
        help="not supported: the GroupNorm kernels of the CUDA provider only read channels last",
    )
    add_common(parser)


def fusion_table(report: OptimizeReport) -> Table:
    """Return a table of the number of fused operators in each component."""
    from rich.table import Table

    table = Table(title=f"operators for {report.provider}, {report.precision}")
    table.add_column("operator")
    for name in report.components:
        table.add_column(name, justify="right")
    for operator in SHOWN_OPERATORS:
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
    """Yield a description of the result of `--force_fp32_ops auto`: patterns, reasons and cost."""
    for name, each in found["norm_scales"].items():
        if each["scale"] != 1:
            factor = f"1/{1 / each['scale']:.0f}"
            yield f"{name}: group norms read values times {factor}, since {each['value']} is up to {each['most']:.2g}"
    for name, each in found["components"].items():
        nodes, of = each["nodes"]
        ideal = f"with an unlimited range of fp16: {each['ideal']['relative']:.1e}"
        errors = f"error {each['error']['relative']:.1e} ({ideal})"
        if not each["kept"]:
            yield f"{name}: nothing; {errors}"
            continue
        cost = "{1:.2f} -> {0:.2f} ms a call, ".format(*each["milliseconds"]) if each["milliseconds"] else ""
        note = "" if each["smallest"] else "; the trials were used up, a smaller set may be sufficient"
        yield f"{name}: {nodes} of {of} nodes, {cost}{errors}{note}"
        for kept in each["kept"]:
            reason = kept["reason"]
            value = "" if reason["most"] is None else f" of {reason['value']}, up to {reason['most']:.2g}"
            yield f"  {name}:{kept['pattern']} ({kept['nodes']}): {reason['kind']}{value}"
    decibels = [value for value in found["psnr_db"] if value is not None]
    images = f"at least {min(decibels):.1f} dB PSNR to float32" if decibels else "the same pixels as float32"
    how = "in fp16 emulated on the CPU" if found["emulated"] else "on the GPU"
    yield f"{len(found['psnr_db'])} images {how}: {images}; {found['seconds']:.0f} s in total"


def _optimize(options: argparse.Namespace) -> OptimizeReport:
    from sdonnx.optimize.optimize_request import OptimizeRequest
    from sdonnx.optimize.optimizer import optimize_request
    from sdonnx.precision.policy import Precision

    patterns = [each for each in options.force_fp32_ops if each != AUTO]
    request = OptimizeRequest(
        provider=options.provider,
        precision=Precision.from_flags(options.float16, options.bfloat16, patterns, options.norm_scale),
        attention_layout=options.attention_layout,
        disabled=tuple(sorted(name for name in FLAGS if getattr(options, f"disable_{name}"))),
        inspect=options.inspect,
        kernels=options.kernels,
    )
    request = quantized_request(options, request)
    if AUTO in options.force_fp32_ops:
        return _optimize_automatically(options, request)
    for name in ("prompts", "steps", "size"):
        if getattr(options, f"auto_{name}") is not None:
            raise OptionError(f"--auto_{name} without --force_fp32_ops auto", "both", f"leave out --auto_{name}")
    with tensor_progress() as progress:
        return optimize_request(options.input, options.output, request, options.overwrite, progress)


def _optimize_automatically(options: argparse.Namespace, request: OptimizeRequest) -> OptimizeReport:
    from sdonnx.precision_search.optimize_automatically import optimize_automatically

    for name in ("steps", "size"):
        number = getattr(options, f"auto_{name}")
        if number is not None and number < 1:
            raise OptionError(f"--auto_{name} {number}", "a number of at least 1")
    settings = ProbeSettings(
        None if options.auto_prompts is None else read_prompts(options.auto_prompts),
        options.auto_steps or ProbeSettings.steps,
        options.auto_size,
    )
    with tensor_progress() as progress:
        return optimize_automatically(
            options.input,
            options.output,
            request,
            settings,
            overwrite=options.overwrite,
            progress=progress,
            on_message=lambda text: progress(text, 0, 0),
        )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.use_group_norm_channels_first:
        raise OptionError(
            "--use_group_norm_channels_first is not supported",
            "channels last, the only layout that the CUDA kernels of GroupNorm read",
            "leave it out; --disable_group_norm leaves the norms unfused",
        )
    report = _optimize(options)
    out = console()
    out.print(fusion_table(report))
    if report.automatic is not None:
        out.print("kept out of fp16:")
        for line in automatic_lines(report.automatic):
            out.print(line, markup=False, highlight=False)
    for line in quantization_lines(report):
        out.print(line, markup=False, highlight=False)
    for component in report.components.values():
        for warning in component.warnings:
            out.print(f"[yellow]warning[/yellow]: {component.name}: {escape(warning)}")
    if any(component.warnings for component in report.components.values()):
        out.print(f"sdonnx explain {escape(str(options.output))} shows the places and the reasons")
    out.print(f"optimized to {options.output}")
    if options.provider == "cuda" and options.kernels == "auto":
        _check_kernels(options.output)
    if options.provider == "cuda" and not _may_have_cuda():
        out.print(
            "[yellow]note[/yellow]: made for cuda, and ONNX Runtime has no CUDA provider here; to generate images on "
            "this machine, optimize again with --provider cpu"
        )
    return 0


def _check_kernels(folder: Path) -> None:
    """Check our own kernels in the folder's graphs if this machine has a GPU that is not trusted."""
    from sdonnx.doctor.gpu import gpus

    if gpus() and importlib.util.find_spec("onnxruntime") is not None and _may_have_cuda():
        from sdonnx.folder.folder_version import read_report
        from sdonnx.runtime.device.device import device_for
        from sdonnx.runtime.device.kernel_choice import choose_kernels

        kernels = choose_kernels(device_for("cuda"), read_report(folder), folder)
        if kernels.warning:
            console().print(f"[yellow]note[/yellow]: {escape(kernels.warning)}")


def _may_have_cuda() -> bool:
    """Return whether ONNX Runtime has the CUDA provider; if it is not installed, images are generated elsewhere."""
    if importlib.util.find_spec("onnxruntime") is None:
        return True
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()
