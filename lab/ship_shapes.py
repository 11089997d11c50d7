#!/usr/bin/env python3
"""Put weights that lab/train_shapes.py trained into the package, with the record of their training.

    python lab/ship_shapes.py trained/shapes trained/shapes-dit --result trained/result.json
    python lab/ship_shapes.py trained/shapes-dit  # keeps the other pipeline, which ships already
    python lab/ship_shapes.py again/shapes-dit --earlier trained/result.json  # trained with --resume trained

Nothing is written unless all pipelines are finite, small enough, share one autoencoder, and are as accurate on
held-out captions as `sdonnx.sample.shapes.shape_evaluation.BOUNDS` says. The record has one JSON object per line, one
for each run of the training of the weights that ship. `SHIPPED` in `shape_architectures` lists the pipelines that
`sdonnx sample` offers: add a new one there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sdonnx.errors import FolderError, OptionError, SdonnxError, WeightsError
from sdonnx.folder.pipeline_folder import PipelineFolder, read_json
from sdonnx.sample.architecture import Architecture
from sdonnx.sample.sample_weights import read_weights
from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_evaluation import BOUNDS
from sdonnx.sample.shapes.shape_judge import wilson_interval
from sdonnx.sample.write_sample import build_network

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "train-shapes.json"

MAX_BYTES = 12_000_000  # of one pipeline
MAX_TOTAL_BYTES = 24_000_000  # of the package
MIN_PROMPTS = 2000
_RESULT = "result.json"

Weights = dict[str, "torch.Tensor"]


def find_pipelines(folders: Sequence[Path]) -> dict[str, PipelineFolder]:
    """Return the folder of each pipeline to ship, by its name.

    Raises:
        OptionError: a folder has another pipeline, or there are two of one class.
    """
    names = {architecture.pipeline: name for name, architecture in TRAINED.items()}
    opened = [PipelineFolder.open(folder) for folder in folders]
    found = {names.get(each.class_name, each.class_name): each for each in opened}
    if not found.keys() <= TRAINED.keys() or len(opened) != len(found):
        classes = ", ".join(each.class_name for each in opened)
        raise OptionError(f"folders of {classes}", f"at most one of each of {', '.join(names)}", "pass one folder each")
    return {name: found[name] for name in TRAINED if name in found}


def shipped_pipelines(new: Collection[str]) -> dict[str, dict[Path, Weights]]:
    """Return the weights of each pipeline that the package has, by its name and their files.

    Args:
        new: names of pipelines to omit.

    Raises:
        WeightsError: a file is damaged.
    """
    return {
        name: {
            path: read_weights(path, build_network(architecture.networks[component]))
            for component, path in architecture.weights.items()
        }
        for name, architecture in TRAINED.items()
        if name not in new and all(path.is_file() for path in architecture.weights.values())
    }


def read_pipeline(architecture: Architecture, folder: PipelineFolder) -> dict[Path, Weights]:
    """Return the weights of a pipeline by the files that they ship as.

    Raises:
        WeightsError: weights do not fit the architecture, are not float16, not finite, or too large.
    """
    found = {
        architecture.weights[name]: read_weights(folder.component(name) / spec.weight_file, build_network(spec))
        for name, spec in architecture.networks.items()
    }
    size = sum(each.nbytes for weights in found.values() for each in weights.values())
    if size > MAX_BYTES:
        raise WeightsError(f"{folder.path} has {size} bytes", f"at most {MAX_BYTES}", "train fewer channels")
    return found


def join_pipelines(pipelines: Mapping[str, Mapping[Path, Weights]]) -> dict[Path, Weights]:
    """Return the weights of all pipelines, those that they share once.

    Raises:
        WeightsError: shared weights differ, or all are too large.
    """
    joined: dict[Path, Weights] = {}
    for name, files in pipelines.items():
        for path, weights in files.items():
            before = joined.setdefault(path, weights)
            if any(not value.equal(before[key]) for key, value in weights.items()):
                raise WeightsError(
                    f"{path.stem} of {name} has other weights than that of another pipeline",
                    "one autoencoder",
                    "train both pipelines with one: --vae FOLDER",
                )
    total = sum(each.nbytes for weights in joined.values() for each in weights.values())
    if total > MAX_TOTAL_BYTES:
        raise WeightsError(f"the weights have {total} bytes", f"at most {MAX_TOTAL_BYTES}", "train fewer channels")
    return joined


def result_files(folders: Sequence[Path], named: Sequence[Path]) -> list[Path]:
    """Return the files of results: those that are named, or those in the folders or next to them.

    Raises:
        FolderError: a folder has no result.
    """
    if named:
        return list(dict.fromkeys(named))
    found: dict[Path, None] = {}
    for folder in folders:
        places = [place for place in (folder / _RESULT, folder.parent / _RESULT) if place.is_file()]
        if not places:
            raise FolderError(f"{folder} has no {_RESULT}", "the result of the training", "pass it with --result")
        found[places[0]] = None
    return list(found)


def kept_runs(record: Path, new: Collection[str], others: Collection[str]) -> list[dict[str, Any]]:
    """Return the lines of a record that remain: the training of the other pipelines that ship.

    Args:
        record: file of the record.
        new: names of the pipelines that are shipped now. Their entries are removed.
        others: names of the other pipelines that ship. If there are none, the record is written anew.

    Raises:
        FolderError: the record cannot be read.
    """
    if not others:
        return []
    try:
        runs = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        kept = [run | {"pipelines": {k: v for k, v in run["pipelines"].items() if k not in new}} for run in runs]
        for run in kept:
            if "resumed_by" in run:
                run["resumed_by"] = [name for name in run["resumed_by"] if name not in new]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FolderError(
            f"{record} cannot be read ({error})",
            f"the training of {', '.join(others)}, which ships already",
            "restore it, or pass the folders of all pipelines",
        ) from error
    # Those that ship need the training of their autoencoder too, and the runs that theirs resumed from.
    return [run for run in kept if run["pipelines"] or _trains_vae(run) or set(run.get("resumed_by", ())) & set(others)]


def _trains_vae(run: Mapping[str, Any]) -> bool:
    return any(each.get("part") == "vae" for each in run.get("curve", ()))


def add_earlier(runs: list[dict[str, Any]], earlier: Mapping[str, Any], new: Collection[str]) -> None:
    """Add a run that the training of pipelines resumed from to a record, in place; one that is in it is marked.

    Args:
        runs: the lines of the record so far.
        earlier: the result of the run.
        new: names of the pipelines.
    """
    same = ("command", "seconds", "device")
    for run in runs:
        if all(run.get(name) == earlier.get(name) for name in same):
            run["resumed_by"] = list(dict.fromkeys([*run.get("resumed_by", ()), *new]))
            return
    runs.append({**earlier, "pipelines": {}, "resumed_by": list(new)})


def check_results(results: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """Return the accuracy of each pipeline, by its name and measure.

    Args:
        results: all runs of the training of the pipelines.
        names: names of all pipelines that are to ship, in the order of the answer.

    Raises:
        FolderError: a pipeline has no result or several, a number contradicts its counts, or there is no record of the
            autoencoder's training.
        WeightsError: a pipeline is below a bound.
    """
    remedy = "pass the results of all runs of lab/train_shapes.py with --result"
    entries = [(name, entry) for result in results for name, entry in result.get("pipelines", {}).items()]
    if sorted(name for name, _ in entries) != sorted(names):
        listed = ", ".join(name for name, _ in entries) or "no pipeline"
        raise FolderError(f"results of {listed}", f"one of each of {', '.join(names)}", remedy)
    if not any(map(_trains_vae, results)):
        raise FolderError("results without the training of the autoencoder", "the run that trained it", remedy)
    found: dict[str, Mapping[str, Any]] = {}
    for name, entry in entries:
        for measure, bound in BOUNDS.items():
            _check_measure(f"{measure} of {name}", entry["accuracy"][measure], bound)
        prompts = entry["accuracy"]["right"]["count"]
        if prompts < MIN_PROMPTS:
            raise WeightsError(f"{name} was evaluated on {prompts} captions", f"at least {MIN_PROMPTS}", remedy)
        found[name] = entry["accuracy"]
    return {name: found[name] for name in names}


def _check_measure(title: str, counted: Mapping[str, Any], bound: float) -> None:
    right, count = counted["right"], counted["count"]
    expected = (right / count, *wilson_interval(right, count))
    if not all(
        math.isclose(counted[key], value) for key, value in zip(("share", "low", "high"), expected, strict=True)
    ):
        raise FolderError(f"{title}: numbers that are not those of {right} of {count}", "a result of the training",
                          "measure again")  # fmt: skip
    if expected[0] < bound:
        raise WeightsError(f"{title}: {expected[0]:.2%}", f"at least {bound:.0%}", "train longer")


def ship(
    folders: Sequence[Path], results: Sequence[Path], record: Path = RECORD, earlier: Sequence[Path] = ()
) -> dict[str, Mapping[str, Any]]:
    """Write the weights into the package and the record of their training; return the accuracy of each pipeline.

    Args:
        folders: folders of diffusers, one for each trained sample to ship. A pipeline without a folder stays if the
            package has it already.
        results: files of `result.json`; the folders' files if there are none.
        record: file of the record.
        earlier: files of results of runs that the training resumed from. Their accuracy does not count.

    Raises:
        SdonnxError: the weights or the results cannot ship. Nothing is written.
    """
    from safetensors.torch import save

    pipelines = find_pipelines(folders)
    new = {name: read_pipeline(TRAINED[name], folder) for name, folder in pipelines.items()}
    others = shipped_pipelines(new)
    join_pipelines(others | new)
    read = kept_runs(record, new, others)
    for path in earlier:
        add_earlier(read, read_json(path), new)
    read += [read_json(path) for path in result_files(folders, results)]
    runs = [run for index, run in enumerate(read) if run not in read[:index]]
    accuracy = check_results(runs, [name for name in TRAINED if name in new or name in others])
    lines = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in runs)
    for path, tensors in join_pipelines(new).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(save(dict(sorted(tensors.items())), {"format": "pt"}))
    record.write_text(lines, encoding="utf-8")
    return accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="trained pipeline of diffusers")
    parser.add_argument("--result", nargs="+", type=Path, default=[], metavar="FILE", help="results of the training")
    parser.add_argument(
        "--earlier", nargs="+", type=Path, default=[], metavar="FILE", help="results of runs that it resumed from"
    )
    options = parser.parse_args(arguments)
    try:
        accuracy = ship(options.folders, options.result, earlier=options.earlier)
    except SdonnxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, measures in accuracy.items():
        for measure, each in measures.items():
            interval = f"{100 * each['low']:.2f} to {100 * each['high']:.2f}"
            print(f"{name}, {measure}: {each['right']} of {each['count']}, {100 * each['share']:.2f} % ({interval})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
