"""Malformed and hostile adapter files: each is read, or refused with one line."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support.mutators import mutated_bytes, mutated_json

from sdonnx.errors import SdonnxError, WeightsError
from sdonnx.lora.adapter_file import read_adapter
from sdonnx.lora.adapter_tensors import read_tensors
from sdonnx.lora.weight_change import changed_by_all

MODULE = "lora_unet_mid_block_resnets_0_conv1"


def content(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """Return the description of a tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with tensors of every method."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{MODULE}.lora_down.weight": (2, 8, 3, 3), f"{MODULE}.lora_up.weight": (8, 2, 1, 1), f"{MODULE}.alpha": (),
        f"{MODULE}.dora_scale": (8, 1, 1, 1),
        "unet.conv_in.lora_A.weight": (2, 4, 3, 3), "unet.conv_in.lora_B.weight": (8, 2, 1, 1),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lokr_w1": (2, 2),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.lokr_w2": (3, 4),
        **{f"lora_unet_conv_out.hada_w{number}_{part}": (4, 4) for number in (1, 2) for part in "ab"},
    }  # fmt: skip
    file = tmp_path_factory.mktemp("valid") / "a.safetensors"
    config = json.dumps({"lora_alpha": 2, "r": 2, "alpha_pattern": {"conv_in": 3}, "use_rslora": True})
    save_file({key: torch.ones(shape) for key, shape in shapes.items()}, file, {"lora_adapter_metadata": config})
    return file.read_bytes()


SMALL = entry([1], 0, 4)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (b"", "ends within its header"),
        (b"\x01\x00", "ends within its header"),
        (content({}, length=2**63), "ends within its header"),
        (content(b"{", length=1), "not valid"),
        (content(b"\xff\xfe"), "not valid"),
        (content(b"[" * 100_000), "not valid"),
        (content(b'{"a":' * 100_000), "not valid"),
        (content(b'{"a": ' + b"1" * 5000 + b"}"), "not valid"),
        (content(b'{"a": 1, "a": 2}'), "twice"),
        (content([]), "not a JSON object"),
        (content({"__metadata__": {"a": 1}}), "metadata is not text"),
        (content({"__metadata__": []}), "metadata is not text"),
        (content({"a": 1}), "describe a as a tensor"),
        (content({"a": SMALL | {"more": 1}}, b"1234"), "describe a as a tensor"),
        (content({"a" * 501: SMALL}, b"1234"), "500 characters"),
        (content({"a": entry([1], 0, 4, "F8_E4M3")}, b"1234"), "type F8_E4M3"),
        (content({"a": SMALL | {"dtype": ["F32"]}}, b"1234"), r"type \['F32'\]"),
        (content({"a": entry([-1], 0, 4)}, b"1234"), "shape of a is not valid"),
        (content({"a": SMALL | {"shape": [True]}}, b"1234"), "shape of a is not valid"),
        (content({"a": SMALL | {"shape": [1.0]}}, b"1234"), "shape of a is not valid"),
        (content({"a": entry([1] * 6, 0, 4)}, b"1234"), "shape of a is not valid"),
        (content({"a": entry([2**40, 2**40], 0, 4)}, b"1234"), "size of its shape"),
        (content({"a": entry([2**61, 0], 0, 4)}, b"1234"), "size of its shape"),
        (content({"a": entry([1], 4, 0)}, b"1234"), "size of its shape"),
        (content({"a": entry([1], -4, 0)}, b"1234"), "place of a"),
        (content({"a": SMALL | {"data_offsets": [0, 4, 8]}}, b"1234"), "place of a"),
        (content({"a": SMALL, "b": SMALL}, b"1234"), "data of b overlaps"),
        (content({"a": SMALL, "b": entry([1], 8, 12)}, b"1" * 12), "data of b overlaps other data or follows a gap"),
        (content({"a": SMALL}, b"12345"), "5 bytes of data"),
        (content({"a": SMALL}, b"123"), "3 bytes of data"),
        (content({"a": SMALL}, struct.pack("<f", float("nan"))), "values in a"),
        (content({"a": entry([1], 0, 8, "F64")}, struct.pack("<d", 1e300)), "values in a"),
        (content({"a": entry([1], 0, 2, "BF16")}, b"\x80\x7f"), "values in a"),
        (content({"a": entry([1], 0, 2, "F16")}, b"\x00\x7c"), "values in a"),
    ],
)
def test_broken_files(written: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(written)
    with pytest.raises(WeightsError, match=named):
        read_tensors(tmp_path / "a.safetensors")


def test_limits(tmp_path: Path) -> None:
    """Of the header, in a sparse file, and of the number of tensors."""
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)
    with pytest.raises(WeightsError, match="more than 16 MB"):
        read_tensors(tmp_path / "a.safetensors")
    many = {str(number): entry([0], 0, 0) for number in range(100_001)}
    (tmp_path / "a.safetensors").write_bytes(content(many))
    with pytest.raises(WeightsError, match="more than 100000 tensors"):
        read_tensors(tmp_path / "a.safetensors")


