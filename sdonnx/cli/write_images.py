"""Write generated images: PNG, JPEG or WebP files, numbered files in a folder, or standard output."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx._version import __version__
from sdonnx.errors import OptionError, OutputError
from sdonnx.terminal import unwritable_output

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["KEY", "QUALITY", "STDOUT", "Destination", "encoded", "webui_text"]

KEY = "sdonnx"
"""Key of the parameters as JSON in a PNG file; the key `parameters` holds the text of web UIs."""

QUALITY = 95
"""Default quality of JPEG and WebP."""

STDOUT = "-"
"""Name of standard output."""

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}

_NUMBERED = re.compile(r"(\d{5,})\.png")

_MAX_EXIF_BYTES = 65_000  # of a JPEG file's segment, which has 65,533 at most (ITU-T T.81, B.1.1.4)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """Where the images of a command are written.

    Attributes:
        paths: one file for each image; empty for standard output.
        overwrite: whether existing files are replaced.
        folder: the folder to create first, if it does not exist.
    """

    paths: tuple[Path, ...]
    overwrite: bool = False
    folder: Path | None = None

    @classmethod
    def of(cls, output: str, count: int, overwrite: bool) -> Destination:
        """Return the destination for an option's value, after a check that it can be written.

        Args:
            output: a file, an existing folder, a new folder that ends with a slash, or "-".
            count: number of images.
            overwrite: replace existing files.

        Raises:
            OptionError: the output cannot hold the images.
            OutputError: a file exists, or its folder does not.
        """
        if output == STDOUT:
            if count > 1:
                raise OptionError(f"{count} images for standard output", "one image", "pass a file or a folder")
            if sys.stdout.isatty():
                raise OptionError("-o - writes a PNG file to the terminal", "a file or a pipe", "redirect the output")
            return cls(())
        path = Path(output)
        if path.is_dir() or output.endswith(("/", os.sep)):
            _require_folder(path.parent)
            first = _next_number(path)
            return cls(tuple(path / f"{first + index:05d}.png" for index in range(count)), overwrite, path)
        if path.suffix.lower() not in _FORMATS:
            raise OptionError(
                f"the output is {path.name}",
                f"a name that ends in {', '.join(_FORMATS)}, a folder (ending in /), or - for standard output",
            )
        _require_folder(path.parent)
        numbered = [path.with_name(f"{path.stem}-{index + 1}{path.suffix}") for index in range(count)]
        paths = tuple(numbered) if count > 1 else (path,)
        for each in () if overwrite else paths:
            if each.exists():
                raise _exists(each)
        return cls(paths, overwrite)

    @property
    def format(self) -> str:
        """Pillow's name of the format."""
        return _FORMATS[self.paths[0].suffix.lower()] if self.paths else "PNG"

    def write(self, index: int, content: bytes) -> str:
        """Write an image, and return the name of the file. A failed write leaves no file, and an old one as it was.

        Args:
            index: number of the image.
            content: bytes of the file.

        Raises:
            OutputError: the file exists, or cannot be written.
        """
        if not self.paths:
            try:
                sys.stdout.buffer.write(content)
                sys.stdout.buffer.flush()
            except OSError as error:
                raise unwritable_output(error) from error
            return "standard output"
        path = self.paths[index]
        try:
            if self.folder is not None:
                self.folder.mkdir(exist_ok=True)
            _write(path, content, self.overwrite)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            raise OutputError(
                f"writing {path} failed ({error.strerror or error})",
                "a place with enough free space and permission to write",
            ) from error
        return str(path)


