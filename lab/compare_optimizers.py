"""Fuse the graphs of several exporters with sdonnx and with ONNX Runtime's optimizer, and count the fused operators.

`python lab/compare_optimizers.py --source FOLDER --exports FOLDER --out docs/results/exporters-ARCH.json`

Each component of the diffusers pipeline in --source is exported to EXPORTS/EXPORTER/COMPONENT, unless that file
exists, and optimized by both optimizers, each in a separate process. --out receives a JSON line for each (component,
exporter, optimizer), which replaces an earlier one. --page is generated from all such files in the folder of --out.
Without --source only the page is written.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
Key = tuple[str, str, str]

ROOT = Path(__file__).resolve().parent.parent
OWN = "sdonnx"
COMPONENTS = ("text_encoder", "unet", "vae_encoder", "vae_decoder")
EXPORTERS = (OWN, "dynamo-20", "dynamo-18", "torchscript-17", "torchscript-14", "torchscript-14-baddbmm")
OPTIMIZERS = (OWN, "onnxruntime")
KEY = ("component", "exporter", "optimizer")

# Source: model_type_mapping in ONNX Runtime's models/stable_diffusion/optimize_pipeline.py, 1.31.1.
MODEL_TYPES = {"text_encoder": "clip", "unet": "unet", "vae_encoder": "vae", "vae_decoder": "vae"}

# The counted operators of each column. LayerNormalization is an ONNX operator, the others are com.microsoft's.
COLUMNS = {
    "attention": ("MultiHeadAttention", "Attention"),
    "BiasSplitGelu": ("BiasSplitGelu",),
    "GroupNorm + SkipGroupNorm": ("GroupNorm", "SkipGroupNorm"),
    "LayerNorm + SkipLayerNorm": ("LayerNormalization", "SkipLayerNormalization"),
    "BiasAdd": ("BiasAdd",),
    "NhwcConv": ("NhwcConv",),
    "nodes": ("nodes",),
}
TITLES = ("component", "exporter", "exported", *COLUMNS, "seconds", "peak, GB")
SUMMED = ("attention",)  # these columns show the sum of both operators, the other columns show both
DONE = "done"
PACKAGES = ("diffusers", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "transformers")

PAGE = """# One pipeline, several exporters, two optimizers

The results of `sdonnx` and of ONNX Runtime's optimizer (`onnxruntime.transformers`, as called in its
`models/stable_diffusion/optimize_pipeline.py`) for the same ONNX files. `lab/compare_optimizers.py` writes this
page and the result files that it shows; do not edit it.

- Every pair is **sdonnx / ONNX Runtime**; `a+b` counts the two operators of the column's title.
- The exporter `sdonnx` is this project's export (opset 23). The others are torch's (`tests/support/exporters.py`):
  `dynamo-N` is `torch.onnx.export(dynamo=True)` at opset N, `torchscript-N` the older exporter at opset N;
  `baddbmm` uses the older attention of diffusers and transformers, without scaled_dot_product_attention.
- *exported* is the number of nodes before optimization, *nodes* the number after it, both without Constant.
- *attention* is MultiHeadAttention and Attention of com.microsoft. The other operators are also com.microsoft's, except
  LayerNormalization, which is ONNX's. ONNX operators that an optimizer did not change are not counted: for example,
  opset 23 has Attention and GroupNormalization.
- sdonnx has fewer NhwcConv because it converts convolutions of 1x1 to matmuls.
- *seconds* is the time from the file's path to the fused graph in memory, without imports. *peak* is the peak memory
  of the process (VmHWM). ONNX Runtime's optimizer has the options that its script sets for `--float16`; both
  optimizers run before the conversion to fp16.
"""

SECTION = """
## {arch}

{table}
{notes}
Versions: {versions}. Machine: {machine}. Time limit: {limit} s for each. Commit: {commits}.
All results: [{file}]({link}). To reproduce them:

