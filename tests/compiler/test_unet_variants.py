"""`sdonnx.compile` of UNets with residuals, class labels, guidance embeddings and image prompts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import (
    IPAdapterFaceIDImageProjection,
    IPAdapterFaceIDPlusImageProjection,
    IPAdapterFullImageProjection,
    MultiIPAdapterImageProjection,
)
from support.small_modules import TEXT_WIDTH, small_unet
from support.torch_graphs import graphs_in_torch

import sdonnx
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.supported_modules import why_unsupported
from sdonnx.metrics import relative_error

_SD: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 4,
}
_XL: dict[str, Any] = _SD | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
# Channels and halvings of the latents, as in diffusers' ControlNetModel, FullAdapter and FullAdapterXL.
_SKIPS = [(32, 1), (32, 1), (32, 2), (64, 2)]
_SD_ADAPTER = [(32, 1), (64, 2)]
_XL_ADAPTER = [(32, 2), (64, 2), (64, 2)]


def _inputs(height: int = 16, width: int = 16, batch: int = 2) -> tuple[torch.Tensor, int, torch.Tensor]:
    return torch.randn(batch, 4, height, width), 7, torch.randn(batch, 7, TEXT_WIDTH)


def _residuals(shapes: list[tuple[int, int]], height: int = 16, width: int = 16, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, channels, -(-height // by), -(-width // by)) for channels, by in shapes]


def _controlled(*size: int) -> dict[str, Any]:
    *down, middle = _residuals([*_SKIPS, _SKIPS[-1]], *size)
    return {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": middle}


def _adapted(shapes: list[tuple[int, int]], *size: int) -> dict[str, Any]:
    return {"down_intrablock_additional_residuals": _residuals(shapes, *size)}


def _error(compiled: Any, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> float:
    """Return the relative error of a call; torch consumes the list of T2I-Adapter's residuals."""
    copies = [
        {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()} for _ in range(2)
    ]
    ours, theirs = compiled(*inputs, **copies[0]).sample, compiled._programs.module(*inputs, **copies[1]).sample
    return relative_error(ours.numpy(), theirs.numpy())


@pytest.fixture
def controlled(variants: None) -> Any:
    """A UNet with the blocks of Stable Diffusion 1, compiled."""
    return sdonnx.compile(small_unet(**_SD))


def test_residuals_of_controlnet_are_inputs(controlled: Any, warned: list[str]) -> None:
    plain = controlled(*(inputs := _inputs())).sample
    arguments = _controlled()
    assert relative_error(controlled(*inputs, **arguments).sample.numpy(), plain.numpy()) > 0.01
    for size in ((16, 16), (13, 18), (1, 1)):
        assert _error(controlled, _inputs(*size), _controlled(*size)) < 1e-4
        assert _error(controlled, _inputs(*size), {}) < 1e-4
    assert warned == ["UNet2DConditionModel is compiled again, for residuals of ControlNet"]


@pytest.mark.weekly
def test_residuals_of_adapters_are_inputs(controlled: Any, warned: list[str]) -> None:
    for size in ((16, 16), (13, 18)):
        assert _error(controlled, _inputs(*size), _adapted(_SD_ADAPTER, *size)) < 1e-4
        assert _error(controlled, _inputs(*size), {}) < 1e-4
    assert warned == ["UNet2DConditionModel is compiled again, for 2 residuals of T2I-Adapter"]


def test_residuals_of_both_are_inputs(controlled: Any, warned: list[str]) -> None:
    assert _error(controlled, _inputs(), _controlled() | _adapted(_SD_ADAPTER)) < 1e-4
    assert warned == [
        "UNet2DConditionModel is compiled again, for residuals of ControlNet and 2 residuals of T2I-Adapter"
    ]