def encoded(image: Image.Image, format: str, parameters: Mapping[str, Any], text: str, quality: int = QUALITY) -> bytes:
    """Return the bytes of an image file with its parameters.

    A PNG file has `text` under the key `parameters`, and the parameters as JSON under `sdonnx`. JPEG and WebP files
    have `text` as the EXIF tag UserComment, as AUTOMATIC1111's web UI writes it.

    Args:
        image: the image.
        format: Pillow's name of the format: "PNG", "JPEG" or "WEBP".
        parameters: parameters of the image.
        text: parameters in the form of web UIs.
        quality: quality of JPEG and WebP, 1 to 100.

    Raises:
        OutputError: the format cannot hold the image.
    """
    from PIL import ExifTags, Image
    from PIL.PngImagePlugin import PngInfo

    options: dict[str, Any] = {}
    if format == "PNG":
        options["pnginfo"] = PngInfo()
        options["pnginfo"].add_text("parameters", text)
        options["pnginfo"].add_text(KEY, json.dumps(parameters, ensure_ascii=False))
    else:
        comment = b"UNICODE\0" + text.encode("utf-16-be")
        options["quality"] = quality
        if len(comment) <= _MAX_EXIF_BYTES:
            options["exif"] = Image.Exif()
            options["exif"].get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
        else:
            _LOGGER.warning("the prompt is too long for the EXIF data of a %s file, and is left out", format)
    file = io.BytesIO()
    try:
        image.save(file, format, **options)
    except (OSError, ValueError) as error:
        found = f"a {format} file cannot hold an image of {image.width}x{image.height} ({error})"
        raise OutputError(found, "a format without that limit", "write a .png file") from error
    return file.getvalue()


def _write(path: Path, content: bytes, overwrite: bool) -> None:
    """Write a file completely or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)  # mkstemp's file is private
        if overwrite:
            partial.replace(path)
        else:
            _rename_new(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _rename_new(partial: Path, path: Path) -> None:
    """Rename a file unless the new name exists, also if another process writes it at the same time."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        partial.rename(path)


def _next_number(folder: Path) -> int:
    """Return the number after the highest one of the images in a folder."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return 1 + max((int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match), default=0)


def _exists(path: Path) -> OutputError:
    return OutputError(
        f"the output {path} exists", "a new file", "pass --overwrite to replace it, or choose another name"
    )


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder", "a folder to write into")


# Source: the table in diffusers' docs/source/en/api/schedulers/overview.md.
_SAMPLERS = {
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "EulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "KDPM2AncestralDiscreteScheduler": "DPM2 a",
    "KDPM2DiscreteScheduler": "DPM2",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "TCDScheduler": "TCD",
    "UniPCMultistepScheduler": "UniPC",
}


def webui_text(parameters: Mapping[str, Any], scheduler_config: Mapping[str, Any]) -> str:
    """Return parameters as AUTOMATIC1111's web UI writes them.

    Args:
        parameters: prompt, negative_prompt, steps, guidance_scale, seed, index, batch, width, height, model, strength
            and clip_skip of an image.
        scheduler_config: configuration of the scheduler, as in `scheduler_config.json`.
    """
    clip_skip, batch = parameters["clip_skip"], parameters["batch"]
    pairs = {
        "Steps": parameters["steps"],
        "Sampler": _sampler(scheduler_config),
        "Schedule type": _schedule(scheduler_config),
        "CFG scale": f"{parameters['guidance_scale']:g}",
        "Seed": parameters["seed"],
        "Size": f"{parameters['width']}x{parameters['height']}",
        "Model": parameters["model"],
        "Batch size": batch if batch > 1 else None,
        "Batch pos": parameters["index"] if batch > 1 else None,
        "Denoising strength": parameters["strength"],
        # The web UI counts the last layer as 1, diffusers as 0.
        "Clip skip": None if clip_skip is None else clip_skip + 1,
        "Version": f"sdonnx {__version__}",
    }
    lines = [parameters["prompt"]]
    if parameters["negative_prompt"]:
        lines.append(f"Negative prompt: {parameters['negative_prompt']}")
    lines.append(", ".join(f"{key}: {_quoted(value)}" for key, value in pairs.items() if value is not None))
    return "\n".join(lines).strip()


def _sampler(config: Mapping[str, Any]) -> str:
    class_name = str(config.get("_class_name"))
    sde = " SDE" if str(config.get("algorithm_type")).startswith("sde") else ""
    return _SAMPLERS.get(class_name, class_name.removesuffix("Scheduler")) + sde


def _schedule(config: Mapping[str, Any]) -> str | None:
    if config.get("use_karras_sigmas"):
        return "Karras"
    return "Exponential" if config.get("use_exponential_sigmas") else None


def _quoted(value: object) -> str:
    """Return a value, in JSON's quotes if it contains a character that separates pairs."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(each in text for each in ",\n:") else text