```bash
sdonnx sample --arch {arch} -o out/samples/{arch}
{commands}
```
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if an export failed."""
    options = _options(arguments)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if options.child:
        print(json.dumps(_CHILDREN[options.child[0]](*options.child[1:])))
        return 0
    records = read_records(options.out)
    failures = _compare(options, records) if options.source else []
    options.page.write_text(page(options.out.parent), encoding="utf-8")
    _show(rows(read_records(options.out).values()))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path("docs/results/exporters-tiny.json")
    parser.add_argument("--source", type=Path, help="a diffusers pipeline; without it only the page is written")
    parser.add_argument("--exports", type=Path, default=Path("out/exports"), help="exported graphs (%(default)s)")
    parser.add_argument("--out", type=Path, default=results, help="file of results (%(default)s)")
    parser.add_argument("--page", type=Path, default=Path("docs/lab/exporters.md"), help="page to write (%(default)s)")
    parser.add_argument("--components", nargs="+", default=COMPONENTS, choices=COMPONENTS)
    parser.add_argument("--exporters", nargs="+", default=EXPORTERS, choices=EXPORTERS)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--limit", type=float, default=600, help="time limit of an optimizer in seconds (%(default)s)")
    parser.add_argument("--discard", action="store_true", help="delete the exports of this run after measuring")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _compare(options: argparse.Namespace, records: dict[Key, Record]) -> list[str]:
    """Export and measure; return the failed exports with the reasons."""
    failures = []
    context = _context(options.limit)  # before writing results, which changes the checkout
    for exporter in options.exporters:
        folder = options.exports / exporter
        kept = folder.exists() or not options.discard
        for component in options.components:
            path = folder / component / "model.onnx"
            discarded = options.discard and not path.exists() and exporter != OWN
            if not path.exists():
                answer = run_child(["export", exporter, component, str(options.source), str(folder)], None)
                _print_progress(exporter, component, "export", answer)
                if answer["outcome"] != DONE:
                    failures.append(f"{path} could not be exported: {answer['outcome']}")
                    continue
            for optimizer in options.optimizers:
                answer = run_child(["fuse", optimizer, component, str(path)], options.limit)
                _print_progress(exporter, component, optimizer, answer)
                key = (component, exporter, optimizer)
                records[key] = dict(zip(KEY, key, strict=True)) | answer | context
                write_records(options.out, records)
            if discarded:
                shutil.rmtree(path.parent)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)  # missing if no export succeeded
    return failures


def _print_progress(exporter: str, component: str, task: str, answer: Record) -> None:
    Console(highlight=False).print(
        exporter, component, task, answer["outcome"], f"{answer['seconds']:.1f} s", soft_wrap=True
    )


def read_records(path: Path) -> dict[Key, Record]:
    """Return the records of a JSON-lines file by (component, exporter, optimizer); empty if it is missing."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(record["component"], record["exporter"], record["optimizer"]): record for record in records}


