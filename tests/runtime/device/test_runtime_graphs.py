"""The graph in a file of the package, and the memory that it reserves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from sdonnx.runtime.device import device_thread as module
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import RESERVED_BYTES, reserve_scratch
from sdonnx.runtime.device.session import Graph

ROOT = Path(__file__).parents[3]
CPU = Device("cpu")


class Gpu(Device):
    """A GPU without CUDA."""

    def enter(self) -> None:
        """Select nothing."""

    def memory(self) -> None:
        """Know no amount of memory."""


def test_graph_is_that_of_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / "write_runtime_graphs.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (file,) = (ROOT / "sdonnx" / "runtime" / "device").glob("*.onnx")
    ir.save(script.one_block(), tmp_path / "written.onnx")
    assert (tmp_path / "written.onnx").read_bytes() == file.read_bytes()


def test_the_graph_returns_a_block_of_the_given_size() -> None:
    block = Graph(module._GRAPH, CPU).session.run(None, {"size": np.array([1000], np.int64)})[0]
    assert (block.shape, block.dtype, block.any()) == ((1000,), np.uint8, False)


class Recorded:
    """A loaded graph that notes the runs of its session, and may lack memory."""

    def __init__(self, sizes: list[int], fails: bool) -> None:
        self.session, self._sizes, self._fails = self, sizes, fails

    def io_binding(self) -> Recorded:
        return self

    def bind_cpu_input(self, name: str, values: Any) -> None:
        self._sizes += values.tolist()

    def bind_output(self, name: str, kind: str, index: int) -> None:
        assert (name, kind, index) == ("block", "cuda", 97)

    def run_options(self) -> None:
        return None

    def run_with_iobinding(self, *_: Any) -> None:
        if self._fails:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_is_reserved_once(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(module, "Graph", lambda path, device: Recorded(sizes, fails))
    module._reserve.cache_clear()
    for _ in range(2):
        reserve_scratch(Gpu("cuda", 97))
    assert sizes == [RESERVED_BYTES]
    module._reserve.cache_clear()


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise ValueError("a fault")

    monkeypatch.setattr(module, "Graph", load)
    with pytest.raises(ValueError, match="a fault"):
        reserve_scratch(Gpu("cuda", 97))
    reserve_scratch(CPU)  # which has no such block