@pytest.mark.weekly
def test_an_adapter_of_xl_also_reaches_the_middle_block(warned: list[str]) -> None:
    compiled = sdonnx.compile(small_unet(**_XL))
    for size in ((16, 16), (20, 28)):
        assert _error(compiled, _inputs(*size), _adapted(_XL_ADAPTER, *size)) < 1e-4
    assert warned == ["UNet2DConditionModel is compiled again, for 3 residuals of T2I-Adapter"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mid_block_additional_residual": None}, "it has down_block_additional_residuals"),
        ({"down_block_additional_residuals": None}, "it has mid_block_additional_residual"),
        (_adapted(_SD_ADAPTER * 2), "it has 4 down_intrablock_additional_residuals"),
        ({"mid_block_additional_residual": torch.randn(1, 64, 1, 1)}, "has shape (1, 64, 1, 1)"),
        ({"mid_block_additional_residual": torch.randn(2, 64, 1, 1)}, "has shape (2, 64, 1, 1)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Passing intrablock residual connections:FutureWarning")
def test_torch_computes_other_residuals(
    controlled: Any, warned: list[str], change: dict[str, Any], reason: str
) -> None:
    arguments = _controlled() | change
    if arguments["mid_block_additional_residual"] is None:
        arguments["down_block_additional_residuals"] = _residuals(_SD_ADAPTER)
    assert _error(controlled, _inputs(), arguments) == 0
    assert [each for each in warned if "torch computes" in each and reason in each]


def test_the_wrong_number_of_residuals_is_the_error_of_torch(controlled: Any) -> None:
    arguments = _controlled()
    arguments["down_block_additional_residuals"] = arguments["down_block_additional_residuals"][:-1]
    with pytest.raises(RuntimeError, match=r"."):
        controlled(*_inputs(), **arguments)
    arguments["down_block_additional_residuals"] = torch.randn(4, 2)
    with pytest.raises(RuntimeError, match=r"."):
        controlled(*_inputs(), **arguments)


def test_at_most_four_graphs_are_kept(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    def load(*_: Any, **__: Any) -> Any:
        return lambda: SimpleNamespace(outputs=["out_sample"], run=lambda inputs: {"out_sample": 0 * inputs["sample"]})

    monkeypatch.setattr(ModuleGraphs, "load", load)
    compiled = sdonnx.compile(small_unet(**_SD, time_cond_proj_dim=8))
    guided = {"timestep_cond": torch.randn(2, 8)}
    adapted, controlled = _adapted(_SD_ADAPTER), _controlled()
    for arguments in (guided, {}, adapted, controlled, guided, controlled | adapted, guided, controlled, {}):
        assert not compiled(*_inputs(), **arguments).sample.any()
    again = "UNet2DConditionModel is compiled again, for "
    assert [each.removeprefix(again) for each in warned] == [
        "calls without residuals",
        "2 residuals of T2I-Adapter",
        "residuals of ControlNet",
        "residuals of ControlNet and 2 residuals of T2I-Adapter",  # replaces the first of these lines
        "calls without residuals",
    ]
    with torch.no_grad():
        compiled.conv_in.weight.mul_(2)
    del warned[:]
    for arguments in ({}, controlled, {}):
        compiled(*_inputs(), **arguments)
    assert warned == [
        "UNet2DConditionModel changed after it was compiled, and is compiled again",
        f"{again}residuals of ControlNet",
    ]


@pytest.mark.usefixtures("variants")
def test_guidance_embeddings_are_inputs(warned: list[str]) -> None:
    """Consistency models have them (time_cond_proj_dim)."""
    compiled, inputs = sdonnx.compile(small_unet(time_cond_proj_dim=8)), _inputs()
    for _ in range(2):
        assert _error(compiled, inputs, {"timestep_cond": torch.randn(2, 8)}) < 1e-4
    assert warned == []


def test_calls_in_torch_compile_nothing(controlled: Any, warned: list[str]) -> None:
    before = dict(controlled._programs.methods["forward"]._variants)
    masked = {"encoder_attention_mask": torch.ones(2, 7)}
    one = {"down_intrablock_additional_residuals": [torch.randn(2, 32, 16, 16)]}
    assert _error(controlled, _inputs(), masked | one) == 0
    assert controlled._programs.methods["forward"]._variants == before
    assert warned == ["torch computes a call of UNet2DConditionModel: it has encoder_attention_mask"]


@pytest.mark.usefixtures("variants")
@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_class_embeds": 9}, [torch.tensor([3, 8]), torch.tensor([3], dtype=torch.int32)]),
        ({"class_embed_type": "timestep"}, [torch.tensor([20, 999]), torch.tensor([2.5])]),
        ({"class_embed_type": "identity"}, [torch.randn(2, 128)]),
        ({"class_embed_type": "projection", "projection_class_embeddings_input_dim": 6}, [torch.randn(2, 6)]),
        (
            {"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 6,
             "class_embeddings_concat": True},
            [torch.randn(2, 6)],
        ),
    ],
)  # fmt: skip
def test_class_labels_are_inputs(options: dict[str, Any], labels: list[torch.Tensor], warned: list[str]) -> None:
    compiled, inputs = sdonnx.compile(small_unet(**options)), _inputs()
    for each in labels:
        assert _error(compiled, inputs, {"class_labels": each}) < 1e-4
        zeros = compiled(*inputs, class_labels=torch.zeros_like(each)).sample
        assert relative_error(compiled(*inputs, class_labels=each).sample.numpy(), zeros.numpy()) > 1e-4
    assert warned == []
    for wrong in (None, torch.tensor([3, 11, 20])):
        with pytest.raises((ValueError, IndexError, RuntimeError), match=r"."):
            compiled(*inputs, class_labels=wrong)


