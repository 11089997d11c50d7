"""Layer counts against modules of diffusers and transformers, built without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.module_layers import as_written, counted
from support.pipelines import COMPONENTS

from sdonnx.models.layer_counts import KINDS, expected_counts
from sdonnx.models.registry import FAMILIES
from sdonnx.models.spec import Role
from sdonnx.sample.write_sample import ARCHITECTURES, ClassSpec, build_network

UNET = FAMILIES[0].with_role(Role.DENOISER)
TINY_UNET = dict(ARCHITECTURES["tiny"].networks["unet"].config) | {"block_out_channels": [32, 64]}
THREE_BLOCKS = {
    "block_out_channels": [32, 64, 96],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}
# Changes to the UNet of `tiny` that change its layers.
UNETS: dict[str, dict[str, Any]] = {
    "linear projections": {"use_linear_projection": True},
    "equal channels": {"block_out_channels": [32, 32]},
    "falling channels": {"block_out_channels": [64, 32]},
    "layers by block": {**THREE_BLOCKS, "layers_per_block": [1, 3, 2]},
    "layers of SDXL": {
        **THREE_BLOCKS,
        "layers_per_block": 2,
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    },
    "other transformers going up": {
        **THREE_BLOCKS,
        "transformer_layers_per_block": [1, 2, 3],
        "reverse_transformer_layers_per_block": [4, 1, 1],
    },
    "labels": {"num_class_embeds": 10},
    "scale and shift from the time": {"resnet_time_scale_shift": "scale_shift"},
    "only cross attention": {"only_cross_attention": True},
    "heads by block": {"attention_head_dim": [4, 8]},
}
# Changes that add parts that are not counted.
UNKNOWN_UNETS: dict[str, dict[str, Any]] = {
    "simple cross attention": {
        "down_block_types": ["SimpleCrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "SimpleCrossAttnUpBlock2D"],
    },
    "attention in other blocks": {
        "down_block_types": ["AttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "AttnUpBlock2D"],
    },
    "resnets that resize": {
        "down_block_types": ["CrossAttnDownBlock2D", "ResnetDownsampleBlock2D"],
        "up_block_types": ["ResnetUpsampleBlock2D", "CrossAttnUpBlock2D"],
    },
    "two texts": {"dual_cross_attention": True},
    "gated attention": {"attention_type": "gated"},
    "norms of the text": {"addition_embed_type": "text", "encoder_hid_dim": 64, "addition_embed_type_num_heads": 8},
    "another middle": {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"},
}


def parts(component: str, network: Any) -> list[torch.nn.Module | None]:
    """Return the parts of a network that become the component's graph."""
    if component == "vae_encoder":
        return [network.encoder, network.quant_conv]
    return [network.post_quant_conv, network.decoder] if component == "vae_decoder" else [network]


def unet(**changes: Any) -> Any:
    return build_network(ClassSpec("diffusers", "UNet2DConditionModel", TINY_UNET | changes))


FAMILY_OF = {"tiny": 0, "sd15": 0, "sd21": 0, "sdxl": 1, "sdxl-refiner": 1, "sdxl-tiny": 1}
FAMILY_OF |= {"pixart-alpha": 2, "pixart-sigma": 3, "pixart-tiny": 2}


@pytest.mark.parametrize(
    ("architecture", "spec"),
    [
        pytest.param(name, spec, id=f"{name}-{spec.name}")
        for name, family in FAMILY_OF.items()
        for spec in FAMILIES[family].components
        if spec.source in ARCHITECTURES[name].networks
    ],
)
def test_counts_match_the_modules(architecture: str, spec: Any) -> None:
    network = build_network(ARCHITECTURES[architecture].networks[spec.source])
    expected = expected_counts(spec, as_written(network))
    assert expected == counted(parts(spec.name, network))
    assert set(expected) == set(KINDS)


@pytest.mark.parametrize("changes", UNETS.values(), ids=UNETS)
def test_changed_unets(changes: dict[str, Any]) -> None:
    network = unet(**changes)
    assert expected_counts(UNET, as_written(network)) == counted([network])


