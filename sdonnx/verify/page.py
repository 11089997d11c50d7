"""The certificate as a page: images side by side, and how far every component is from torch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sdonnx.benchmark.report.images import gallery_of
from sdonnx.benchmark.report.page import rendered
from sdonnx.benchmark.report.surroundings import machine_of, packages_of
from sdonnx.benchmark.report.tables import DASH, Row, Table, number
from sdonnx.benchmark.results import REFERENCE, Comparison
from sdonnx.verify.judgement import ComponentFinding, ImageFinding, Thresholds
from sdonnx.verify.verifier import Verification

__all__ = ["page_of"]

# Two of the benchmark's colours (Okabe and Ito), and its grey for the reference.
_COLOURS = {REFERENCE: "#7f7f7f", "torch fp16": "#d55e00", "sdonnx": "#0072b2"}


def page_of(found: Verification, certificate: Mapping[str, Any]) -> str:
    """Return the HTML of a verification and its certificate; it needs nothing beside it."""
    passed, thresholds = found.judgement.passed, found.request.thresholds
    surroundings = Comparison(certificate["command"], certificate["environment"])
    pictures = [
        gallery_of(f"{each.prompt}, seed {each.seed}", named, lambda name: _COLOURS[name])
        for each in found.pictures
        for named in [{REFERENCE: each.wide, "torch fp16": each.half, "sdonnx": each.ours}]
    ]
    values = {
        "title": f"{found.folder.resolve().name} {'draws what' if passed else 'does not draw what'} "
        f"{found.original.resolve().name} draws",
        "lead": f"Expected: images of at least {thresholds.least_psnr_db:g} dB to torch's float16, components at most "
        f"{thresholds.most_error:g} times as far from float32 as torch's float16 is.",
        "written": datetime.now(UTC).strftime("%d %B %Y"),
        "failures": found.judgement.failures,
        "reference": REFERENCE,
        "images_table": _images_table(found.images, thresholds),
        "galleries": pictures,
        "components_table": _components_table(found.components, thresholds),
        "machine": machine_of(surroundings),
        "packages": packages_of(surroundings),
        "command": certificate["command"],
        "files": len(certificate["files"]),
        "original_files": len(certificate["original"]["files"]),
    }
    return rendered("page.html", __package__, values)


def _images_table(images: list[ImageFinding], thresholds: Thresholds) -> Table:
    columns = (
        "PSNR to torch fp16, dB",
        "to torch fp32, dB",
        "torch fp16 to fp32, dB",
        "SSIM",
        "largest difference of 255",
    )
    rows = [
        Row(
            f"{each.prompt}, seed {each.seed}",
            (
                *(_decibels(value) for value in (each.psnr_db, each.wide_psnr_db, each.torch_psnr_db)),
                number(each.ssim, 5),
                str(each.most),
            ),
            badges=("failed",) if (failure := each.failure(thresholds)) else (),
            reason=failure,
        )
        for each in images
    ]
    return Table("Images", "prompt", columns, tuple(rows))


def _components_table(components: list[ComponentFinding], thresholds: Thresholds) -> Table:
    columns = ("shape", "error", "torch fp16's", "limit", "NaN or infinite, %", "torch fp16's, %")
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
    return "same pixels" if value is None else number(value, 1) if value == value else DASH


def _error(value: float) -> str:
    return DASH if value in (float("inf"), float("-inf")) else f"{value:.2e}"
