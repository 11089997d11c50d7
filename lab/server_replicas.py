"""The gain of replicas on Ray Serve: `load_test.py --compare_replicas`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from server_load import CLIENTS, described, load_of, read_files, started_server

from sdonnx.errors import SdonnxError
from sdonnx.folder.folder_version import read_report
from sdonnx.terminal import console


def measure_replicas(options: argparse.Namespace) -> dict[str, Any]:
    """Measure servers on Ray Serve with different numbers of replicas, each with its own GPU or on the same CPU.

    Args:
        options: options of load_test.py; `compare_replicas` has the numbers.

    Returns:
        For each number, seconds until the server was ready, images a second, and their ratio to the first server.

    Raises:
        SdonnxError: the folder cannot be read, a server does not start, or a request is not answered with 200.
    """
    folder = Path(options.model)
    report = read_report(folder)
    read_files(folder)
    gpus = "1" if report["provider"] == "cuda" else "0"
    servers = []
    for count in options.compare_replicas:
        with started_server(options, "--ray", "--replicas", str(count), "--gpus_per_replica", gpus) as server:
            console().print(f"replicas {count}: ready after {server.ready_s} s", markup=False)
            found = asyncio.run(_capacity(server.url, count, options))
        servers.append({"replicas": count, "ready_s": server.ready_s, **found})
    for each in servers:
        each["ratio"] = round(each["capacity_per_s"] / servers[0]["capacity_per_s"], 3)
    return {"model": described(folder, report), "clients_of_a_replica": CLIENTS, "servers": servers}


async def _capacity(url: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    clients = CLIENTS * replicas
    async with load_of(url, options) as load:
        await load.fill(options.warmup_s, clients=clients)
        capacity, answers = await load.fill(options.capacity_s, clients=clients)
    record = answers.record()
    if set(record["statuses"]) != {200}:
        raise SdonnxError(f"answers have the statuses {record['statuses']}", "only 200", "read the server's messages")
    return {"capacity_per_s": round(capacity, 3), "at_capacity": record}
