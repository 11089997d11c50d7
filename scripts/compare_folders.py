"""Compare two optimized folders, to show that a change of the code does not change the graphs that it writes.

    python scripts/compare_folders.py BEFORE AFTER
    python scripts/compare_folders.py BEFORE AFTER --rename call=step_index --rename in.=inputs. --ignore format

Graphs are equal if their ONNX messages are equal, weights in other files included. `--rename OLD=NEW` renames files,
graphs, tensors and JSON keys of BEFORE first; an OLD that ends in `.` is a prefix. `--ignore KEY` leaves out entries of
JSON files. The exit status is 1 if there are differences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

Rename = Callable[[str], str]


def renaming(table: Mapping[str, str]) -> Rename:
    """Return a function that renames by a table: whole names, and prefixes where the old name ends in `.`."""
    prefixes = {old: new for old, new in table.items() if old.endswith(".")}

    def rename(name: str) -> str:
        if name in table:
            return table[name]
        for old, new in prefixes.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return rename


def differences(before: Path, after: Path, rename: Rename, ignored: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each difference of two folders.

    Args:
        before: a folder.
        after: another folder.
        rename: maps names of `before` to names of `after`.
        ignored: keys of JSON files to leave out.
    """
    old_files = {_renamed_path(path.relative_to(before), rename): path for path in _files(before)}
    new_files = {path.relative_to(after): path for path in _files(after)}
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files:
            yield f"{name}: missing from {after}"
        elif name not in old_files:
            yield f"{name}: missing from {before}"
        else:
            for line in _file_differences(old_files[name], new_files[name], rename, ignored):
                yield f"{name}: {line}"


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _renamed_path(path: Path, rename: Rename) -> Path:
    return path.with_name(rename(path.name))


def _file_differences(old: Path, new: Path, rename: Rename, ignored: Collection[str]) -> Iterator[str]:
    if new.suffix == ".onnx":
        yield from _model_differences(_load(old), _load(new), rename)
    elif new.suffix == ".json":
        first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (old, new))
        yield from _json_differences(_renamed_json(first, rename), second, ignored)
    elif _digest(old) != _digest(new):
        yield "the content differs"


def _load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_differences(old: onnx.ModelProto, new: onnx.ModelProto, rename: Rename) -> Iterator[str]:
    _rename_graph(old.graph, rename)
    for field in ("input", "output", "initializer", "value_info", "node"):
        yield from _sequence_differences(field, getattr(old.graph, field), getattr(new.graph, field))
        old.graph.ClearField(field)
        new.graph.ClearField(field)
    if old.graph.name != new.graph.name:
        yield f"the graph is named {new.graph.name!r}, was {old.graph.name!r}"
        old.graph.name = new.graph.name
    if old != new:
        yield "other parts of the model differ"


def _rename_graph(graph: onnx.GraphProto, rename: Rename) -> None:
    graph.name = rename(graph.name)
    named = [*graph.input, *graph.output, *graph.initializer, *graph.value_info]
    for each in named:
        each.name = rename(each.name)
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [rename(name) for name in values]
        for attribute in node.attribute:
            for subgraph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename_graph(subgraph, rename)


def _sequence_differences(field: str, old: Sequence[Any], new: Sequence[Any]) -> Iterator[str]:
    """Yield the first difference of two sequences of messages; value_info is compared without its order."""
    if field == "value_info":
        old, new = (sorted(values, key=lambda value: value.name) for values in (old, new))
    if len(old) != len(new):
        yield f"{len(new)} of {field}, were {len(old)}"
        return
    for index, (first, second) in enumerate(zip(old, new, strict=True)):
        if first != second:
            yield f"{field} {index} is {_short(second)}, was {_short(first)}"
            return


def _short(message: Any) -> str:
    text = " ".join(str(message).split())
    return text if len(text) < 300 else text[:300] + " ..."


def _renamed_json(content: Any, rename: Rename) -> Any:
    if isinstance(content, dict):
        return {rename(key): _renamed_json(value, rename) for key, value in content.items()}
    return [_renamed_json(value, rename) for value in content] if isinstance(content, list) else content


def _json_differences(old: Any, new: Any, ignored: Collection[str], path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted((old.keys() | new.keys()) - set(ignored)):
            yield from _json_differences(old.get(key), new.get(key), ignored, f"{path}/{key}")
    elif old != new:
        yield f"{path or '/'} is {_short(new)}, was {_short(old)}"


def _table(entries: Iterable[str]) -> dict[str, str]:
    table = {}
    for entry in entries:
        old, separator, new = entry.partition("=")
        if not separator or not old or not new:
            raise SystemExit(f"--rename {entry}; expected OLD=NEW")
        table[old] = new
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path, help="an optimized folder")
    parser.add_argument("after", type=Path, help="another optimized folder")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="rename in BEFORE first")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="a key of JSON files to leave out")
    options = parser.parse_args(arguments)
    for folder in (options.before, options.after):
        if not folder.is_dir():
            raise SystemExit(f"{folder} is no folder; expected an optimized folder")
    found = list(differences(options.before, options.after, renaming(_table(options.rename)), options.ignore))
    for line in found:
        print(line)
    if not found:
        print("equal")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
