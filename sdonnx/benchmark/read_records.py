"""Read the records of `--json` back into a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from sdonnx.benchmark.extra_results import Kernels, Resolution, Resolutions, Throughput
from sdonnx.benchmark.results import Agreement, Comparison, Result, Round, Stages
from sdonnx.benchmark.statistics import LineFit
from sdonnx.benchmark.workload import Workload

__all__ = ["read_comparison"]


def read_comparison(records: Iterable[Mapping[str, Any]]) -> Comparison:
    """Return the comparison of records from one machine. Records contain no images.

    The command, the environment, the model and the time are taken from the first record.

    Args:
        records: the lines of a file that `--json` wrote, at least one.

    Raises:
        ValueError: there are no records.
    """
    found = list(records)
    if not found:
        raise ValueError("no records; expected at least one")
    comparison = Comparison(
        found[0]["command"],
        found[0]["environment"],
        model=next((each["row"]["version"] for each in found if each.get("row")), ""),
        time=found[0]["time"],
    )
    for record in found:
        rival, workload = record["rival"], Workload(**record["workload"])
        match record["benchmark"]:
            case "throughput":
                points = tuple((int(steps), float(seconds)) for steps, seconds in record["points"])
                comparison.throughput.append(Throughput(rival, workload, points, LineFit(**record["line"])))
            case "resolutions":
                visited = tuple(Resolution(**size) for size in record["visited"])
                comparison.resolutions.append(Resolutions(rival, workload, visited))
            case "kernels":
                source, launches = record["source"], record["launches"]
                comparison.kernels.append(Kernels(rival, workload, record["milliseconds"], launches, source))
            case _:
                comparison.results.append(_result(record, workload))
    return comparison


def _result(record: Mapping[str, Any], workload: Workload) -> Result:
    values = {each.name: record[each.name] for each in fields(Result) if each.name in record}
    values |= {
        "workload": workload,
        "rounds": [_round(each) for each in record["rounds"]],
        "stages": record["stages"] and Stages(**record["stages"]),
        "agreement": record["agreement"] and Agreement(**record["agreement"]),
    }
    return Result(**values)


def _round(record: Mapping[str, Any]) -> Round:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Round(**values)
