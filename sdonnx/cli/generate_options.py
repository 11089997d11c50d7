"""Options of `sdonnx generate`: conditioning images, LoRA files, and the schedule."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError
from sdonnx.lora.lora_folder import lora_files, lora_name
from sdonnx.runtime.inputs.argument_checks import require_sides
from sdonnx.runtime.inputs.conditioning_images import CONDITIONING_ARGUMENTS, CONDITIONING_IMAGES, single_values
from sdonnx.terminal import add_option

if TYPE_CHECKING:
    from PIL import Image

    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = [
    "LoraFile",
    "add_conditioning_arguments",
    "add_lora_arguments",
    "add_lora_tags",
    "add_schedule_arguments",
    "conditioning_arguments",
    "conditioning_parameters",
    "custom_steps",
    "load_lora_files",
    "read_image",
    "read_lora_files",
    "read_lora_tags",
    "read_schedule",
    "schedule_arguments",
]


def read_image(path: Path | None) -> Image.Image | None:
    """Return the image in a file, with its pixels in memory."""
    if path is None:
        return None
    from PIL import Image

    try:
        with Image.open(path) as image:
            require_sides(str(path), image.width, image.height)
            image.load()
            return image.copy()
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read ({error})", "an image file") from error


_LISTED: Mapping[str, Any] = {"images": Path, "weights": float, "shares": float, "types": int}


def add_conditioning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for images that condition the denoiser, and their weights."""
    for each in CONDITIONING_ARGUMENTS:
        add = partial(add_option, parser, f"--{each.name}", help=each.help)
        if each.kind == "flag":
            add(action="store_true")
        elif each.kind == "share":
            add(type=float, default=None)
        else:
            add(nargs="+", type=_LISTED[each.kind], default=[])


def conditioning_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the pipeline for conditioning images that the options set, by name.

    Raises:
        OptionError: an image cannot be read.
    """
    found = _given_conditioning(options)
    for name in found.keys() & set(CONDITIONING_IMAGES):
        found[name] = [read_image(path) for path in found[name]]
    return single_values(found)


def conditioning_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters to write into image files, by name."""
    found = _given_conditioning(options)
    return found | {name: [path.name for path in found[name]] for name in CONDITIONING_IMAGES if name in found}


def _given_conditioning(options: argparse.Namespace) -> dict[str, Any]:
    values = {each.name: getattr(options, each.name) for each in CONDITIONING_ARGUMENTS}
    return {name: value for name, value in values.items() if value or isinstance(value, float)}


# AUTOMATIC1111's notation (extra_networks.py and extra_networks_lora.py of stable-diffusion-webui): a name, the weight
# in the text encoders, and the weight in the UNet, which is by default the same.
_TAG = re.compile(r"<lora:([^<>:]+)(?::([^<>:]*))?(?::([^<>:]*))?>")
_WEIGHTED = re.compile(r"^(.*):([^:/\\]+)$", re.DOTALL)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and its weights.

    Attributes:
        path: the file, or a folder that diffusers or PEFT wrote.
        weight: weight in the UNet.
        text_weight: weight in the text encoders; None for that in the UNet.
    """

    path: Path
    weight: float = 1.0
    text_weight: float | None = None

    def __str__(self) -> str:
        weights = [self.weight] if self.text_weight is None else [self.text_weight, self.weight]
        return ":".join([self.path.name, *(f"{weight:g}" for weight in weights)])

    def by_component(self, components: Sequence[str]) -> dict[str, float]:
        """Return the weight in each component."""
        text = self.weight if self.text_weight is None else self.text_weight
        return {name: text if name.startswith("text_encoder") else self.weight for name in components}


def add_lora_arguments(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add --lora."""
    files = "LoRA files, each with a weight behind a colon (default: 1), such as style.safetensors:0.8"
    add_option(parser, "--lora", nargs="+", default=[], required=required, metavar="FILE[:WEIGHT]", help=files)


def add_lora_tags(parser: argparse.ArgumentParser) -> None:
    """Add --lora_folder."""
    tags = "read <lora:NAME:WEIGHT> in the prompts; NAME.safetensors, or the only file of NAME, is in this folder"
    add_option(parser, "--lora_folder", type=Path, default=None, metavar="FOLDER", help=tags)


def read_lora_files(values: Sequence[str]) -> list[LoraFile]:
    """Return the files of --lora.

    Raises:
        OptionError: a file does not exist, or a weight is no number.
    """
    files = []
    for value in values:
        path, weight = Path(value), 1.0
        if not os.path.exists(path) and (match := _WEIGHTED.match(value)):
            path, weight = Path(match[1]), _number(f"--lora {value}", match[2])
        if not os.path.exists(path):
            raise OptionError(f"the LoRA {path}, which does not exist", "a safetensors file")
        files.append(LoraFile(path, weight))
    return files


