"""Graphs of modules for GPUs: float16, with our operators; lowered to standard operators, they agree with torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.graphs import run
from support.placement import copied_from_host
from support.small_modules import TEXT_WIDTH, small_autoencoder, small_text_encoder, small_unet, wide_unet
from support.weekly_cases import weekly
from transformers import CLIPTextModel, CLIPTextModelWithProjection

import sdonnx
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.compiler.graph_target import GraphTarget, target_of, why_no_target
from sdonnx.compiler.host_weights import HostWeights
from sdonnx.compiler.module_graph import build_model
from sdonnx.compiler.supported_modules import SUPPORTED
from sdonnx.errors import OptionError
from sdonnx.metrics import relative_error
from sdonnx.operators.kernel_case import OUR_DOMAIN, Array
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import SessionSettings

GPU = Device("cuda", 0)


def signature_for_gpu(module: Any, method: GraphMethod, own: bool = True) -> GraphSignature:
    library = Path("libsdonnx_kernels.so") if own else None
    target = GraphTarget(GPU, torch.float16, SessionSettings(library=library))
    return replace(method.signature(module, method.variant(module, None, None)), target=target)


@pytest.mark.parametrize("own", weekly([True, False], True))
def test_unet_in_float16(own: bool) -> None:
    unet = wide_unet()
    (method,) = SUPPORTED[type(unet)]
    signature = signature_for_gpu(unet, method, own)
    model = build_model(unet.half(), signature, method.prepare)
    types = {value.name: value.dtype for value in model.graph.inputs}
    assert types["sample"] == types["encoder_hidden_states"] == ir.DataType.FLOAT16
    assert types["timestep"] == ir.DataType.FLOAT
    domains = {node.domain for node in model.graph}
    assert (OUR_DOMAIN in domains) == own
    assert "com.microsoft" in domains
    sample, text = torch.randn(2, 4, 12, 10), torch.randn(2, 7, TEXT_WIDTH)
    sample, text = sample.half().float(), text.half().float()
    feeds: dict[str, Array] = {
        "sample": sample.numpy().astype(np.float16),
        "encoder_hidden_states": text.numpy().astype(np.float16),
        "timestep": np.array([7, 7], np.float32),
    }
    (ours,) = run(model, feeds).values()
    with torch.no_grad():
        theirs = unet.float()(sample, torch.tensor([7, 7]), text).sample
    assert relative_error(ours, theirs.numpy()) < 5e-3


def test_autoencoder_and_text_encoder_in_float16() -> None:
    vae, encoder = small_autoencoder(), small_text_encoder()
    decode = SUPPORTED[type(vae)][0]
    latents = torch.randn(1, 4, 6, 5).half().float()
    model = build_model(vae.half(), signature_for_gpu(vae, decode), decode.prepare)
    (name,) = (value.name for value in model.graph.inputs)
    (ours,) = run(model, {str(name): latents.numpy().astype(np.float16)}).values()
    with torch.no_grad():
        theirs = vae.float().decode(latents).sample
    assert relative_error(ours, theirs.numpy()) < 5e-3
    (forward,) = SUPPORTED[type(encoder)]
    ids = torch.randint(1, 97, (2, 77), generator=torch.manual_seed(0))
    model = build_model(encoder.half(), signature_for_gpu(encoder, forward), forward.prepare)
    positions = np.array([3, 77 + 5], np.int32)
    outputs = run(model, {"input_ids": ids.numpy().astype(np.int32), "positions": positions})
    with torch.no_grad():
        states = encoder.float()(ids).last_hidden_state
    assert relative_error(outputs["last_hidden_state"], states.numpy()) < 5e-3
    assert relative_error(outputs["pooler_output"], states[[0, 1], [3, 5]].numpy()) < 5e-3


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_graphs_of_text_encoders_can_be_captured(kind: Any) -> None:
    """ONNX Runtime has no CUDA kernel for the ArgMax by which transformers finds the last token."""
    encoder = small_text_encoder(kind)
    (forward,) = SUPPORTED[kind]
    model = build_model(encoder.half(), signature_for_gpu(encoder, forward), forward.prepare)
    assert "ArgMax" not in {node.op_type for node in model.graph}
    assert copied_from_host(model) == []


def test_keys_differ_by_target() -> None:
    """A graph for another device, precision or choice of kernels is another entry of the cache."""
    unet = small_unet()
    (method,) = SUPPORTED[type(unet)]
    graphs = ModuleGraphs(unet, method, None, HostWeights(unet, method))
    plain = method.signature(unet, method.variant(unet, None, None))
    own = SessionSettings(library=Path("libsdonnx_kernels.so"))
    targets = [GraphTarget(GPU, torch.float32), GraphTarget(GPU, torch.float16), GraphTarget(GPU, torch.float16, own)]
    digests = {graphs.key(plain).digest}
    for capability in ((8, 0), (9, 0)):
        with mock.patch.object(Device, "capability", return_value=capability):
            digests |= {graphs.key(replace(plain, target=target)).digest for target in targets}
    assert len(digests) == 7


def test_inputs_have_the_type_and_the_device_of_the_module() -> None:
    unet = small_unet()
    (method,) = SUPPORTED[type(unet)]
    signature = signature_for_gpu(unet, method)
    tensors = {each.name: torch.zeros(2, 4, 8, 8) for each in signature.spec.inputs}
    assert checked_inputs(tensors, signature) == "sample is not a float16 tensor on cuda:0"


def test_weights_on_other_devices_and_of_other_types() -> None:
    assert why_no_target(small_unet()) is None
    assert target_of(small_unet()).precision == "float32"
    assert target_of(torch.nn.Identity()).torch_device == torch.device("cpu")
    assert "is torch.float16" in (why_no_target(small_unet().half()) or "")
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert why_no_target(mixed) == "1.weight is on meta"


def test_autoencoders_with_force_upcast_are_scaled() -> None:
    """Their values fit into float16; the weights of the norms' inputs are 128 times smaller."""
    largest = {}
    for upcast in (False, True):
        vae = small_autoencoder(force_upcast=upcast).half()
        decode = SUPPORTED[type(vae)][0]
        assert decode.why_not(vae) is None
        model = build_model(vae, signature_for_gpu(vae, decode), decode.prepare)
        weights = [value.const_value for value in model.graph.initializers.values()]
        arrays = [each.numpy() for each in weights if each is not None and each.dtype == ir.DataType.FLOAT16]
        largest[upcast] = sorted(float(np.abs(each).max()) for each in arrays if each.ndim == 4)
    assert len(largest[True]) == len(largest[False])
    assert largest[True][0] * 64 < largest[False][0]


def test_float16_on_the_cpu_is_refused() -> None:
    with pytest.raises(OptionError, match=r"is torch\.float16"):
        sdonnx.compile(small_autoencoder().half())
