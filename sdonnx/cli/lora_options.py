"""Options of `sdonnx generate` and `sdonnx bake` for LoRA files."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdonnx.errors import OptionError
from sdonnx.lora.lora_folder import lora_files, lora_name
from sdonnx.terminal import add_option

if TYPE_CHECKING:
    from sdonnx.runtime.pipeline import OrtDiffusionPipeline

__all__ = ["LoraFile", "add_lora_arguments", "add_lora_tags", "load_lora_files", "read_lora_files", "read_lora_tags"]

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
