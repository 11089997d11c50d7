"""Broken graphs are refused in one line, and nothing is written."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from support.graphs import Array, copied, normal, relative_error
from support.pipelines import refused, replaced, snapshot

from sdonnx import optimize_pipeline
from sdonnx.errors import FolderError, SdonnxError, WeightsError
from sdonnx.fusions.fusion_table import PROVIDERS, fuse
from sdonnx.graph.loading.load import load_model

SIGNATURE = "(float[B,8] x) => (float[B,8] y)"
CONDITION = "(float[B,8] x, bool c) => (float[B,8] y)"
GOOD = "y = MatMul(x, w)"


def proto(body: str = GOOD, signature: str = SIGNATURE, opsets: str = '"" : 17', ir_version: int = 8) -> Any:
    """Return a model with the weight w (8,8)."""
    model = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{opsets}]> g {signature} {{ {body} }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(8, 8), "w"))
    return model


def written(model: Any, folder: Path) -> Path:
    """Write a model to `folder` and return its path."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def branches(then: str, other: str) -> str:
    """Return an If on c, from the text of the nodes that compute p and of those that compute q."""
    return (
        f"y = If(c) <then_branch = t () => (float[B,8] p) {{ {then} }}, "
        f"else_branch = e () => (float[B,8] q) {{ {other} }}>"
    )


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\x00\x01garbage", "cannot be read"),
        (b"<!DOCTYPE html>", "cannot be read"),
        (proto().SerializeToString()[:-40], "cannot be read"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "without outputs"),
    ],
    ids=["empty", "garbage", "html", "cut off", "no graph"],
)
def test_no_graph(content: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with refused(FolderError, "model.onnx", word):
        load_model(tmp_path / "model.onnx")


def test_directory_or_nothing_in_place_of_a_graph(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    with refused(FolderError, "cannot be read", "directory"):
        load_model(tmp_path / "model.onnx")
    with refused(FolderError, "cannot be read", "No such file"):
        load_model(tmp_path / "other.onnx")


# --- the graph --------------------------------------------------------------------------------------------------------

BROKEN_GRAPHS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cycle": (proto("a = Add(x, b) b = Relu(a) y = MatMul(b, w)"), ("cycle", "Add of a", "Relu of b")),
    "node reads itself": (proto("a = Add(x, a) y = MatMul(a, w)"), ("cycle", "Add of a")),
    "cycle through a subgraph": (
        proto(branches("p = MatMul(x, w)", "q = Add(x, later)") + " later = Relu(y)", CONDITION),
        ("cycle", "If of y", "Relu of later"),
    ),
    "nodes out of order": (proto("y = Relu(a) a = MatMul(x, w)"), ("before the one that makes 'a'",)),
    "missing initializer": (proto("y = MatMul(x, v)"), ("'v'", "nothing makes it", "MatMul of y")),
    "missing in a subgraph": (proto(branches("p = MatMul(x, w)", "q = Add(x, v)"), CONDITION), ("'v'", "nothing")),
    "value of one branch in the other": (
        proto(branches("m = Relu(x) p = MatMul(m, w)", "q = Add(x, m)"), CONDITION),
        ("'m'", "nothing makes it"),
    ),
    "output that nothing makes": (proto(GOOD, "(float[B,8] x) => (float[B,8] z)"), ("'z'", "nothing makes")),
    "value made twice": (proto("y = Relu(x) y = MatMul(x, w)"), ("'y' twice",)),
    "node makes a weight": (proto("w = Relu(x) y = Relu(w)"), ("'w' twice",)),
    "node makes an input": (proto("x = Relu(w) y = Relu(x)"), ("'x' twice",)),
    "two inputs of one name": (proto(GOOD, "(float[B,8] x, float[B,8] x) => (float[B,8] y)"), ("input 'x' twice",)),
    "two outputs of one name": (proto(GOOD, "(float[B,8] x) => (float[B,8] y, float[B,8] y)"), ("output 'y' twice",)),
    "opset too old": (proto(opsets='"" : 11'), ("opset 11", "14 to 23", "export again with opset_version=17")),
    "opset too new": (proto(opsets='"" : 24'), ("opset 24", "14 to 23", "export again with opset_version=17")),
    "no opset": (proto(opsets='"my.own" : 1'), ("no opset", "14 to 23")),
    "two opsets": (proto(opsets='"" : 17, "ai.onnx" : 18'), ("opset 17 and 18", "one from 14 to 23")),
    "unknown operator": (proto("a = Foo(x) y = MatMul(a, w)"), ("'Foo'", "opset 17", "ONNX's own operators")),
    "operator of a later opset": (proto("a = Gelu(x) y = MatMul(a, w)"), ("'Gelu'", "opset 17")),
    "unknown operator in a subgraph": (
        proto(branches("p = MatMul(x, w)", "q = Foo(x)"), CONDITION),
        ("'Foo'", "opset 17"),
    ),
    # ONNX Runtime has no kernels for random numbers of opset 22; diffusers' old script wrote one into VAE encoders.
    "random numbers": (proto("n = RandomNormalLike(x) y = Add(x, n)"), ("'RandomNormalLike'", "VAE encoder")),
    "sequence of tensors": (
        proto("l = SequenceConstruct(x, x) i = Constant<value_int=1>() y = SequenceAt(l, i)"),
        ("'SequenceAt'", "operators on tensors"),
    ),
    "foreign domain not declared": (proto("a = my.own.Foo(x) y = MatMul(a, w)"), ("my.own",)),
    "unknown attribute": (proto("a = Relu<slope = 1>(x) y = MatMul(a, w)"), ("slope",)),
    "surplus input": (proto("a = Relu(x, x) y = MatMul(a, w)"), ("Relu",)),
    "no IR version": (proto(ir_version=0), ("ir_version",)),
    "future IR version": (proto(ir_version=99), ("99",)),
}


@pytest.mark.parametrize("case", BROKEN_GRAPHS)
def test_broken_graph(case: str, tmp_path: Path) -> None:
    model, words = BROKEN_GRAPHS[case]
    with refused(FolderError, "model.onnx", *words):
        load_model(written(model, tmp_path))


def test_two_initializers_of_one_name(tmp_path: Path) -> None:
    model = proto()
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(8, 8, seed=1), "w"))
    with refused(FolderError, "initializer 'w' twice"):
        load_model(written(model, tmp_path))