def test_other_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.safetensors", "null\0.safetensors", "n" * 300 + ".safetensors", "none.safetensors"):
        with pytest.raises(WeightsError):
            read_adapter(tmp_path / name)
    with pytest.raises(WeightsError, match="0 of the files"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".PT"])
def test_pickles_are_not_opened(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"not read")
    with pytest.raises(WeightsError, match=r"pickle.* sdonnx lora convert .* --allow_pickle"):
        read_adapter(tmp_path / f"a{suffix}")


def test_a_scale_that_is_no_number_is_refused(valid: bytes, tmp_path: Path) -> None:
    size = struct.unpack("<Q", valid[:8])[0]
    header = json.loads(valid[8 : 8 + size])
    begin = 8 + size + header[f"{MODULE}.alpha"]["data_offsets"][0]
    for value, refused in ((np.nan, True), (-np.inf, True), (-2.0, False), (0.0, False)):
        data = bytearray(valid)
        data[begin : begin + 4] = struct.pack("<f", value)
        (tmp_path / "a.safetensors").write_bytes(data)
        if refused:
            with pytest.raises(WeightsError, match="alpha that are infinite"):
                read_adapter(tmp_path / "a.safetensors")
        else:
            change: Any = read_adapter(tmp_path / "a.safetensors").changes["unet"]["mid_block.resnets.0.conv1.weight"]
            assert change.inner.factor == value / 2


def test_metadata_that_cannot_be_used(tmp_path: Path) -> None:
    tensors = {"unet.conv_in.lora_A.weight": torch.ones(1, 2), "unet.conv_in.lora_B.weight": torch.ones(2, 1)}
    for text in ("", "[]", "{", "[" * 100_000, "1" * 5000, '{"unet.r": -1}', '{"alpha_pattern": {"a": NaN}}'):
        save_file(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": text})
        with pytest.raises(WeightsError, match="in its"):
            read_adapter(tmp_path / "a.safetensors")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_files(valid: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """A file that safetensors refuses is refused here too; another one is read or refused, and its changes compute."""
    size = struct.unpack("<Q", valid[:8])[0]
    if data.draw(st.booleans()):
        written = content(mutated_json(data.draw, valid[8 : 8 + size]), valid[8 + size :])
    else:
        written = mutated_bytes(data.draw, valid)
    file = tmp_path / "a.safetensors"
    file.write_bytes(written)
    try:
        adapter = read_adapter(file)
    except SdonnxError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    with safe_open(file, framework="pt") as judge:
        assert judge.keys()
    for changes in adapter.changes.values():
        for change in changes.values():
            with np.errstate(over="ignore", invalid="ignore"):
                assert changed_by_all(np.ones(change.shape, np.float32), [(change, 0.5)]).shape == change.shape


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_configurations(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {"base_model.model.conv_in.lora_A.weight": torch.ones(1, 2),
               "base_model.model.conv_in.lora_B.weight": torch.ones(2, 1)}  # fmt: skip
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "use_rslora": False, "alpha_pattern": {"conv_in": 2},
              "rank_pattern": {"conv_in": 1}}  # fmt: skip
    (tmp_path / "adapter_config.json").write_bytes(mutated_json(data.draw, json.dumps(config).encode()))
    try:
        change: Any = read_adapter(tmp_path).changes["unet"]["conv_in.weight"]
    except SdonnxError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert np.isfinite(change.factor)


@pytest.mark.parametrize("pattern", ["conv.in", "conv_.*", ".*", "(c+)+onv_in", "[c]onv_in"])
def test_patterns_are_names(pattern: str, tmp_path: Path) -> None:
    """They come from a file, and a regular expression may run for ever."""
    tensors = {f"base_model.model.conv_in.lora_{half}.weight": torch.ones(*shape)
               for half, shape in (("A", (1, 2)), ("B", (2, 1)))}  # fmt: skip
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}

    def factor(name: str) -> float:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {name: 8}}))
        change: Any = read_adapter(tmp_path).changes["unet"]["conv_in.weight"]
        return float(change.factor)

    assert factor("conv_in") == 8
    if pattern == "conv.in":  # a module in a module; as an expression, it would match
        assert factor(pattern) == 2
    else:
        with pytest.raises(WeightsError, match="is not the name of a module"):
            factor(pattern)
