"""Denoisers that `sdonnx.compile` quantizes: the error, its bound, the cache, and the choice of O3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import run
from support.pipelines import refused
from support.small_modules import (
    small_text_encoder,
    small_transformer,
    small_unet,
    unet_inputs,
    unet_output,
    wide_unet,
)

import sdonnx
from sdonnx.compiler import module_graph, result_checks
from sdonnx.compiler.compile_options import check_options
from sdonnx.compiler.graph_target import GraphTarget, for_types
from sdonnx.compiler.module_graph import GraphQuantization, build_model
from sdonnx.compiler.result_checks import CHECKED_CALLS, MAX_QUANTIZED_ERROR, ResultCheck
from sdonnx.compiler.supported_modules import SUPPORTED
from sdonnx.errors import OptionError
from sdonnx.folder.folder_cache import entry_info
from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import OUR_DOMAIN, Array
from sdonnx.precision_search.search_options import Bounds
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import SessionSettings

OWN = SessionSettings(library=Path("libsdonnx_kernels.so"))


@pytest.fixture
def capability() -> Iterator[mock.Mock]:
    """The compute capability of the GPU, which a test may change; the library is usable for all types."""
    with (
        mock.patch.object(Device, "capability", return_value=(9, 0)) as found,
        mock.patch.object(module_graph, "for_types", lambda target, _: target),
    ):
        yield found


def _error(compiled: Any, unet: Any) -> float:
    return relative_error(unet_output(compiled), unet_output(unet))


def _signature(unet: Any, target: GraphTarget) -> Any:
    (method,) = SUPPORTED[type(unet)]
    return replace(method.signature(unet, method.variant(unet, None, None)), target=target), method


def test_bound_is_that_of_folders() -> None:
    assert MAX_QUANTIZED_ERROR == Bounds.DEFAULT_MAX_ERROR


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [("int8_weightonly", 1e-3, 1e-2), ("fp8_e4m3_weightonly", 1e-2, 6e-2), ("fp8", 1e-3, 6e-2)],
)
def test_errors_are_those_of_the_type(kind: str, lowest: float, highest: float, noted: list[str]) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet, options={"mode": "O3", "quant_type": kind})
    assert lowest < _error(compiled, unet) < highest
    assert [line for line in noted if "weights in" in line and "MB ->" in line]
    assert [line for line in noted if "disagrees" in line] == []


def test_transformer() -> None:
    transformer = small_transformer()
    compiled = sdonnx.compile(transformer, options={"quant_type": "int8_weightonly"})
    call = {
        "hidden_states": torch.randn(2, 4, 8, 12), "encoder_hidden_states": torch.randn(2, 5, 24),
        "timestep": torch.tensor([7, 7]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    with torch.inference_mode():
        ours, theirs = compiled(**call).sample, transformer(**call).sample
    assert 1e-4 < relative_error(ours.numpy(), theirs.numpy()) < 2e-2


def test_a_graph_above_the_bound_is_replaced(noted: list[str]) -> None:
    """The call itself has torch's result, and so have later ones; a change of the module quantizes nothing again."""
    unet = small_unet()
    compiled = sdonnx.compile(unet, options={"quant_type": "int8_weightonly"})
    with mock.patch.object(result_checks, "MAX_QUANTIZED_ERROR", 1e-4):
        assert _error(compiled, unet) == 0
        assert _error(compiled, unet) < 1e-5
        with torch.no_grad():
            unet.conv_out.weight.mul_(1.5)
        assert _error(compiled, unet) < 1e-5
    refusals = [line for line in noted if "disagrees" in line]
    assert len(refusals) == 1
    assert refusals[0].startswith("the graph of UNet2DConditionModel disagrees with torch, and is replaced: a tensor ")


def test_calls_that_are_checked() -> None:
    exact, far = torch.ones(3), torch.full((3,), 1.2)
    check, asked = ResultCheck("UNet", enabled=False, quantized=True), list[int]()

    def in_torch() -> torch.Tensor:
        asked.append(check._calls)
        return exact

    for _ in range(20):
        check.checked(exact, in_torch, ())
    assert tuple(asked) == CHECKED_CALLS
    assert (check.waits, check.failed) == (False, False)
    for wrong in (far, torch.full((3,), float("nan"))):
        failing = ResultCheck("UNet", enabled=False, quantized=True)
        assert failing.checked(wrong, lambda: exact, ()) is exact
        assert failing.failed


def test_graphs_of_o2_are_not_taken(folder: Path, noted: list[str]) -> None:
    errors = []
    for _ in range(2):  # built, and loaded from the cache
        for options in ({}, {"quant_type": "int8_weightonly"}, {"quant_type": "fp8_e4m3_weightonly"}):
            unet = small_unet()
            errors.append(_error(sdonnx.compile(unet, options=options), unet))
    entries = [entry_info(path)["parts"]["target"] for path in folder.iterdir()]
    assert len(entries) == 3
    assert sum("quantization" in entry for entry in entries) == 2
    assert errors[:3] == errors[3:]
    assert errors[0] < 1e-5 < 1e-3 < errors[1] < errors[2]
    assert len([line for line in noted if line.startswith("fused in")]) == 3


