"""The certificate as an HTML page: images side by side, and the error of every component relative to torch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sdonnx.benchmark.report.html_tables import DASH, Row, Table, number
from sdonnx.benchmark.report.image_comparison import make_gallery
from sdonnx.benchmark.report.report_page import render_page
from sdonnx.benchmark.report.surroundings import installed_packages, machine_facts
from sdonnx.benchmark.results import REFERENCE, Comparison
from sdonnx.verify.judgement import ComponentFinding, ImageFinding, Thresholds
from sdonnx.verify.verification import Verification

__all__ = ["certificate_html"]

# Two of the benchmark's colours (Okabe and Ito), and its grey for the reference image.
_COLOURS = {REFERENCE: "#7f7f7f", "torch fp16": "#d55e00", "sdonnx": "#0072b2"}


def certificate_html(found: Verification, certificate: Mapping[str, Any]) -> str:
    """Return the HTML of a verification and its certificate, as a single self-contained file."""
    passed, thresholds = found.judgement.passed, found.request.thresholds
    surroundings = Comparison(certificate["command"], certificate["environment"])
    pictures = [
        make_gallery(f"{each.prompt}, seed {each.seed}", named, lambda name: _COLOURS[name])
        for each in found.pictures
        for named in [{REFERENCE: each.wide, "torch fp16": each.half, "sdonnx": each.ours}]
    ]
    values = {
        "title": f"{found.folder.resolve().name} {'matches' if passed else 'does not match'} "
        f"{found.original.resolve().name}",
        "lead": f"Expected: images with a PSNR of at least {thresholds.min_psnr_db:g} dB to torch in float16, and "
        f"components with at most {thresholds.max_error:g} times the error of torch in float16.",
        "written": datetime.now(UTC).strftime("%d %B %Y"),
        "failures": found.judgement.failures,
        "reference": REFERENCE,
        "images_table": _images_table(found.images, thresholds),
        "galleries": pictures,
        "components_table": _components_table(found.components, thresholds),
        "machine": machine_facts(surroundings),
        "packages": installed_packages(surroundings),
        "command": certificate["command"],
        "files": len(certificate["files"]),
        "original_files": len(certificate["original"]["files"]),
    }
    return render_page("page.html", __package__, values)


def _images_table(images: list[ImageFinding], thresholds: Thresholds) -> Table:
    columns = (
        "PSNR to torch fp16, dB",
        "to torch fp32, dB",
        "torch fp16 to fp32, dB",
        "SSIM",
        "max. difference (0 to 255)",
    )
    rows = [
        Row(
            f"{each.prompt}, seed {each.seed}",
            (
                *(_decibels(value) for value in (each.psnr_db, each.wide_psnr_db, each.torch_psnr_db)),
                number(each.ssim, 5),
                str(each.max_difference),
            ),
            badges=("failed",) if (failure := each.failure(thresholds)) else (),
            reason=failure,
        )
        for each in images
    ]
    return Table("Images", "prompt", columns, tuple(rows))


def _components_table(components: list[ComponentFinding], thresholds: Thresholds) -> Table:
    columns = ("shape", "error", "error of torch fp16", "limit", "NaN or Inf, %", "torch fp16, %")
    rows = [
        Row(
            f"{each.component}, {each.output}",
            (
                "\N{MULTIPLICATION SIGN}".join(map(str, each.shape)),
                *(_error(value) for value in (each.error, each.torch_error, each.limit(thresholds))),
                *(number(100 * share, 1) for share in (each.not_finite, each.torch_not_finite)),
            ),
            badges=("failed",) if (failure := each.failure(thresholds)) else (),
            reason=failure,
        )
        for each in components
    ]
    return Table("Components", "component, output", columns, tuple(rows))


def _decibels(value: float | None) -> str:
    return "identical" if value is None else number(value, 1) if value == value else DASH


def _error(value: float) -> str:
    return DASH if value in (float("inf"), float("-inf")) else f"{value:.2e}"
