"""`sdonnx verify FOLDER --against ORIGINAL`: compare the two pipelines and write a certificate."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from sdonnx.errors import OutputError
from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.folder.lock import locked
from sdonnx.folder.pipeline_folder import finite
from sdonnx.folder.prompt_file import read_prompts
from sdonnx.terminal import add_common, add_option, console, step_progress
from sdonnx.verify.certificate_page import certificate_html
from sdonnx.verify.verification import Thresholds, Verification, VerificationRequest
from sdonnx.verify.verifier import DEFAULT_CAPTIONS, OnProgress, verify_folder

__all__ = [
    "FAILED",
    "accuracy_table",
    "add_arguments",
    "components_table",
    "images_table",
    "run",
    "write_certificate",
]

_PARTIAL = ".certificate.partial"

FAILED = 1
"""Exit status if the folder does not pass."""

_PROMPT_WIDTH = 60  # characters; longer prompts are shortened between words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, each long one spelled with `-` and with `_`."""
    parser.description = (
        "Compare an optimized folder with the diffusers pipeline that it was made from, component by component and "
        f"image by image, and write {CERTIFICATE} and {CERTIFICATE_PAGE} into the folder."
    )
    default = VerificationRequest()

    add = partial(add_option, parser)

    parser.add_argument("folder", type=Path, help="the optimized folder")
    add("--against", required=True, type=Path, metavar="ORIGINAL", help="the diffusers pipeline")
    add("--prompts", type=Path, default=None, metavar="FILE", help="a text file with one prompt per line")
    add("--images", type=int, default=default.images, help="number of images per prompt (%(default)s)")
    add("--seed", type=int, default=default.seed, help="seed of the first image (%(default)s)")
    add("-s", "--steps", type=int, default=default.steps, help="number of denoising steps (%(default)s)")
    add("--height", type=int, default=None, help="height in pixels (default: the pipeline's)")
    add("--width", type=int, default=None, help="width in pixels (default: the pipeline's)")
    add("-g", "--guidance_scale", type=float, help="guidance scale (default: the family's; 4 for trained samples)")
    add("--scheduler", default=None, help="the sampler of both pipelines (default: the folder's)")
    add("--ip_adapter", nargs="+", default=[], metavar="FILE", help="the IP-Adapters that the folder was exported with")
    add("--ip_adapter_scale", type=float, default=default.ip_adapter_scale, help="scale of the adapters (%(default)s)")
    add("--provider", default=None, help="cuda or cpu (default: the folder's target)")
    add(
        "--min_psnr", "--least_psnr", type=float, default=default.thresholds.min_psnr_db, metavar="DB",
        help="minimum PSNR of images to torch in the folder's type (%(default)s)",
    )  # fmt: skip
    add(
        "--max_error", "--most_error", type=float, default=default.thresholds.max_error, metavar="TIMES",
        help="maximum error of components, as a multiple of the error of torch in float16, or of 2^-11 for a folder "
        "in float32 (%(default)s)",
    )  # fmt: skip
    add(
        "--max_quantized_error", type=float, default=default.thresholds.max_quantized_error, metavar="ERROR",
        help="maximum error of quantized components to torch in float32 (%(default)s); they have no minimum PSNR",
    )  # fmt: skip
    add(
        "--accuracy_prompts", type=int, default=None, metavar="N",
        help="number of held-out captions whose images are judged, for trained samples only "
        f"({DEFAULT_CAPTIONS}); 0 for none",
    )  # fmt: skip
    add(
        "--max_accuracy_loss", type=float, default=default.thresholds.max_accuracy_loss, metavar="POINTS",
        help="maximum loss of accuracy on these captions relative to torch, in percentage points (%(default)s)",
    )  # fmt: skip
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    out = console()
    _check_writable(options.folder)
    request = VerificationRequest(
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
        accuracy_prompts=options.accuracy_prompts,
        thresholds=Thresholds(
            options.min_psnr, options.max_error, options.max_quantized_error, options.max_accuracy_loss
        ),
    )
    with _progress() as show:
        found = verify_folder(options.folder, options.against, request, show)
    certificate = found.certificate()
    text = json.dumps(finite(certificate), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # The certificate is written last: if it exists, the page exists.
    write_certificate(options.folder, {CERTIFICATE_PAGE: certificate_html(found, certificate), CERTIFICATE: text})
    out.print(components_table(found))
    out.print(images_table(found))
    if found.accuracy:
        out.print(accuracy_table(found))
    for failure in found.judgement.failures:
        out.print(f"failed: {failure}", markup=False)
    passed = found.judgement.passed
    out.print(f"{'passed' if passed else 'did not pass'}: {options.folder / CERTIFICATE}", markup=False)
    return 0 if passed else FAILED


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """Yield a callback that shows which engine generates images, and the time that is left."""
    from tqdm import tqdm

    with tqdm(total=0, **step_progress("verifying", "part")) as bar:

        def show(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description_str(name, refresh=False)
            bar.update(done - bar.n)

        yield show


def write_certificate(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into a folder, each atomically. Overwrites partial files of a killed process."""
    try:
        with locked(folder.resolve()):
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


def components_table(found: Verification) -> Table:
    """Return the largest error of each component."""
    table = Table("component", "outputs compared", "largest error", "limit", "NaN or Inf, %", title="Components")
    table.title_justify = "left"
    for name in dict.fromkeys(each.component for each in found.components):
        own = [each for each in found.components if each.component == name]
        worst = max(own, key=lambda each: each.error / each.limit(found.request.thresholds))
        share = max(each.not_finite for each in own)
        limit = worst.limit(found.request.thresholds)
        table.add_row(name, str(len(own)), f"{worst.error:.2e}", f"{limit:.2e}", f"{100 * share:.2g}")
    return table


def images_table(found: Verification) -> Table:
    """Return the agreement of each image with torch's image. Long prompts are shortened between words."""
    table = Table(title="Images", title_justify="left")
    table.add_column("prompt")
    for name in ("seed", "PSNR, dB", "to torch in", "SSIM"):
        table.add_column(name, justify="right", no_wrap=True)
    for image in found.images:
        reference, decibels = image.compared()
        prompt = Text(textwrap.shorten(image.prompt, _PROMPT_WIDTH, placeholder=" …"))
        psnr = "identical" if decibels is None else f"{decibels:.1f}"
        table.add_row(prompt, str(image.seed), psnr, reference, f"{image.ssim:.4f}")
    return table


def accuracy_table(found: Verification) -> Table:
    """Return the shares of images of held-out captions in which each measure is right."""
    title = f"Images of {found.request.accuracy_prompts} held-out captions in which a measure is right; loss in points"
    table = Table(title=title, title_justify="left")
    table.add_column("measure", no_wrap=True)
    for name in ("count", "sdonnx", f"torch {found.accuracy[0].precision}", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.accuracy:
        table.add_row(each.measure, str(each.ours.count), str(each.ours), str(each.torch), f"{each.loss:.1f}")
    return table


def _check_writable(folder: Path) -> None:
    """Check that the certificate can be written, before minutes are spent on generating images."""
    if not folder.is_dir():
        return  # reported when the folder is read
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{folder} is not writable ({error.strerror})", "a writable folder for the certificate"
        ) from error
