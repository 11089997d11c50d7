"""`python -m sdonnx verify FOLDER --against ORIGINAL`: prove that both draw the same, and write a certificate."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from sdonnx.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.claim import claimed
from sdonnx.errors import OutputError
from sdonnx.folder import finite
from sdonnx.prompts import read_prompts
from sdonnx.terminal import add_debug, console
from sdonnx.verify.judgement import Thresholds
from sdonnx.verify.page import page_of
from sdonnx.verify.verifier import Request, Verification, verify_folder

__all__ = ["FAILED", "add_arguments", "run", "write_certificate"]

_PARTIAL = ".certificate.partial"

FAILED = 1
"""Exit status of a folder that does not pass."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Compare an optimized folder with the diffusers pipeline that it was made from, component by component and "
        f"image by image, and write {CERTIFICATE} and {CERTIFICATE_PAGE} into it."
    )
    usual = Request()
    parser.add_argument("folder", type=Path, help="the optimized folder")
    parser.add_argument("--against", required=True, type=Path, metavar="ORIGINAL", help="the diffusers pipeline")
    parser.add_argument("--prompts", type=Path, default=None, metavar="FILE", help="a text file, a prompt a line")
    parser.add_argument("--images", type=int, default=usual.images, help="images of each prompt (%(default)s)")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the first image (%(default)s)")
    parser.add_argument("-s", "--steps", type=int, default=usual.steps, help="denoising steps (%(default)s)")
    parser.add_argument("--height", type=int, default=None, help="pixels (default: the pipeline's)")
    parser.add_argument("--width", type=int, default=None, help="likewise")
    parser.add_argument("-g", "--guidance_scale", type=float, help="weight of the prompt (default: the family's)")
    parser.add_argument("--scheduler", default=None, help="the sampler for both (default: the folder's)")
    parser.add_argument("--ip_adapter", nargs="+", default=[], metavar="FILE", help="the folder's IP-Adapters")
    parser.add_argument("--ip_adapter_scale", type=float, default=usual.ip_adapter_scale, help="(%(default)s)")
    parser.add_argument("--provider", default=None, help="cuda or cpu; default: what the folder is for")
    parser.add_argument(
        "--least_psnr", type=float, default=usual.thresholds.least_psnr_db, metavar="DB",
        help="of images to torch in float16 (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--most_error", type=float, default=usual.thresholds.most_error, metavar="TIMES",
        help="of components to float32, in errors of torch's float16 (%(default)s)",
    )  # fmt: skip
    add_debug(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    out = console()
    _refuse_folder(options.folder)
    request = Request(
        prompts=None if options.prompts is None else read_prompts(options.prompts),
        images=options.images,
        seed=options.seed,
        steps=options.steps,
        height=options.height,
        width=options.width,
        guidance_scale=options.guidance_scale,
        scheduler=options.scheduler,
        ip_adapters=tuple(options.ip_adapter),
        ip_adapter_scale=options.ip_adapter_scale,
        provider=options.provider,
        thresholds=Thresholds(options.least_psnr, options.most_error),
    )
    found = verify_folder(options.folder, options.against, request, lambda text: out.print(text, style="dim"))
    certificate = found.certificate()
    text = json.dumps(finite(certificate), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # The certificate last: with it everything is there.
    write_certificate(options.folder, {CERTIFICATE_PAGE: page_of(found, certificate), CERTIFICATE: text})
    out.print(_table(found))
    for failure in found.judgement.failures:
        out.print(f"failed: {failure}", markup=False)
    passed = found.judgement.passed
    out.print(f"{'passed' if passed else 'did not pass'}: {options.folder / CERTIFICATE}", markup=False)
    return 0 if passed else FAILED


def write_certificate(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into a folder, each at once; what a killed run left half-written is written over."""
    try:
        with claimed(folder.resolve()):
            for name, text in texts.items():
                partial = folder / _PARTIAL
                partial.write_bytes(text.encode("utf-8", "backslashreplace"))
                partial.replace(folder / name)
    except OSError as error:
        (folder / _PARTIAL).unlink(missing_ok=True)
        raise OutputError(
            f"writing into {folder} failed ({error.strerror})",
            "a place with enough free space and permission to write",
            "free some space, or copy the folder",
        ) from error


def _table(found: Verification) -> Table:
    table = Table("component", "outputs compared", "largest error", "torch fp16's", "NaN or infinite, %")
    for name in dict.fromkeys(each.component for each in found.components):
        own = [each for each in found.components if each.component == name]
        worst = max(own, key=lambda each: each.error / each.limit(found.request.thresholds))
        share = max(each.not_finite for each in own)
        table.add_row(name, str(len(own)), f"{worst.error:.2e}", f"{worst.torch_error:.2e}", f"{100 * share:.2g}")
    for image in found.images:
        reference, decibels = image.compared()
        shown = "same pixels" if decibels is None else f"{decibels:.1f} dB to torch's {reference}"
        table.add_row(f"image {image.prompt[:40]!r}, seed {image.seed}", "1", shown, "", "")
    return table


def _refuse_folder(folder: Path) -> None:
    """Look whether the certificate can be written, before minutes of drawing are spent."""
    if not folder.is_dir():
        return  # what reads it says so
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written ({error.strerror})", "a folder that holds the certificate", "copy it"
        ) from error