def read_lora_tags(prompts: Sequence[str], folder: Path | None) -> tuple[list[str], list[LoraFile]]:
    """Return prompts without their tags, and the files that the tags name.

    Args:
        prompts: the prompts of a batch.
        folder: where the files are; without one, tags are text.

    Raises:
        OptionError: prompts have different tags, a file does not exist or exists twice, or a weight is no number.
    """
    if folder is None:
        return list(prompts), []
    files = lora_files(folder)
    tags = [_TAG.findall(prompt) for prompt in prompts]
    if any(each != tags[0] for each in tags):
        raise OptionError(
            "prompts with different <lora:...> tags in one batch",
            "the same tags in all prompts",
            "run the command once for each set of tags",
        )
    stripped = [re.sub(r" {2,}", " ", _TAG.sub("", prompt)).strip() for prompt in prompts]
    return stripped, [_of_tag(files, folder, *tag) for tag in tags[0]]


def load_lora_files(pipeline: OrtDiffusionPipeline, files: Sequence[LoraFile]) -> None:
    """Load files into a pipeline, and use all of them.

    Raises:
        WeightsError: a file cannot be used with the pipeline.
        OptionError: the weights of the folder cannot be changed.
    """
    if not files:
        return
    adapters = {str(number): file for number, file in enumerate(files)}
    for name, file in adapters.items():
        pipeline.load_lora_weights(file.path, adapter_name=name)
    weights: list[Any] = [file.by_component(pipeline.lora_components) for file in files]
    pipeline.set_adapters(list(adapters), weights)


def _of_tag(files: Sequence[Path], folder: Path, name: str, text_weight: str, weight: str) -> LoraFile:
    """Return the file of a tag. The name is compared with files, so that it cannot lead out of the folder."""
    name = name.strip()
    found = [path for path in files if name in (path.stem, lora_name(path))]
    if len(found) != 1:
        raise OptionError(f"<lora:{name}> matches {len(found)} files in {folder}", f"one file {name}.safetensors")
    of_text = _number(f"<lora:{name}>", text_weight) if text_weight else 1.0
    if not weight:
        return LoraFile(found[0], of_text)
    return LoraFile(found[0], _number(f"<lora:{name}>", weight), of_text)


def _number(place: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"the weight {text!r} of {place}", "a finite number", "pass for example 0.8")
    return number


_LISTS = {"timesteps": "999,749,499,249", "sigmas": "14.6,3.1,0.9,0"}


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = partial(add_option, parser)
    timesteps = f"falling timesteps in place of --steps, such as {_LISTS['timesteps']}, for schedulers that accept them"
    add("--timesteps", metavar="T,T,...", help=timesteps)
    sigmas = f"falling noise levels in place of --steps, such as {_LISTS['sigmas']}, for schedulers that accept them"
    add("--sigmas", metavar="S,S,...", help=sigmas)
    add("--eta", type=float, default=None, help="share of fresh noise of DDIM and TCD, 0 to 1 (default: 0)")


def read_schedule(options: argparse.Namespace) -> None:
    """Check the options, and replace the texts of lists by tuples of numbers.

    Raises:
        OptionError: a list does not consist of falling numbers, two options exclude each other, or eta is not a share.
    """
    from sdonnx.samplers import CustomSchedule

    for name in _LISTS:
        if (text := getattr(options, name)) is not None:
            setattr(options, name, _numbers(name, text))
    given = [f"--{name}" for name in ("steps", *_LISTS) if getattr(options, name) is not None]
    if len(given) > 1:
        raise OptionError(" and ".join(given), "one of them")
    CustomSchedule.create(options.timesteps, options.sigmas, None, None)
    if options.eta is not None and not 0 <= options.eta <= 1:
        raise OptionError(f"--eta is {options.eta}", "a number from 0 to 1", "pass for example 0.3")


def schedule_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the pipeline that the options set, by name."""
    return {name: value for name in (*_LISTS, "eta") if (value := getattr(options, name)) is not None}


def custom_steps(options: argparse.Namespace, class_name: str) -> int | None:
    """Return the number of steps of custom timesteps or sigmas; None without them.

    Args:
        options: the options, after `read_schedule`.
        class_name: class of the scheduler.
    """
    from sdonnx.samplers import SAMPLERS

    if options.sigmas is not None:
        return len(options.sigmas) - (class_name in SAMPLERS and SAMPLERS[class_name].ends_with_sigma)
    return None if options.timesteps is None else len(options.timesteps)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas; whole ones as integers, as they were written."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--{name} is {text!r}", "numbers with commas between them", f"pass for example {_LISTS[name]}"
        ) from None
    return tuple(int(number) if number.is_integer() else number for number in numbers)