def write_records(path: Path, records: Mapping[Key, Record]) -> None:
    """Write a JSON-lines file in the order of the tables."""
    orders = (COMPONENTS, EXPORTERS, OPTIMIZERS)
    keys = sorted(records, key=lambda key: [order.index(name) for order, name in zip(orders, key, strict=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(records[key]) + "\n" for key in keys), encoding="utf-8")


def run_child(arguments: Sequence[str], limit_s: float | None) -> Record:
    """Run one of `_CHILDREN` in a separate process and return its answer.

    The answer's `outcome` is "done", "crash: ..." with the first line of the exception or the signal, or "not
    finished in ... s" if the process was killed at the time limit.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    start = time.perf_counter()
    answer: Record = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            answer = {"outcome": f"not finished in {limit_s:g} s", "peak_bytes": peak_bytes(process.pid)}
        finally:
            process.kill()  # no effect if it has ended
    if not answer and process.returncode == 0:
        answer = json.loads(output.splitlines()[-1])
    elif not answer:
        last = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
        reason = f"killed by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else last
        answer = {"outcome": f"crash: {reason}"}
    outcome = answer["outcome"]
    for folder in (ROOT, Path.cwd()):
        outcome = outcome.replace(f"{folder}{os.sep}", "")  # paths in messages become relative
    return {"seconds": time.perf_counter() - start} | answer | {"outcome": outcome}


def peak_bytes(process: int | str = "self") -> int | None:
    """Return the peak memory of a process, or None if it is unknown.

    Source: VmHWM in Linux's /proc, which, unlike ru_maxrss, is reset when a program starts.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def _fuse(optimizer: str, component: str, path: str) -> Record:
    """Optimize a graph and count its operators; runs in a separate process."""
    fuse = {OWN: _by_sdonnx, "onnxruntime": _by_onnxruntime}[optimizer](component, path)
    start = time.perf_counter()
    try:
        answer: Record = {"outcome": DONE, "counts": fuse()}
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        answer = {"outcome": f"crash: {type(error).__name__}: {first} ({place})"}
    # Measured here, because the remaining work is not part of the optimization.
    answer |= {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}
    return answer | ({"exported": _exported(path)} if answer["outcome"] == DONE else {})


def _exported(path: str) -> Record:
    """Return the opset and the number of nodes of the exported graph."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return {"opset": opset, "nodes": sum(node.op_type != "Constant" for node in model.graph.node)}


def count(nodes: Iterable[Any]) -> dict[str, int]:
    """Count the operators of the columns, and all nodes but Constant; accepts nodes of onnx and of onnx_ir."""
    found = Counter((node.domain if node.domain != "ai.onnx" else "", node.op_type) for node in nodes)
    names = [name for column in COLUMNS.values() for name in column if name != "nodes"]
    domains = {name: "" if name == "LayerNormalization" else "com.microsoft" for name in names}
    return {name: found[domains[name], name] for name in names} | {"nodes": found.total() - found["", "Constant"]}


def _by_sdonnx(component: str, path: str) -> Any:
    from sdonnx.fusions.fusion_table import fuse
    from sdonnx.graph.loading.load import load_model

    def run() -> dict[str, int]:
        model = load_model(Path(path))
        fuse(model, "cuda")
        return count(model.graph.all_nodes())

    return run


def _by_onnxruntime(component: str, path: str) -> Any:
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    options = importlib.import_module("onnxruntime.transformers.fusion_options").FusionOptions(MODEL_TYPES[component])

    def run() -> dict[str, int]:
        # Source: _optimize_sd_pipeline in ONNX Runtime's models/stable_diffusion/optimize_pipeline.py, 1.31.1.
        model = optimizer.optimize_model(
            path,
            model_type=MODEL_TYPES[component],
            num_heads=0,
            hidden_size=0,
            opt_level=0,
            optimization_options=options,
            use_gpu=True,
            provider=None,
        )
        return count(model.nodes())

    return run


def _export(exporter: str, component: str, source: str, folder: str) -> Record:
    """Export one component or, with our exporter, the whole pipeline; runs in a separate process."""
    from sdonnx.folder.pipeline_folder import MODEL_INDEX, PipelineFolder, read_json
    from sdonnx.models.registry import family_of

    start = time.perf_counter()
    if exporter == OWN:
        from sdonnx.export.export_pipeline import export_pipeline

        export_pipeline(source, Path(folder), overwrite=Path(folder).exists())
    else:
        others = importlib.import_module("support.exporters")
        spec = family_of(PipelineFolder.open(Path(source))).component(component)
        library, name = read_json(Path(source) / MODEL_INDEX)[spec.source]
        module = getattr(importlib.import_module(library), name).from_pretrained(Path(source) / spec.source)
        pipeline = SimpleNamespace(**{spec.source: module.eval()})
        chosen = {exporter.name: exporter for exporter in others.EXPORTERS}[exporter]
        config = read_json(Path(source) / spec.source / "config.json")
        out = Path(folder) / component
        partial = out.with_name(f"{component}.partial")  # not mistaken for a complete export if interrupted
        shutil.rmtree(partial, ignore_errors=True)
        others.export_component(pipeline, spec, config, chosen, partial / "model.onnx")
        partial.rename(out)
    return {"outcome": DONE, "seconds": time.perf_counter() - start}


_CHILDREN: dict[str, Callable[..., Record]] = {"fuse": _fuse, "export": _export}


def _context(limit_s: float) -> Record:
    """Return the environment of the measurement, without names and folders of this machine."""
    from sdonnx.environment_record import environment

    own = environment()
    versions = {"python": platform.python_version(), OWN: own["packages"][OWN]}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    machine = {name: own["machine"][name] for name in ("cpu", "cpus")}
    machine["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    interpreter, *rest = sys.orig_argv
    return {
        "limit_s": limit_s,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(interpreter).name, *rest]),
        "versions": versions,
        "git": own["git"],
        "machine": machine,
    }


def rows(records: Iterable[Record]) -> list[tuple[list[str], list[str]]]:
    """Return the rows of the table: the cells of TITLES, and the outcomes of optimizers that did not finish."""
    pairs: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        pairs.setdefault((record["component"], record["exporter"]), {})[record["optimizer"]] = record
    table = []
    for (component, exporter), pair in pairs.items():
        both = [pair.get(optimizer, {}) for optimizer in OPTIMIZERS]
        exported = next((str(one["exported"]["nodes"]) for one in both if "exported" in one), "-")
        cells = [" / ".join(_counted(one, column) for one in both) for column in COLUMNS]
        cells.append(" / ".join(f"{one['seconds']:.1f}" if one else "-" for one in both))
        cells.append(" / ".join(f"{one['peak_bytes'] / 1e9:.1f}" if one.get("peak_bytes") else "-" for one in both))
        ends = [f"{one['optimizer']}: {one['outcome']}" for one in both if one and one["outcome"] != DONE]
        table.append(([component, exporter, exported, *cells], ends))
    return table


def _counted(record: Record, column: str) -> str:
    if "counts" not in record:
        return "-"
    numbers = [record["counts"][name] for name in COLUMNS[column]]
    return str(sum(numbers)) if column in SUMMED else "+".join(map(str, numbers))


def _show(table: Iterable[tuple[list[str], list[str]]]) -> None:
    shown = Table()
    for title in TITLES:
        shown.add_column(title, no_wrap=title in KEY)
    ends: dict[str, None] = {}
    for cells, how in table:
        shown.add_row(*cells)
        ends |= {f"{' '.join(cells[:2])}: {end}": None for end in how}
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(shown, *ends, sep="\n")


def page(results: Path) -> str:
    """Return the page with all result files of a folder, starting with tiny's."""
    paths = sorted(results.glob("exporters-*.json"), key=lambda path: path.stem.removeprefix("exporters-") != "tiny")
    return PAGE + "".join(_section(path, list(read_records(path).values())) for path in paths)


def _section(path: Path, records: Sequence[Record]) -> str:
    """Return a table as Markdown, with numbered notes on optimizers that did not finish."""

    def each(values: Iterable[str], separator: str = " and ") -> str:
        return separator.join(dict.fromkeys(values))

    notes: list[str] = []
    lines = [" | ".join(TITLES), " | ".join(["---"] * 2 + ["---:"] * (len(TITLES) - 2))]
    for cells, ends in rows(records):
        notes += [end for end in ends if end not in notes]
        cells[-2] += "".join(f" ({notes.index(end) + 1})" for end in ends)
        lines.append(" | ".join(cells))
    commits = ((one["git"].get("commit"), one["git"].get("changed")) for one in records if one["optimizer"] == OWN)
    return SECTION.format(
        arch=path.stem.removeprefix("exporters-"),
        table="\n".join(f"| {line} |" for line in lines),
        notes="".join(f"\n{number}. {note}" for number, note in enumerate(notes, 1)) + ("\n" if notes else ""),
        versions=each(", ".join(f"{name} {value}" for name, value in one["versions"].items()) for one in records),
        machine=each(
            f"{one['machine']['cpus']} cores, {one['machine']['memory_bytes'] / 1e9:.0f} GB" for one in records
        ),
        limit=each(f"{one['limit_s']:g}" for one in records),
        commits=each(
            f"{(commit or 'unknown')[:12]}{' with changes' if changed else ''}" for commit, changed in commits
        ),
        file=path.name,
        link=f"../results/{path.name}",
        commands=each((one["command"] for one in records), "\n"),
    )


if __name__ == "__main__":
    sys.exit(main())
