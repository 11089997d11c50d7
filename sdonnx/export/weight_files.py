"""Find the files of a component's weights: one file, or shards, in the wanted format and variant.

diffusers' `save_pretrained(variant="fp16")` writes `diffusion_pytorch_model.fp16.safetensors`, and for shards the index
`diffusion_pytorch_model.safetensors.index.fp16.json`; transformers uses the same names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from sdonnx.errors import WeightsError
from sdonnx.folder.pipeline_folder import read_json

__all__ = ["find_weights", "only_variant", "require_safetensors", "require_variant"]

_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")

_STEM = "|".join(_STEMS)
_VARIANT_FILE = re.compile(rf"(?:{_STEM})\.(\w+)\.(?:safetensors|bin)")
_VARIANT_INDEX = re.compile(rf"(?:{_STEM})\.(?:safetensors|bin)\.index\.(\w+)\.json")


def find_weights(
    folder: Path, *, allow_pickle: bool = False, variant: str | None = None
) -> tuple[tuple[Path, ...], str | None]:
    """Return the weight files of a component, one or all shards, and their variant; None for weights without one.

    Args:
        folder: the component's folder.
        allow_pickle: also accept `.bin` files, which are pickles, where there are no safetensors.
        variant: the variant to prefer. A component without it is read from the files without a variant, as in
            diffusers. By default, a variant is read only if it is the only one and there are no other files.

    Raises:
        WeightsError: there are no weights, only pickles, or several variants to choose from.
    """
    endings = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    for ending in endings:
        for wanted in dict.fromkeys((variant, None)):
            if files := _files(folder, ending, wanted):
                return files, wanted
        variants = _variants(folder, ending)
        if variant is None and len(variants) == 1:
            return _files(folder, ending, variants[0]), variants[0]
        if variants:
            found = f"{folder} has only the variant{'s' if len(variants) > 1 else ''} {', '.join(variants)}"
            raise WeightsError(found, "weights of the chosen variant", f"pass --variant {variants[0]}")
    if pickles := _pickles(folder):
        raise _refused(f"{folder} has weights only as a pickle ({pickles[0]})", folder.name)
    others = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
    raise WeightsError(
        f"{folder} has {f'only {others}' if others else 'no weights'}",
        f"{_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors",
        "download the pipeline's safetensors files",
    )


def require_safetensors(folders: Iterable[Path], allow_pickle: Collection[str]) -> None:
    """Raise WeightsError with the names of all components that are refused because their weights are pickles.

    Args:
        folders: the components' folders.
        allow_pickle: names of components that may have pickles as weights.
    """
    refused = [
        folder.name
        for folder in folders
        if folder.name not in allow_pickle and not any(folder.glob("*.safetensors")) and _pickles(folder)
    ]
    if len(refused) > 1:
        raise _refused(f"{', '.join(refused)} have weights only as pickles (.bin)", "all")


def only_variant(repository: str, files: Iterable[str]) -> str | None:
    """Return the variant to download: the only one of components that have no weights without a variant, or None.

    Args:
        repository: name of the repository, for the message.
        files: paths of its files, COMPONENT/FILE.

    Raises:
        WeightsError: there are several variants to choose from.
    """
    ending, components = ".safetensors", dict[str, list[str]]()
    for file in files:
        component, _, name = file.rpartition("/")
        components.setdefault(component, []).append(name)
    usual = {f"{stem}{ending}{index}" for stem in _STEMS for index in ("", ".index.json")}
    lacking = [_variants_of(names, ending) for names in components.values() if not usual & set(names)]
    variants = [set(each) for each in lacking if each]
    if not variants:
        return None
    common = sorted(set.intersection(*variants))
    if len(common) == 1:
        return common[0]
    found = ", ".join(sorted(set.union(*variants)))
    raise WeightsError(
        f"{repository} has only the variants {found}", "weights of one variant", f"pass --variant {found.split(',')[0]}"
    )


def require_variant(folders: Collection[Path], variant: str) -> None:
    """Raise WeightsError if no component has weights of a variant."""
    found = {each for folder in folders for ending in (".safetensors", ".bin") for each in _variants(folder, ending)}
    if variant not in found:
        known = f"one of {', '.join(sorted(found))}" if found else "no --variant, since the weights have none"
        raise WeightsError(f"no component has weights of the variant {variant!r}", known)


def _refused(found: str, allowed: str) -> WeightsError:
    return WeightsError(
        f"{found}, which can run code when opened",
        "safetensors",
        f"convert to safetensors, or pass --allow_pickle {allowed} if you trust the author",
    )


def _files(folder: Path, ending: str, variant: str | None) -> tuple[Path, ...]:
    """Return the files of one variant, in the order of the stems; empty if there are none."""
    infix = "" if variant is None else f".{variant}"
    for stem in _STEMS:
        file = folder / f"{stem}{infix}{ending}"
        if file.is_file():
            return (file,)
        index = folder / f"{stem}{ending}.index{infix}.json"
        if index.is_file():
            return _shards(folder, index)
    return ()


def _shards(folder: Path, index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise WeightsError(f"{index} has no weight_map", "an index of shards", "copy the folder again")
    shards = tuple(folder / name for name in sorted(set(names.values())))
    for shard in shards:
        if shard.parent != folder or not shard.is_file():
            raise WeightsError(
                f"{index} lists {shard.name}, which is not in {folder}", "every shard", "copy the folder again"
            )
    return shards


def _variants(folder: Path, ending: str) -> list[str]:
    """Return the variants of which a component has weights."""
    return _variants_of([path.name for path in folder.iterdir()] if folder.is_dir() else [], ending)


def _variants_of(names: Iterable[str], ending: str) -> list[str]:
    matches = [_VARIANT_FILE.fullmatch(name) or _VARIANT_INDEX.fullmatch(name) for name in names if ending in name]
    return sorted({match[1] for match in matches if match is not None})


def _pickles(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.bin"))