@pytest.mark.parametrize("changes", UNKNOWN_UNETS.values(), ids=UNKNOWN_UNETS)
def test_unets_with_unknown_parts_are_not_counted(changes: dict[str, Any]) -> None:
    config = TINY_UNET | {"_class_name": "UNet2DConditionModel"}
    assert expected_counts(UNET, config) is not None
    assert expected_counts(UNET, config | changes) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mid_block_add_attention": False},
        {"use_quant_conv": False, "use_post_quant_conv": False},
        {"block_out_channels": [32, 64, 32, 32], "layers_per_block": 3},
    ],
)
@pytest.mark.parametrize("component", ["vae_encoder", "vae_decoder"])
def test_changed_autoencoders(component: str, changes: dict[str, Any]) -> None:
    config = dict(ARCHITECTURES["tiny"].networks["vae"].config) | changes
    network = build_network(ClassSpec("diffusers", "AutoencoderKL", config))
    spec = FAMILIES[0].component(component)
    assert expected_counts(spec, as_written(network)) == counted(parts(component, network))


@pytest.mark.parametrize("component", ["vae_encoder", "vae_decoder"])
def test_autoencoders_with_unknown_parts_are_not_counted(component: str) -> None:
    spec = FAMILIES[0].component(component)
    config = dict(ARCHITECTURES["tiny"].networks["vae"].config) | {"_class_name": "AutoencoderKL"}
    assert expected_counts(spec, config) is not None
    others = {"down_block_types": ["AttnDownEncoderBlock2D"] * 4, "up_block_types": ["AttnUpDecoderBlock2D"] * 4}
    assert expected_counts(spec, config | others) is None


def test_missing_keys_have_their_older_defaults() -> None:
    """As in the published configuration of Stable Diffusion 1.5, which lacks newer keys."""
    network = build_network(ARCHITECTURES["sd15"].networks["unet"])
    config = dict(ARCHITECTURES["sd15"].networks["unet"].config) | {"_class_name": "UNet2DConditionModel"}
    assert "mid_block_type" not in config
    assert expected_counts(UNET, config) == counted([network])


@pytest.mark.parametrize(
    ("family", "role", "config"),
    [
        (0, Role.DENOISER, {}),
        (0, Role.DENOISER, {"_class_name": "PixArtTransformer2DModel"}),
        (2, Role.DENOISER, {"_class_name": "PixArtTransformer2DModel"}),
        (2, Role.DENOISER, {"_class_name": "UNet2DConditionModel"}),
        (0, Role.DENOISER, {"_class_name": ["UNet2DConditionModel"]}),
        (0, Role.IMAGE_DECODER, {"_class_name": "AutoencoderTiny"}),
        (0, Role.IMAGE_DECODER, {"_class_name": "UNet2DConditionModel"}),
        (2, Role.TEXT_ENCODER, {"architectures": ["T5EncoderModel"], "num_hidden_layers": 2}),
        (0, Role.TEXT_ENCODER, {"architectures": []}),
        (0, Role.TEXT_ENCODER, {"architectures": 5}),
        (0, Role.TEXT_ENCODER, {"architectures": ["CLIPTextModel"]}),
        (0, Role.TEXT_ENCODER, {"architectures": ["CLIPTextModel"], "num_hidden_layers": "two"}),
    ],
)
def test_unknown_configurations_are_not_counted(family: int, role: Role, config: dict[str, Any]) -> None:
    assert expected_counts(FAMILIES[family].with_role(role), config) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"down_block_types": ["CrossAttnDownBlock2D"]},
        {"up_block_types": 3},
        {"block_out_channels": 320},
        {"layers_per_block": [1]},
        {"layers_per_block": "two"},
        {"transformer_layers_per_block": None},
    ],
)
def test_contradictory_configurations_are_not_counted(changes: dict[str, Any]) -> None:
    config = TINY_UNET | {"_class_name": "UNet2DConditionModel"}
    assert expected_counts(UNET, config | changes) is None


@pytest.mark.parametrize("spec", [FAMILIES[0].component(name) for name in COMPONENTS], ids=lambda spec: spec.name)
def test_exported_graphs_match_the_counts(spec: Any, tiny_exported: Path) -> None:
    from sdonnx.graph.loading.load import load_model

    config = json.loads((tiny_exported / spec.name / "config.json").read_text())
    nodes = [node.op_type for node in load_model(tiny_exported / spec.name / "model.onnx").graph]
    operators = {
        "attention": "Attention", "geglu": "Gelu", "group_norm": "GroupNormalization",
        "layer_norm": "LayerNormalization", "convolution": "Conv",
    }  # fmt: skip
    expected = expected_counts(spec, config)
    assert expected is not None
    found = {kind: nodes.count(operator) for kind, operator in operators.items()}
    assert found == {kind: expected[kind] for kind in operators}
    assert not any(expected[kind] for kind in expected.keys() - operators.keys())
