"""The certificate as an HTML page: images side by side, and the error of every component relative to torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdonnx.html.gallery import Gallery, make_gallery
from sdonnx.html.page import readable_date, render_page
from sdonnx.html.tables import DASH, Heading, Row, Table, device_name, installed_packages, machine_facts, number
from sdonnx.reference import REFERENCE
from sdonnx.verify.verification import (
    AccuracyFinding,
    ComponentFinding,
    ImageFinding,
    ImageTriple,
    Thresholds,
    Verification,
)

__all__ = ["certificate_html"]

_OURS, _HALF = "sdonnx", "torch fp16"

# Two of the benchmark's colours (Okabe and Ito), and its grey for the reference image.
_COLOURS = {REFERENCE: "#7f7f7f", _HALF: "#d55e00", _OURS: "#0072b2"}


@dataclass(frozen=True)
class ImageComparison:
    """The pictures of one prompt and seed with their numbers."""

    gallery: Gallery
    numbers: tuple[tuple[str, str], ...]
    failure: str | None


def certificate_html(found: Verification, certificate: Mapping[str, Any]) -> str:
    """Return the HTML of a verification and its certificate, as a single self-contained file."""
    thresholds = found.request.thresholds
    environment = certificate["environment"]
    values = {
        "title": f"Verification of {found.folder.resolve().name} against {found.original.resolve().name}",
        "passed": found.judgement.passed,
        "summary": _summary(found),
        "verified": readable_date(certificate["time"]),
        "version": certificate["sdonnx"],
        "precision": certificate["precision"],
        "device": device_name(environment),
        "thresholds": thresholds,
        "torch_type": next((each.precision for each in found.images), "float16"),
        "quantized": found.quantized,
        "failures": found.judgement.failures,
        "reference": REFERENCE,
        "images": [
            _image_comparison(finding, triple, thresholds)
            for finding, triple in zip(found.images, found.pictures, strict=True)
        ],
        "accuracy_table": _accuracy_table(found.accuracy, thresholds) if found.accuracy else None,
        "components_table": _components_table(found.components, thresholds),
        "machine": machine_facts(environment),
        "packages": installed_packages(environment),
        "command": certificate["command"],
        "files": len(certificate["files"]),
        "original_files": len(certificate["original"]["files"]),
    }
    return render_page("certificate.html", __package__, values)


def _summary(found: Verification) -> str:
    """Return the result in a sentence, without the verdict."""
    images, outputs, measures = len(found.images), len(found.components), len(found.accuracy)
    if not images or not outputs:
        return "Nothing was compared."
    if found.judgement.passed:
        judged = f", and the accuracy on {found.request.accuracy_prompts} captions," if measures else ""
        return f"All {images} images and {outputs} outputs of components{judged} are within the limits."
    compared = "images, components and accuracy" if measures else "images and components"
    return f"{len(found.judgement.failures)} of {images + outputs + measures} comparisons of {compared} failed."


def _image_comparison(finding: ImageFinding, triple: ImageTriple, thresholds: Thresholds) -> ImageComparison:
    # This project's image is the first, next to the image of the same precision.
    halves = {} if triple.half is None else {_HALF: triple.half}
    named = {_OURS: triple.ours, **halves, REFERENCE: triple.wide}
    same = next(iter(halves), REFERENCE)
    title = f"{finding.prompt}, seed {finding.seed}"
    numbers = (
        *((f"PSNR to {name}", _decibels(finding.psnr_db)) for name in halves),
        (f"PSNR to {REFERENCE}", _decibels(finding.wide_psnr_db)),
        *((f"PSNR of {name} to {REFERENCE}", _decibels(finding.torch_psnr_db)) for name in halves),
        (f"SSIM to {same}", number(finding.ssim, 5)),
        (f"largest difference to {same}", f"{finding.max_difference} of 255"),
    )
    gallery = make_gallery(title, named, lambda name: _COLOURS[name])
    return ImageComparison(gallery, numbers, finding.failure(thresholds))


def _components_table(components: list[ComponentFinding], thresholds: Thresholds) -> Table:
    has_half = any(each.torch_error is not None for each in components)  # not of a folder in float32
    halves = ("error of torch fp16", "torch fp16, %") if has_half else ()
    headings = tuple(map(Heading, ("shape", "error", "limit", "NaN or Inf, %", *halves)))
    rows = [
        Row(
            f"{each.component}, {each.output}",
            (
                "\N{MULTIPLICATION SIGN}".join(map(str, each.shape)),
                *(_error(value) for value in (each.error, each.limit(thresholds))),
                number(100 * each.not_finite, 1),
                *((_error(each.torch_error), _share(each.torch_not_finite)) if has_half else ()),
            ),
            verdict="failed" if each.failure(thresholds) else None,
        )
        for each in components
    ]
    return Table("Error of each output", "component, output", headings, tuple(rows))


def _accuracy_table(accuracy: list[AccuracyFinding], thresholds: Thresholds) -> Table:
    names = ("captions", _OURS, f"torch {accuracy[0].precision}", "loss, points", "limit")
    rows = [
        Row(
            each.measure,
            (
                str(each.ours.count),
                str(each.ours),
                str(each.torch),
                number(each.loss, 1),
                number(thresholds.max_accuracy_loss, 1),
            ),
            verdict="failed" if each.failure(thresholds) else None,
        )
        for each in accuracy
    ]
    return Table("Images in which each measure is right", "measure", tuple(map(Heading, names)), tuple(rows))


def _decibels(value: float | None) -> str:
    return "identical" if value is None else f"{number(value, 1)} dB" if value == value else DASH


def _share(value: float | None) -> str:
    return DASH if value is None else number(100 * value, 1)


def _error(value: float | None) -> str:
    return DASH if value in (None, float("inf"), float("-inf")) else f"{value:.2e}"
