"""Write a copy of an optimized folder with LoRA files in its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sdonnx.folder.certificate import CERTIFICATE, CERTIFICATE_PAGE
from sdonnx.folder.folder_version import read_report
from sdonnx.folder.pipeline_folder import (
    ONNX_WEIGHTS,
    QDQ_MODEL,
    QDQ_WEIGHTS,
    REPORT,
    SHARED_WEIGHTS,
    PipelineFolder,
    atomic_folder,
    copy_folder,
    hash_file,
    read_json,
)
from sdonnx.folder.weight_table import PROVENANCE
from sdonnx.lora.changed_component import ChangedComponent
from sdonnx.lora.loaded_adapters import AdapterState, LoadedAdapters
from sdonnx.models.registry import family_of

__all__ = ["bake_adapters"]

# Of the unchanged weights.
_LEFT_OUT = (CERTIFICATE, CERTIFICATE_PAGE)


def bake_adapters(
    source: Path, out: Path, adapters: Sequence[tuple[Path, float | Mapping[str, float]]], overwrite: bool = False
) -> dict[str, int]:
    """Write a copy of an optimized folder with adapters in its weights.

    Images equal, bit for bit, those after `OrtDiffusionPipeline.load_lora_weights` with these adapters. A certificate
    is not copied, since it is about the unchanged weights.

    Args:
        source: the optimized folder.
        out: the folder to write.
        adapters: for each adapter its file, and its weight: one for all components, or by component, where those that
            are not named have 1.
        overwrite: replace the pipeline in `out`, if there is one.

    Returns:
        The number of changed initializers by component.

    Raises:
        WeightsError: a file cannot be used, or is for another model.
        OptionError: the weights of the folder cannot be changed.
        FolderError: the folder is broken.
        OutputError: the output cannot be written.
    """
    pipeline = PipelineFolder.open(source)
    read_report(source)
    components = [spec.name for spec in family_of(pipeline).components if spec.takes_lora]
    loaded = LoadedAdapters(pipeline, components)
    files = [loaded.read(path) for path, _ in adapters]
    order = tuple(map(str, range(len(files))))
    weights = {name: loaded.by_component(weight) for name, (_, weight) in zip(order, adapters, strict=True)}
    state = AdapterState(dict(zip(order, files, strict=True)), weights, dict.fromkeys(loaded.tables, order))
    changed = {component: loaded.changed(state, component) for component in loaded.tables}
    with atomic_folder(out, overwrite, [source]) as partial:
        ignored = shutil.ignore_patterns(*_LEFT_OUT, ".*")
        copy_folder(source, partial, ignored)
        for component, each in changed.items():
            _write_component(partial / component, each)
        _write_report(partial, [(path, weights[name]) for name, (path, _) in zip(order, adapters, strict=True)])
    return {component: len(each.values) for component, each in changed.items()}


def _write_component(folder: Path, changed: ChangedComponent) -> None:
    """Write changed initializers into a component's files."""
    if not changed.values:
        return
    for name in (QDQ_MODEL, QDQ_WEIGHTS):  # they have the unchanged weights
        (folder / name).unlink(missing_ok=True)
    initializers, inline = dict(changed.table.initializers), set[str]()
    with (folder / ONNX_WEIGHTS).open("r+b") as file:
        for name, values in changed.values.items():
            if (offsets := initializers[name].offsets) is None:
                initializers[name] = replace(initializers[name], data=values.tobytes())
                inline.add(name)
            else:
                file.seek(offsets[0])
                file.write(values.tobytes())
    if not inline:
        return
    for graph in sorted({graph for name in inline for graph in initializers[name].graphs}):
        model = ir.load(folder / graph)
        for name in inline.intersection(changed.names(graph)):
            model.graph.initializers[name].const_value = ir.tensor(changed.values[name], name=name)
        ir.save(model, folder / graph)
    content = replace(changed.table, initializers=initializers).as_json()
    (folder / PROVENANCE).write_text(json.dumps(content) + "\n", encoding="utf-8")
    _write_digests(folder / SHARED_WEIGHTS)


def _write_digests(path: Path) -> None:
    """Write the graphs' digests into a file that lists their weights, if there is one."""
    if not path.is_file():
        return
    entries: dict[str, Any] = read_json(path)
    graphs = entries.get("__metadata__", {})
    entries["__metadata__"] = {file: hash_file(path.parent / file)[1] for file in graphs}
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _write_report(folder: Path, adapters: Sequence[tuple[Path, Mapping[str, float]]]) -> None:
    """Add the adapters to the report."""
    report = read_json(folder / REPORT)
    earlier = report.get("adapters")
    added = [{"file": path.name, "weights": dict(weights)} for path, weights in adapters]
    report["adapters"] = [*(earlier if isinstance(earlier, list) else []), *added]
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
