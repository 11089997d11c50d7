"""`sdonnx lora show FILE` and `sdonnx lora convert FILE -o OUT`: look into LoRA files, and convert them."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sdonnx.errors import OptionError, OutputError
from sdonnx.lora.adapter_file import PICKLES, AdapterFile, adapter_from_tensors, read_adapter
from sdonnx.lora.adapter_tensors import checked
from sdonnx.lora.peft_layout import peft_tensors
from sdonnx.lora.weight_change import WeightChange
from sdonnx.terminal import add_common, add_option, console

__all__ = ["add_arguments", "run"]

_ACTIONS = ("show", "convert")
_SHOWN_KEYS = 8  # --all shows every one
_SHOWN_CHARACTERS = 200  # of a value of the metadata

# Keys of kohya's metadata and of https://github.com/Stability-AI/ModelSpec that help to use an adapter.
_SHOWN_METADATA = (
    "modelspec.title", "modelspec.architecture", "modelspec.description", "modelspec.trigger_phrase",
    "modelspec.usage_hint", "ss_output_name", "ss_base_model_version", "ss_sd_model_name", "ss_network_module",
    "ss_network_dim", "ss_network_alpha", "ss_resolution", "ss_clip_skip", "ss_training_comment",
)  # fmt: skip

_SUFFIX = ".safetensors"
_CONFIGURATION = "lora_adapter_metadata"  # its scales are in the converted tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Look into a LoRA file, or convert it. show: its format, the weights that it changes, and keys that match "
        "nothing; convert: write it in the layout of PEFT, which diffusers loads."
    )
    add = partial(add_option, parser)
    parser.add_argument("action", choices=_ACTIONS, help=", ".join(_ACTIONS))
    parser.add_argument("file", type=Path, help="a safetensors file, or a folder that PEFT or diffusers wrote")
    add("-o", "--output", type=Path, help="for convert: the safetensors file to write")
    add("--allow_pickle", action="store_true", help="also read a pickle (.pt, .bin, .ckpt), whose code is not run")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    add("--all", action="store_true", help="list every unknown key instead of the first eight")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.action == "show":
        if options.output is not None:
            raise OptionError("-o with show", "-o with convert")
        _print(options.file, _read(options), every_key=options.all)
        return 0
    _require_new(options.output, options.overwrite)
    adapter = _read(options)
    tensors = peft_tensors(adapter)
    metadata = {key: value for key, value in adapter.metadata.items() if key != _CONFIGURATION}
    _write(options.output, tensors, metadata | {"format": "pt"})
    left_out = f"; left out {len(adapter.unknown)} unknown keys" if adapter.unknown else ""
    console().print(escape(f"wrote {options.output}{left_out}"))
    return 0


def _read(options: argparse.Namespace) -> AdapterFile:
    file: Path = options.file
    if not options.allow_pickle or file.suffix.lower() not in PICKLES:
        return read_adapter(file)
    from sdonnx.export.stored_tensors import tensors_in_pickle

    found = tensors_in_pickle(file, training_state=True)
    tensors = {}
    for key, tensor in found.items():
        plain = tensor.detach()
        tensors[key] = checked(file, key, (plain if str(plain.dtype) == "torch.float16" else plain.float()).numpy())
    return adapter_from_tensors(file, tensors, {})


def _print(file: Path, adapter: AdapterFile, *, every_key: bool) -> None:
    out = console()
    out.print(escape(f"{file}: {adapter.format}"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("component", "weights", "method", "rank"):
        table.add_column(name, justify="right" if name == "weights" else "left", no_wrap=True)
    for component, changes in adapter.changes.items():
        for kind in sorted({change.kind for change in changes.values()}):
            of_kind = [change for change in changes.values() if change.kind == kind]
            table.add_row(component, str(len(of_kind)), kind, _ranks(of_kind))
    out.print(table)
    if adapter.unknown:
        shown = adapter.unknown if every_key else adapter.unknown[:_SHOWN_KEYS]
        more = len(adapter.unknown) - len(shown)
        out.print(f"unknown keys: {len(adapter.unknown)}")
        for key in (*map(_plain, shown), *([f"and {more} more"] if more else [])):
            out.print(f"    {key}")
    for key in _SHOWN_METADATA:
        if value := adapter.metadata.get(key):
            out.print(f"{key}: {_plain(value)}")


def _ranks(changes: Iterable[WeightChange]) -> str:
    """Return the ranks of changes: one, or the smallest and the largest one."""
    ranks = sorted({change.rank for change in changes})
    if ranks == [0]:
        return ""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _plain(text: str) -> str:
    """Return text of a file on one line, shortened, without control characters and markup."""
    text = " ".join(text.split())
    text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
    return escape("".join(each if each.isprintable() else ascii(each)[1:-1] for each in text))


def _require_new(output: Path | None, overwrite: bool) -> None:
    """Raise if the output cannot be written."""
    if output is None:
        raise OptionError("convert without -o", f"-o OUT{_SUFFIX}", "name the file to write")
    if output.suffix != _SUFFIX:
        raise OptionError(f"the output {output}", f"a name that ends with {_SUFFIX}")
    if output.is_dir() or (output.exists() and not overwrite):
        raise OutputError(f"the output {output} exists", "a new file", "choose another name, or pass --overwrite")


def _write(output: Path, tensors: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Write a file of tensors; another process sees the whole file or none."""
    from safetensors.numpy import save

    content = save(dict(tensors), metadata)
    partial_file = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{output.stem}.", dir=output.parent)
        partial_file = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        partial_file.chmod(0o666 & ~mask)  # mkstemp's file is private
        partial_file.replace(output)
    except OSError as error:
        found = f"the output {output} cannot be written ({error.strerror or error})"
        raise OutputError(found, "a writable file") from error
    finally:
        if partial_file is not None:
            with contextlib.suppress(OSError):
                partial_file.unlink()
