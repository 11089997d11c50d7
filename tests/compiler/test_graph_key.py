"""Keys of compiled graphs: equal for equal modules, and others after any change."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from support.small_modules import TEXT_WIDTH, small_text_encoder, small_unet

from sdonnx.compiler import graph_key as module_of_keys
from sdonnx.compiler.compiled_encoders import ClipForward
from sdonnx.compiler.compiled_unet import UNetForward, UNetVariant
from sdonnx.compiler.graph_key import GraphKey, IndescribableError, graph_key

CPU = {"provider": "cpu", "precision": "float32"}


def key_of(module: Any, target: dict[str, str] | None = None) -> GraphKey:
    method = UNetForward() if isinstance(module, UNet2DConditionModel) else ClipForward()
    signature = method.signature(module, method.variant(module, None, None))
    return graph_key(module, signature, method, target or CPU)


@pytest.fixture(scope="module")
def key() -> GraphKey:
    """The key of the UNet."""
    return key_of(small_unet())


def _run(unet: Any, folder: Path) -> Any:
    with torch.inference_mode():
        unet(torch.randn(1, 4, 8, 8), 7, torch.randn(1, 7, TEXT_WIDTH))
    return unet


def _hook(unet: Any, folder: Path) -> Any:
    unet.register_forward_hook(lambda *_: None)  # hooks of the module run around the graph
    return unet


@pytest.mark.parametrize(
    "equal",
    [
        lambda unet, _: copy.deepcopy(unet),
        lambda unet, _: pickle.loads(pickle.dumps(unet)),
        lambda unet, _: unet.to(memory_format=torch.channels_last),
        lambda unet, _: unet.requires_grad_(),
        _run,
        _hook,
    ],
)
def test_equal_modules_have_one_key(equal: Callable[[Any, Path], Any], key: GraphKey, tmp_path: Path) -> None:
    assert key_of(equal(small_unet(), tmp_path)) == key


def test_answers_that_transformers_keeps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has chosen an implementation of attention computes the same key as other processes."""
    module = small_text_encoder()
    kept = "_can_set_attn_implementation_cached_value"
    for cls in type(module).__mro__:
        if kept in vars(cls):
            monkeypatch.delattr(cls, kept)
    before = key_of(module)
    small_text_encoder().set_attn_implementation("eager")
    assert kept in vars(type(module))
    assert key_of(module) == before


def test_place_of_a_model_does_not_count(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "other"):
        small_unet().save_pretrained(tmp_path / name)
        digests.add(key_of(UNet2DConditionModel.from_pretrained(tmp_path / name).eval()).digest)
    assert len(digests) == 1


def test_key_is_that_of_other_processes(key: GraphKey) -> None:
    """Sets and dictionaries of classes have another order there."""
    code = """
from support.small_modules import small_text_encoder, small_unet
from compiler.test_graph_key import key_of
print(key_of(small_text_encoder()).digest, key_of(small_unet()).digest)
"""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    assert done.stdout.split() == [key_of(small_text_encoder()).digest, key.digest]


def test_captured_hidden_states_do_not_count() -> None:
    """transformers adds hooks to layers in the first call that returns them."""
    encoder = small_text_encoder()
    before = key_of(encoder)
    encoder(torch.full((1, 4), 98), output_hidden_states=True)
    assert key_of(encoder) == before


def _edit_weight(unet: Any) -> None:
    with torch.no_grad():
        unet.up_blocks[0].resnets[1].conv2.weight[3, 2, 1, 0] += 1e-3


def _flip_sign_of_zero(unet: Any) -> None:
    with torch.no_grad():
        unet.conv_in.bias.zero_()


def _swap_weights(unet: Any) -> None:
    block = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    block.to_q.weight, block.to_k.weight = block.to_k.weight, block.to_q.weight


def _replace_processors(unet: Any) -> None:
    unet.set_attn_processor(AttnProcessor())


def _replace_one_processor(unet: Any) -> None:
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor = AttnProcessor()


def _set_attribute_of_processor(unet: Any) -> None:
    processor: Any = AttnProcessor2_0()
    processor.scale = 2.0
    unet.set_attn_processor(processor)


def _freeu(unet: Any) -> None:
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def _change_freeu(unet: Any) -> None:
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.5)


def _set_epsilon(unet: Any) -> None:
    unet.conv_norm_out.eps = 1e-4


def _replace_activation(unet: Any) -> None:
    unet.conv_act = torch.nn.GELU()


def _approximate_activation(unet: Any) -> None:
    unet.conv_act = torch.nn.GELU(approximate="tanh")


def _set_stride(unet: Any) -> None:
    unet.conv_out.padding_mode = "circular"


def _add_adapter(unet: Any) -> None:
    unet.conv_in.adapters = {"one": 0.5}


def _change_adapter(unet: Any) -> None:
    unet.conv_in.adapters = {"one": 0.6}