@pytest.mark.parametrize("opset", [14, 17, 23])
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_supported_opsets(opset: int, domain: str, tmp_path: Path) -> None:
    model = load_model(written(proto(opsets=f'"{domain}" : {opset}'), tmp_path))
    assert model.opset_imports == {"": opset}


# --- weights ----------------------------------------------------------------------------------------------------------


def with_tensor(change: Callable[[Any], Any]) -> Any:
    model = proto()
    change(model.graph.initializer[0])
    return model


BROKEN_TENSORS: dict[str, tuple[type[SdonnxError], Callable[[Any], Any], tuple[str, ...]]] = {
    "raw data short": (WeightsError, lambda t: setattr(t, "raw_data", t.raw_data[:-4]), ("252 bytes", "256", "FLOAT")),
    "raw data long": (WeightsError, lambda t: setattr(t, "raw_data", t.raw_data + b"1234"), ("260 bytes", "256")),
    "negative size": (WeightsError, lambda t: t.dims.__setitem__(0, -8), ("[-8, 8]", "0 or more")),
    "overflowing shape": (WeightsError, lambda t: t.dims.extend([2**62, 2**62]), (str(256 * 2**124),)),
    "unknown type": (WeightsError, lambda t: setattr(t, "data_type", 99), ("type 99",)),
    "undefined type": (FolderError, lambda t: setattr(t, "data_type", 0), ("UNDEFINED",)),
    "no data": (FolderError, lambda t: t.ClearField("raw_data"), ("value field",)),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_broken_tensor(case: str, tmp_path: Path) -> None:
    error, change, words = BROKEN_TENSORS[case]
    with refused(error, "model.onnx", *words):
        load_model(written(with_tensor(change), tmp_path))


PLACES = ("initializer", "constant", "subgraph constant", "subgraph initializer", "inner of inner")


def refer(tensor: Any, **info: Any) -> None:
    """Make a tensor's data external; onnx's own function would refuse the cases of these tests."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in info.items():
        tensor.external_data.add(key=key, value=str(value))


def with_external(place: str, folder: Path, **info: Any) -> Path:
    """Write a model with its weight in another file, described by `info`; return the model's path."""
    weight = onnx.numpy_helper.from_array(normal(8, 8), "w")
    (folder / "weights").write_bytes(b"0123" + weight.raw_data)
    weight.ClearField("raw_data")
    refer(weight, **({"location": "weights", "offset": 4, "length": 256} | info))
    body = {"initializer": GOOD, "constant": "k = Relu(x) y = MatMul(k, w)"}.get(
        place, branches("p = MatMul(x, w)", "q = Neg(x)")
    )
    model = proto(body, SIGNATURE if place in ("initializer", "constant") else CONDITION)
    del model.graph.initializer[:]
    graph = model.graph if place in ("initializer", "constant") else model.graph.node[0].attribute[0].g
    if place == "inner of inner":
        outer = onnx.helper.make_node("If", ["c"], ["p"], then_branch=graph, else_branch=graph)
        outer.attribute[0].g.output[0].name = outer.attribute[0].g.node[0].output[0] = "p1"
        outer.attribute[1].g.output[0].name = outer.attribute[1].g.node[0].output[0] = "p2"
        for attribute in outer.attribute:
            attribute.g.initializer.append(weight)
            attribute.g.initializer[0].name = attribute.g.node[0].input[1] = f"w_{attribute.name}"
        del graph.node[:]
        graph.node.append(outer)
    elif "constant" in place:
        graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weight))
    else:
        graph.initializer.append(weight)
    return written(model, folder)