def test_modules_have_types_of_their_own(noted: list[str]) -> None:
    unet = small_unet()
    config = {"modules": {"unet:conv_in": "int8_weightonly", "unet:*": "none"}}
    sdonnx.compile(unet, options={"quantize_config": config})
    assert "1 weights in int8_weightonly" in next(line for line in noted if line.startswith("quantized in"))
    with refused(OptionError, "unet:nowhere matches no matmul or convolution", "conv_in"):
        sdonnx.compile(unet, options={"quantize_config": {"modules": {"unet:nowhere": "int8_weightonly"}}})


def test_other_components_stay_as_they_are() -> None:
    encoder, ids = small_text_encoder(), torch.tensor([[97, 5, 6, 98]])
    with torch.inference_mode():
        ours = sdonnx.compile(encoder, options={"mode": "O3", "quant_type": "int8"})(ids).last_hidden_state
        assert relative_error(ours.numpy(), encoder(ids).last_hidden_state.numpy()) < 1e-5


def test_o3_on_a_cpu_is_o2_with_one_line(noted: list[str]) -> None:
    unet = small_unet()
    compiled = sdonnx.compile(unet, options="O3")
    for _ in range(2):
        assert _error(compiled, unet) < 1e-5
    assert [line for line in noted if "O3" in line] == [
        "O3 is as O2 for UNet2DConditionModel: it is on the CPU; quant_type names a type for any device"
    ]


@pytest.mark.parametrize(
    ("dtype", "settings", "major", "word"),
    [
        (torch.float16, OWN, 9, None),
        (torch.float16, OWN, 8, "no fp8 matmuls"),
        (torch.float32, SessionSettings(), 9, "in float32"),
        (torch.float16, SessionSettings(), 9, "kernels for fp8 matmuls cannot be used"),
    ],
)
def test_o3_on_a_gpu(
    dtype: torch.dtype, settings: SessionSettings, major: int, word: str | None, capability: mock.Mock,
    noted: list[str],
) -> None:  # fmt: skip
    capability.return_value = (major, 0)
    signature, _ = _signature(small_unet(), GraphTarget(Device("cuda", 0), dtype, settings))
    found = GraphQuantization(check_options("O3"), "UNet").applied(signature).quantization
    if word is None:
        assert found is not None
        assert [each.name for each in found.types] == ["fp8_e4m3_e4m3_dynamic"]
        assert noted == []
    else:
        assert found is None
        assert word in noted[0]


def test_named_types_need_products_of_the_gpu(capability: mock.Mock) -> None:
    capability.return_value = (8, 6)
    signature, _ = _signature(small_unet(), GraphTarget(Device("cuda", 0), torch.float16, OWN))
    with refused(OptionError, "fp8_e4m3_e4m3_dynamic on a GPU of compute capability 8.6", "8.9"):
        GraphQuantization(check_options({"quant_type": "fp8"}), "UNet").applied(signature)
    for kind in ("int8", "fp8_e4m3_weightonly"):
        chosen = check_options({"quant_type": kind})
        assert GraphQuantization(chosen, "UNet").applied(signature).quantization is not None


def test_kernels_are_those_that_are_right_for_the_type() -> None:
    target = GraphTarget(Device("cuda", 0), torch.float16, OWN)
    with mock.patch("sdonnx.compiler.graph_target._gpu_target") as made:
        for_types(target, iter(["fp8_static"]))
    made.assert_called_once_with(0, torch.float16, ("fp8_static",))


@pytest.mark.weekly
def test_graph_of_o3_multiplies_in_fp8(capability: mock.Mock) -> None:
    unet = wide_unet()
    signature, method = _signature(unet, GraphTarget(Device("cuda", 0), torch.float16, OWN))
    signature = GraphQuantization(check_options("O3"), "UNet").applied(signature)
    model = build_model(unet.half(), signature, method.prepare)
    assert ("ScaledMatMul", OUR_DOMAIN) in {(node.op_type, node.domain) for node in model.graph}
    assert ir.DataType.FLOAT8E4M3FN in {value.dtype for value in model.graph.initializers.values()}
    sample, timestep, text = unet_inputs()
    feeds: dict[str, Array] = {
        "sample": sample.numpy().astype(np.float16), "encoder_hidden_states": text.numpy().astype(np.float16),
        "timestep": np.array([timestep] * 2, np.float32),
    }  # fmt: skip
    (ours,) = run(model, feeds).values()
    with torch.no_grad():
        theirs = unet.float()(sample, torch.tensor([timestep] * 2), text).sample
    assert 1e-3 < relative_error(ours.astype(np.float32), theirs.numpy()) < MAX_QUANTIZED_ERROR