def _add_tensor(unet: Any) -> None:
    unet.conv_in.scales = [torch.ones(3)]


def _add_partial(unet: Any) -> None:
    unet.conv_act.forward_options = functools.partial(torch.nn.functional.silu, inplace=True)


def _remove_bias(unet: Any) -> None:
    unet.conv_out.bias = None


CHANGES = (
    _edit_weight, _flip_sign_of_zero, _swap_weights, _replace_processors, _replace_one_processor,
    _set_attribute_of_processor, _freeu, _change_freeu, _set_epsilon, _replace_activation, _approximate_activation,
    _set_stride, _add_adapter, _change_adapter, _add_tensor, _add_partial, _remove_bias,
)  # fmt: skip


def test_changed_modules_have_other_keys(key: GraphKey) -> None:
    digests = {key.digest}
    for change in CHANGES:
        unet = small_unet()
        change(unet)
        digests.add(key_of(unet).digest)
    assert len(digests) == 1 + len(CHANGES)


def test_configuration_target_and_versions_count(key: GraphKey, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {key.digest, key_of(small_unet(), CPU | {"precision": "float16"}).digest}
    sizes = {"addition_embed_type": "text_time", "projection_class_embeddings_input_dim": 72}
    unet, method = small_unet(**sizes, addition_time_embed_dim=8), UNetForward()
    for variant in (5, 6):
        digests.add(graph_key(unet, method.signature(unet, UNetVariant(time_ids=variant)), method, CPU).digest)
    monkeypatch.setattr(module_of_keys, "_code_digest", lambda: "other")
    digests.add(key_of(small_unet()).digest)
    monkeypatch.setattr(module_of_keys, "_versions", lambda: {"torch": "1"})
    digests.add(key_of(small_unet()).digest)
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("change", "shown"),
    [(_edit_weight, "weights"), (_replace_processors, "classes or attributes"), (_freeu, "classes or attributes")],
)
def test_difference_is_named(change: Callable[[Any], None], shown: str, key: GraphKey) -> None:
    unet = small_unet()
    change(unet)
    assert key_of(unet).difference(key.parts) == shown


class OwnProcessor(AttnProcessor):
    """Its code may call anything."""


def _own_processor(unet: Any) -> None:
    unet.set_attn_processor(OwnProcessor())


def _own_function(unet: Any) -> None:
    unet.conv_in.scale = lambda: 2


def _own_wrapper(unet: Any) -> None:
    """functools.wraps copies the names of the function that it wraps."""
    original = type(unet.conv_act).forward

    @functools.wraps(original)
    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * original(self, states)
        return doubled

    unet.conv_act.own = forward


def _own_submodule(unet: Any) -> None:
    class Scaled(torch.nn.SiLU):
        pass

    unet.conv_act = Scaled()


def _own_enum_of_state(unet: Any) -> None:
    unet.conv_in.state = iter([1])


def _inner_hook(unet: Any) -> None:
    unet.conv_in.register_forward_hook(lambda *_: None)


def _cycle(unet: Any) -> None:
    values: list[Any] = []
    values.append(values)
    unet.conv_in.values = values


def _generator(unet: Any) -> None:
    unet.conv_in.generator = torch.Generator()


def _subclass_of_tensor(unet: Any) -> None:
    class Scaled(torch.nn.Parameter):
        pass

    unet.conv_in.weight = Scaled(unet.conv_in.weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_own_processor, r"processor is .*OwnProcessor, which is not of sdonnx, torch"),
        (_own_function, r"conv_in\.scale is .*<lambda>, which is not of"),
        (_own_wrapper, r"conv_act\.own is .*forward, which is not of"),
        (_own_submodule, r"conv_act is .*Scaled, which is not of"),
        (_own_enum_of_state, r"conv_in\.state is a builtins\.list_iterator"),
        (_inner_hook, "hooks"),
        (_cycle, "contain themselves"),
        (_generator, r"conv_in\.generator is a torch"),
        (_subclass_of_tensor, r"conv_in\..* is a Scaled without dense values"),
    ],
)
def test_modules_without_a_description(change: Callable[[Any], None], reason: str) -> None:
    unet = small_unet()
    change(unet)
    with pytest.raises(IndescribableError, match=reason):
        key_of(unet)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(BasicTransformerBlock, "forward"), (torch.nn.functional, "scaled_dot_product_attention"),
     (AttnProcessor2_0, "__call__"), (torch.nn.Module, "__call__")],
)  # fmt: skip
def test_functions_replaced_by_the_user(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: original(*args, **named))
    with pytest.raises(IndescribableError, match=rf"{name} is .*<lambda>, which is not of"):
        key_of(small_unet())


def test_functions_replaced_by_others_of_known_packages(key: GraphKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttnProcessor2_0, "__call__", AttnProcessor.__call__)
    assert key_of(small_unet()) != key