BROKEN_EXTERNAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "absent": ({"location": "nothing"}, ("nothing is missing", "260 bytes")),
    "a folder": ({"location": "folder"}, ("folder is missing",)),
    "truncated": ({"offset": 8}, ("260 bytes", "at least 264 bytes")),
    "offset beyond the end": ({"offset": 2**40}, ("260 bytes", str(2**40 + 256))),
    "offset overflows": ({"offset": 2**64 - 128}, ("260 bytes", str(2**64 + 128))),
    "offset of endless digits": ({"offset": "9" * 5000}, ("offset", "a number of bytes")),
    "negative offset": ({"offset": -4}, ("offset '-4'", "a number of bytes")),
    "negative length": ({"length": -256}, ("length '-256'", "a number of bytes")),
    "no number": ({"offset": "four"}, ("offset 'four'",)),
    "length overflows": ({"length": 2**64}, ("at least",)),
    "length too short": ({"length": 252}, ("252 bytes", "256", "FLOAT [8, 8]")),
    "length too long": ({"offset": 0, "length": 260}, ("260 bytes", "256", "FLOAT [8, 8]")),
    "up and out": ({"location": "../secret"}, ("outside its folder", "cp -rL")),
    "up and in again": ({"location": "../here/weights"}, ("outside its folder",)),
    "absolute": ({"location": "/etc/passwd"}, ("outside its folder",)),
    "link": ({"location": "link"}, ("outside its folder", "no links")),
    "linked folder": ({"location": "linked/secret"}, ("outside its folder",)),
    "link to nothing": ({"location": "dangling"}, ("is missing",)),
    "link to itself": ({"location": "loop"}, ("is missing",)),
    "hard link": ({"location": "hard"}, ("several hard links",)),
    "no name": ({"location": ""}, ("names no file",)),
    "name with a zero byte": ({"location": "wei\0ghts"}, ("names no file",)),
    "name too long": ({"location": "w" * 5000}, ("is missing",)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", BROKEN_EXTERNAL)
def test_broken_external_data(case: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"0" * 300)
    (tmp_path / "shared").write_bytes(b"0" * 300)
    (folder / "hard").hardlink_to(tmp_path / "shared")
    (folder / "link").symlink_to("../secret")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    info, words = BROKEN_EXTERNAL[case]
    with refused(WeightsError, *words):
        load_model(with_external(place, folder, **info))


def test_external_data_of_a_function(tmp_path: Path) -> None:
    path = with_external("constant", tmp_path)
    model = onnx.load(path, load_external_data=False)
    function = onnx.helper.make_function("own", "F", ["x"], ["y"], model.graph.node, model.opset_import)
    whole = proto("y = own.F(x)", opsets='"" : 17, "own" : 1')
    whole.functions.append(function)
    with refused(WeightsError, "function 'F'"):
        load_model(written(whole, tmp_path))


@pytest.mark.parametrize("place", PLACES)
def test_external_data_anywhere_are_kept(place: str, tmp_path: Path) -> None:
    """Data of constants and subgraphs must come along: their file is not copied."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    model = load_model(with_external(place, tmp_path / "in"))
    fuse(model, "cpu")
    ir.save(model, tmp_path / "out" / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=0)
    (tmp_path / "in" / "weights").unlink()
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    x = normal(3, 8, seed=1)
    feeds: dict[str, Array] = {"x": x} | ({"c": np.array(True)} if len(session.get_inputs()) == 2 else {})
    expected = (np.maximum(x, 0) if place == "constant" else x) @ normal(8, 8)
    assert relative_error(session.run(None, feeds)[0], expected) < 1e-5


def test_a_gigabyte_stays_on_disk(tmp_path: Path) -> None:
    """The file is sparse: reading it would need a gigabyte of memory, loading it must not."""
    rows = 2**25
    model = proto("y = Gather(table, x)", "(int64[B] x) => (float[B,8] y)")
    table = onnx.TensorProto(name="table", data_type=onnx.TensorProto.FLOAT, dims=[rows, 8])
    refer(table, location="weights", offset=0, length=rows * 32)
    model.graph.initializer.append(table)
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(rows * 32)
    before = resource.getrusage(resource.RUSAGE_SELF)
    loaded = load_model(written(model, tmp_path))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert loaded.graph.initializers["table"].const_value is not None
    assert loaded.graph.initializers["table"].const_value.nbytes == 2**30
    assert after.ru_maxrss - before.ru_maxrss < 100_000  # KiB
    assert after.ru_utime - before.ru_utime < 2


# --- initializers that are also inputs --------------------------------------------------------------------------------

WITH_DEFAULT = "(float[B,8] x, float[8,8] w) => (float[B,8] y)"


@pytest.mark.parametrize(
    ("ir_version", "inputs", "left", "weights"),
    [
        (8, None, ["x", "w"], ["w"]),
        (8, ["x"], ["x"], ["w"]),
        (8, ["x", "w"], ["x", "w"], []),
        (3, None, ["x"], ["w"]),
        (3, ["x"], ["x"], ["w"]),
        (3, ["x", "w"], ["x", "w"], []),
    ],
)
def test_defaults_of_inputs(
    ir_version: int, inputs: Collection[str] | None, left: list[str], weights: list[str], tmp_path: Path
) -> None:
    model = load_model(written(proto(GOOD, WITH_DEFAULT, ir_version=ir_version), tmp_path), inputs)
    assert [value.name for value in model.graph.inputs] == left
    assert list(model.graph.initializers) == weights
    for provider in PROVIDERS:
        fused = copied(model)
        fuse(fused, provider)
        onnx.checker.check_model(ir.to_proto(fused))
        session = onnxruntime.InferenceSession(ir.to_proto(fused).SerializeToString())
        x = normal(3, 8, seed=1)
        other = normal(8, 8, seed=2)
        results = [x @ normal(8, 8)] if weights else []
        found = [session.run(None, {"x": x})[0]] if weights else []
        if "w" in left:
            found.append(session.run(None, {"x": x, "w": other})[0])
            results.append(x @ other)
        assert [relative_error(*pair) < 1e-5 for pair in zip(found, results, strict=True)] == [True] * len(results)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `tiny` as ONNX, in which files may be replaced; hard links would make the original unreadable."""
    copy = tmp_path_factory.mktemp("broken") / "tiny"
    shutil.copytree(tiny_exported, copy)
    return copy


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01garbage", ("model.onnx", "cannot be read")),
        (BROKEN_GRAPHS["cycle"][0].SerializeToString(), ("has a cycle", "without cycles")),
        (BROKEN_GRAPHS["opset too old"][0].SerializeToString(), ("opset 11", "14 to 23", "opset_version=17")),
        (BROKEN_GRAPHS["unknown operator"][0].SerializeToString(), ("'Foo'",)),
    ],
    ids=["garbage", "cycle", "opset", "operator"],
)
def test_the_command_ends_with_one_line(
    content: bytes, words: tuple[str, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with replaced(folder / "text_encoder" / "model.onnx", content):
        before = snapshot(folder)
        assert optimize_pipeline.main(["-i", str(folder), "-o", str(tmp_path / "out")]) == 2
        assert snapshot(folder) == before
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert "Traceback" not in error
    assert [word for word in words if word not in error] == [], error
    assert list(tmp_path.iterdir()) == []