def _prompted(*projections: torch.nn.Module, **options: Any) -> Any:
    """Return a UNet with IP-Adapters as `load_ip_adapter` adds them."""
    unet = small_unet(**options)
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            attention = unet.get_submodule(name.removesuffix(".processor"))
            width = attention.to_q.out_features
            processor: Any = IPAdapterAttnProcessor2_0(width, TEXT_WIDTH, num_tokens=[4] * len(projections))
            attention.set_processor(processor)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection(list(projections))
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    return unet.eval().requires_grad_(False)


@pytest.mark.usefixtures("variants")
def test_other_image_prompts_are_inputs(warned: list[str]) -> None:
    """Full and Face ID; tests of pipelines have the plain and Plus adapters."""
    unet = _prompted(
        IPAdapterFullImageProjection(12, TEXT_WIDTH), IPAdapterFaceIDImageProjection(8, TEXT_WIDTH, 2, num_tokens=4)
    )
    compiled, inputs = sdonnx.compile(unet), _inputs()
    attentions = [each for each in unet.attn_processors.values() if isinstance(each, IPAdapterAttnProcessor2_0)]
    for images in (1, 3):
        given = {"image_embeds": [torch.randn(2, images, 5, 12), torch.randn(2, 2, 8)]}
        for number, each in enumerate(attentions):
            each.scale[:] = [0.5 + number, 1]
        assert _error(compiled, inputs, {"added_cond_kwargs": given}) < 1e-4
        some = compiled(*inputs, added_cond_kwargs=given).sample
        attentions[-1].scale = [0.0, 0.3]
        assert relative_error(compiled(*inputs, added_cond_kwargs=given).sample.numpy(), some.numpy()) > 1e-3
    assert warned == []
    attentions[0].scale = [[0.5], 1.0]
    with pytest.raises(TypeError, match=r"."):  # the error of torch
        compiled(*inputs, added_cond_kwargs=given)
    with pytest.raises(ValueError, match="same length as image_projection_layers"):
        compiled(*inputs, added_cond_kwargs={"image_embeds": given["image_embeds"][:1]})
    with pytest.raises(ValueError, match="requires the keyword argument `image_embeds`"):
        compiled(*inputs, added_cond_kwargs={})


def test_a_graph_with_all_inputs(warned: list[str]) -> None:
    unet = _prompted(
        IPAdapterFullImageProjection(12, TEXT_WIDTH), IPAdapterFaceIDImageProjection(8, TEXT_WIDTH, 2, num_tokens=4),
        **_SD | {"up_block_types": ("UpBlock2D",) * 2}, num_class_embeds=9, time_cond_proj_dim=8,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=72,
    )  # fmt: skip
    with graphs_in_torch():  # the graph of calls without residuals, which has no call
        compiled = sdonnx.compile(unet)
    for size in ((16, 16), (13, 18)):
        added = {
            "text_embeds": torch.randn(2, 24), "time_ids": 100 * torch.rand(2, 6),
            "image_embeds": [torch.randn(2, size[0] // 8, 5, 12), torch.randn(2, 2, 8)],
        }  # fmt: skip
        given = {"class_labels": torch.tensor([3, 8]), "timestep_cond": torch.randn(2, 8), "added_cond_kwargs": added}
        given |= _controlled(*size) | _adapted(_SD_ADAPTER, *size)
        assert _error(compiled, _inputs(*size), given) < 1e-4
    assert warned == [
        "UNet2DConditionModel is compiled again, for 6 time_ids and timestep_cond and residuals of ControlNet and 2 "
        "residuals of T2I-Adapter"
    ]


def test_image_prompts_without_a_graph_of_their_own() -> None:
    faces = _prompted(IPAdapterFaceIDPlusImageProjection(hidden_dims=64, heads=2))
    assert "an IP-Adapter has a IPAdapterFaceIDPlusImageProjection" in str(why_unsupported(faces))
    unet = _prompted(IPAdapterFullImageProjection(12, TEXT_WIDTH))
    name = next(each for each in unet.attn_processors if each.endswith("attn2.processor"))
    unet.get_submodule(name.removesuffix(".processor")).set_processor(AttnProcessor2_0())
    assert re.search(r"it has IP-Adapters, and down_.* is a AttnProcessor2_0", str(why_unsupported(unet)))
