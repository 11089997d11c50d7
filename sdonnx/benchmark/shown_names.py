"""Names of engines for people. Records, files and `-e` use the engines' own titles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sdonnx.benchmark.results import Comparison

__all__ = ["OURS", "shown_name", "with_shown_names"]

OURS = "sdonnx"
"""The name of this project's engine, `-e onnxruntime`."""

_ENGINES = {
    "onnxruntime": OURS,
    "onnxruntime-plain": "plain ONNX Runtime",
    "torch": "torch eager",
    "torch-xformers": "torch eager, xformers",
    "sdonnx-compile": "sdonnx.compile_pipe",
}

# (prefix of a title, shown name, mode that the name omits: the default of `parse_rivals`)
_COMPILED = (
    ("torch-compile:", "torch.compile", "reduce-overhead"),
    ("torch-regional:", "torch.compile of blocks", "default"),
)


def shown_name(title: str) -> str:
    """Return an engine's name for people: "sdonnx" for "onnxruntime", "torch.compile" for "torch-compile:MODE".

    A name includes the mode of torch.compile unless it is the default. Other titles are returned unchanged.
    """
    for prefix, name, usual in _COMPILED:
        if title.startswith(prefix):
            mode = title.removeprefix(prefix)
            return name if mode == usual else f"{name}, {mode}"
    return _ENGINES.get(title, title)


def with_shown_names(comparison: Comparison) -> Comparison:
    """Return the comparison with `shown_name` as the name of each engine."""

    def renamed(parts: list[Any]) -> list[Any]:
        return [replace(each, rival=shown_name(each.rival)) for each in parts]

    return replace(
        comparison,
        results=renamed(comparison.results),
        throughput=renamed(comparison.throughput),
        resolutions=renamed(comparison.resolutions),
        kernels=renamed(comparison.kernels),
        images={(shown_name(name), workload): image for (name, workload), image in comparison.images.items()},
    )
