"""ONNX Runtime's C ABI as kernels/src/ort_abi.h declares it: AbiProbe calls each slot that works without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.kernel_library import SOURCES, compiled_library, emulated_library, options_with

from sdonnx.doctor.kernel_library import OPERATORS, TRIED_VERSIONS, open_kernel_library

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(scope="module", params=["emulated", pytest.param("compiled", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> Path:
    """The library for the CPU, and the real one, which must also load on a machine without a GPU."""
    return emulated_library() if request.param == "emulated" else compiled_library()


def probe(optional: bool = True, outputs: tuple[str, ...] = ("y", "facts"), **attributes: Any) -> bytes:
    """Return a graph of one AbiProbe, with a constant as its second input."""
    value, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    names = ["x", "constant", *(["optional"] if optional else [])]
    node = onnx.helper.make_node("AbiProbe", names, outputs, domain="sdonnx", **attributes)
    inputs = [value("x", kinds.FLOAT, [None, 3, 4])]
    if optional:
        inputs.append(value("optional", kinds.FLOAT, [1]))
    constant = onnx.numpy_helper.from_array(np.array([0.5, 9], np.float32), "constant")
    results = [value("y", kinds.FLOAT, None), value("facts", kinds.INT64, None)]
    graph = onnx.helper.make_graph([node], "probe", inputs, results, [constant])
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("sdonnx", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def session(library: Path, content: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(content, options_with(library), providers=["CPUExecutionProvider"])


def test_this_onnxruntime_is_one_that_was_tried() -> None:
    """Otherwise run the other tests of this file with it, and add its version to TRIED_VERSIONS."""
    assert onnxruntime.__version__ in TRIED_VERSIONS


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("outputs", [("y", "facts"), ("y", "facts", ""), ("y", "facts", "third")])
def test_every_slot_answers_as_declared(library: Path, optional: bool, outputs: tuple[str, ...]) -> None:
    opened = session(library, probe(optional, outputs, factor=2.5, number=-7))
    feeds = {"x": X} | ({"optional": np.array([100], np.float32)} if optional else {})
    y, facts = opened.run(["y", "facts"], feeds)
    np.testing.assert_allclose(y, 2.5 * X + 0.5 + (100 if optional else 0))
    number, absent, is_constant, is_input_constant, has_message, *rest = facts.tolist()
    assert (number, absent) == (-7, 42)  # an attribute of the node, and the default of an absent one
    assert (is_constant, is_input_constant) == (1, 0)  # an initializer, and an input of the graph
    assert has_message == 1  # the error about an absent attribute has a text
    element_type, present, is_unused, same_constant, inputs, written, aligned, rank, *shape = rest
    assert element_type == onnx.TensorProto.FLOAT
    assert present == optional
    assert is_unused == ("third" not in outputs)  # an absent output has no memory
    assert same_constant == 1
    assert inputs == (3 if optional else 2)
    assert written == len(outputs)
    assert aligned == 1
    assert (rank, shape) == (3, [2, 3, 4])


def test_sizes_may_change_between_runs(library: Path) -> None:
    opened = session(library, probe(optional=False))
    for batch in (1, 5, 0):
        y, facts = opened.run(["y", "facts"], {"x": np.ones((batch, 3, 4), np.float32)})
        assert y.shape == (batch, 3, 4)
        assert facts.tolist()[-3:] == [batch, 3, 4]


def test_failure_of_a_run_has_its_text(library: Path) -> None:
    opened = session(library, probe(optional=False, fails=1))
    with pytest.raises(Exception, match="AbiProbe was asked to fail"):
        opened.run(None, {"x": X})


def test_refused_node_is_an_error_of_the_session(library: Path) -> None:
    with pytest.raises(Exception, match="AbiProbe was asked to refuse its node"):
        session(library, probe(optional=False, refused=1))


def test_several_sessions_at_once(library: Path) -> None:
    opened = [session(library, probe(optional=False, factor=float(factor))) for factor in range(4)]
    for factor, each in enumerate(opened):
        np.testing.assert_allclose(each.run(["y"], {"x": X})[0], factor * X + 0.5)


def test_build_is_described(library: Path) -> None:
    found = open_kernel_library(library)
    assert found.path == library
    assert found.architectures == (("emulation",) if "emulated" in library.name else ("90a",))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed, which lists needed libraries")
def test_library_needs_no_cuda() -> None:
    """The wheel has to load next to the CPU build of ONNX Runtime as well, and on a machine without a driver."""
    command = ["readelf", "--dynamic", "--wide", str(compiled_library())]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed)
    assert needed
    assert [name for name in needed if name.startswith(("libcuda", "libcublas", "libnv"))] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed, which lists symbols")
def test_library_exports_its_functions_only() -> None:
    """A symbol of the static CUDA run-time could be mistaken for a symbol of ONNX Runtime's, or the other way round."""
    command = ["nm", "--dynamic", "--defined-only", str(compiled_library())]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in listed.splitlines() if " T " in line}
    assert exported == {
        "RegisterCustomOps",
        "sdonnx_add_low_rank",
        "sdonnx_kernels_build",
        "sdonnx_kernels_start_seconds",
    }


def test_every_slot_is_named_and_tried() -> None:
    """Each slot is declared once, and AbiProbe or the framework that it uses calls it."""
    text = (SOURCES / "src" / "ort_abi.h").read_text()
    declared = re.findall(r"^// (\d+) (\w+)[^\n]*\ninline [^(]*?(\w+)\(", text, re.MULTILINE)
    indexes = [int(index) for index, _, _ in declared]
    assert indexes == sorted(set(indexes))
    assert sorted(map(int, re.findall(r"\(api, (\d+)\)", text))) == indexes
    callers = "".join((SOURCES / "src" / name).read_text() for name in ("abi_probe.h", "operator.h", "library.cu"))
    for index, name, function in declared:
        assert f"ort::{function}(" in callers, (index, name)
    gpu_only = re.findall(r"^// \d+ (\w+) \(GPU\)$", text, re.MULTILINE)
    assert gpu_only == ["KernelContext_GetGPUComputeStream"]


def test_version_of_the_operators_is_the_same_on_both_sides() -> None:
    (version,) = re.findall(r'"operators=(\d+) ', (SOURCES / "src" / "library.cu").read_text())
    assert int(version) == OPERATORS
