"""`sdonnx.compile` of modules of any class, compared with the modules themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.controlnets.controlnet import ControlNetOutput
from support.logged_lines import logged_lines
from support.small_modules import small_unet, unet_inputs
from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertModel

import sdonnx
from sdonnx.compiler import torch_backend
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.compiler.result_checks import CHECKED_SIZES, ResultCheck
from sdonnx.errors import OptionError
from sdonnx.metrics import relative_error
from sdonnx.runtime.device.session import Graph

CHECKED = {"options": {"check_agreement": True}}
AGAIN = "{} changed after it was compiled, and is compiled again"


class Mlp(nn.Module):
    """Two layers, with a table that is no buffer, and a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = torch.linspace(0, 1, 16)
        self.rows = [torch.full((4,), 0.5)]
        self.offset = 0.0

    def forward(self, x: torch.Tensor, scale: float = 1.0, activate: bool = True, step: int = 3) -> torch.Tensor:
        hidden = self.first(x) + self.table.to(x.dtype)
        if activate:
            hidden = torch.nn.functional.gelu(hidden)
        result: torch.Tensor = (self.second(hidden) + self.rows[0].to(x.dtype)) * scale + self.offset + step
        return result


class Block(nn.Module):
    """A transformer layer that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.forward_norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["states"][0]
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.down(torch.nn.functional.gelu(self.up(self.forward_norm(x))))
        return {"x": x, "parts": [x.mean(dim=1), None], "given": batch["states"][1], "name": "block", "again": x}


class Even(nn.Module):
    """A branch that depends on a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] % 2 == 0 else x - 1


class Crop(nn.Module):
    """A size that is divided twice with rounding, also below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(64.0)[:, None].repeat(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height = x.shape[1] // 2
        top = (64 - height) // 2
        return x[:, :height] + self.table[top : top + height]


class Doubled(nn.Module):
    """A branch that depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


class Counted(nn.Module):
    """Counts calls in a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Replaced(Counted):
    """Counts calls in a buffer that each call replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * self.count


class Numbered(nn.Module):
    """Counts calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Held(nn.Module):
    """Counts calls in an object among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.calls += 1
        calls: int = self.state.calls
        return x * calls


class Listed(nn.Module):
    """Counts calls in a tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = [[torch.zeros(1)]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[0][0] += 1
        return x * self.cache[0][0]


class Overwritten(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


class Emptied(nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs.pop() * 2


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).real


class Residuals(nn.Module):
    """Returns a dataclass of diffusers with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> ControlNetOutput:
        down: Any = [self.conv(x), x]
        return ControlNetOutput(down_block_res_samples=down, mid_block_res_sample=self.conv(x) * 2)


class Selected(nn.Module):
    """Returns a tensor with a size that depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class Unique(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return object()


def _made(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return relative_error(ours.detach().float().numpy(), theirs.detach().float().numpy())


def _graphs(compiled: Any) -> int:
    return sum(len(each.graphs) for each in compiled._programs.traced.backend.programs)


def test_sizes_are_dynamic_and_constants_are_not(warned: list[str]) -> None:
    module = _made(Mlp)
    compiled: Any = sdonnx.compile(module)
    assert isinstance(compiled, CompiledModule)
    assert isinstance(compiled, Mlp)
    for rows in (3, 4, 7):
        x = torch.randn(rows, 8)
        assert _error(compiled(x), module(x)) < 1e-5
    assert _graphs(compiled) == 1
    for graphs, arguments in ((2, {"scale": 2.0}), (3, {"activate": False}), (3, {"scale": 2.0}), (4, {"step": 9})):
        assert _error(compiled(x, **arguments), module(x, **arguments)) < 1e-5
        assert _graphs(compiled) == graphs
    assert _error(compiled(x[:1]), module(x[:1])) < 1e-5  # sizes of 1 are fixed
    assert warned == []


@pytest.mark.parametrize("kind", [Even, Crop])
def test_sizes_on_which_a_module_depends(kind: Callable[[], nn.Module], warned: list[str]) -> None:
    module = _made(kind)
    compiled = sdonnx.compile(module)
    for columns in (20, 18, 21, 26):
        x = torch.randn(2, columns, 4) if kind is Crop else torch.randn(2, columns)
        assert torch.equal(compiled(x), module(x))
    assert _graphs(compiled) >= 1
    assert warned == []


def test_structures_of_arguments_and_results_are_kept(warned: list[str]) -> None:
    module, residuals = _made(Block), _made(Residuals)
    compiled = sdonnx.compile(module)
    for batch in (2, 3):
        states = (torch.randn(batch, 6, 32), torch.arange(batch))
        ours, theirs = compiled({"states": states, "mask": None}), module({"states": states, "mask": None})
        assert list(ours) == list(theirs)
        assert _error(ours["x"], theirs["x"]) < 1e-5
        assert ours["again"] is ours["x"]
        assert ours["given"] is states[1]
        assert ours["name"] == "block"
        assert ours["parts"][1] is None
        assert _error(ours["parts"][0], theirs["parts"][0]) < 1e-5
    x = torch.randn(2, 3, 8, 6)
    found: Any = sdonnx.compile(residuals)(x)
    assert type(found).__name__ == "ControlNetOutput"
    assert found.down_block_res_samples[1] is x
    assert _error(found.mid_block_res_sample, residuals(x).mid_block_res_sample) < 1e-5
    assert warned == []


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_a_model_of_transformers(dtype: torch.dtype, limit: float) -> None:
    """float16 on the CPU and bfloat16 are computed in float32; results have the type of the module."""

    def bert() -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = BertConfig(**sizes)
        config.vocab_size = 50
        return BertModel(config).to(dtype)

    module = _made(bert)
    with logged_lines(logging.INFO) as lines:
        compiled = sdonnx.compile(module, options=CHECKED)
        for shape in ((2, 5), (3, 9)):
            ids = torch.randint(0, 50, shape)
            mask = (torch.arange(shape[1]) < 4).long().expand(shape)
            with torch.inference_mode():
                ours, theirs = compiled(ids, attention_mask=mask), module(ids, attention_mask=mask)
            assert type(ours) is type(theirs)
            assert ours.last_hidden_state.dtype == dtype
            assert _error(ours.last_hidden_state, theirs.last_hidden_state) < limit
            assert _error(ours.pooler_output, theirs.pooler_output) < limit
    assert _graphs(compiled) == 1
    fused = [line for line in lines if line.startswith("fused in BertModel: ")]
    assert len(fused) == 1
    assert dtype != torch.float32 or "AttentionToMultiHeadAttention 2" in fused[0]
    assert not any("torch computes" in line for line in lines)


def test_other_configurations_of_supported_classes(noted: list[str]) -> None:
    unet = small_unet(encoder_hid_dim=8, encoder_hid_dim_type="text_proj", mid_block_type=None)
    compiled, text = sdonnx.compile(unet), torch.randn(2, 9, 8)
    with torch.inference_mode():
        ours, theirs = compiled(unet_inputs()[0], 7, text), unet(unet_inputs()[0], 7, text)
    assert _error(ours.sample, theirs.sample) < 1e-4
    assert noted[0].endswith("as modules of any class: its configuration has encoder_hid_dim_type='text_proj'")
    assert not any("torch computes" in line for line in noted)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Noisy, "it generates random numbers (RandomNormalLike)"),
        (Complex, "it has a tensor of torch.complex64"),
        (Counted, "it changes its buffers"),
        (Overwritten, "it changes its arguments in place"),
        (Doubled, None), (Selected, None), (Unique, None), (Replaced, None), (Numbered, None), (Held, None),
        (Listed, None),
    ],
)  # fmt: skip
def test_other_modules_have_the_results_of_torch(
    kind: Callable[[], nn.Module], reason: str | None, warned: list[str]
) -> None:
    """Values that decide branches or sizes, states and random numbers: Dynamo or torch computes them."""
    module, other = _made(kind), _made(kind)
    compiled = sdonnx.compile(module)
    for sign in (1, -1, 1, 1):
        given = [torch.full((3, 4), 2.0 * sign) for _ in range(2)]
        torch.manual_seed(1)
        ours = compiled(given[0])
        torch.manual_seed(1)
        theirs = other(given[1])
        assert type(ours) is type(theirs)
        assert not isinstance(ours, torch.Tensor) or torch.equal(ours, theirs)
        assert torch.equal(given[0], given[1])
    if reason is not None:
        assert warned == [f"torch computes a call of {kind.__name__}: {reason}"]


def test_lists_that_are_changed() -> None:
    values = [torch.ones(2), torch.ones(3)]
    compiled: Any = sdonnx.compile(_made(Emptied))
    assert torch.equal(compiled(values), torch.full((3,), 2.0))
    assert len(values) == 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.randn(2, 8, dtype=torch.float64), "it has a tensor of torch.float64"),
        (lambda: torch.randn(0, 8), "it has a tensor of shape (0, 8)"),
        (lambda: torch.randn(2, 8, requires_grad=True), "it requires a gradient"),
    ],
)
def test_other_arguments_run_in_torch(make: Callable[[], torch.Tensor], reason: str, warned: list[str]) -> None:
    module = _made(Even)
    compiled, x = sdonnx.compile(module), make()
    ours, theirs = compiled(x), module(x)
    assert torch.equal(ours, theirs)
    assert ours.requires_grad == theirs.requires_grad
    assert warned[0].startswith(f"torch computes a call of Even: {reason}")


def test_states_of_the_module(warned: list[str]) -> None:
    """Everything that changes the result is noticed; writes that torch does not count need `refresh`."""
    module = _made(Mlp)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    before = compiled(x)

    def is_right() -> bool:
        return _error(compiled(x), module(x)) < 1e-5 and _error(compiled(x), before) > 1e-2

    with torch.no_grad():
        module.first.weight.mul_(2)
    assert is_right()
    assert warned == [AGAIN.format("Mlp")]
    module.first.weight.data = module.first.weight.data * 2
    assert is_right()
    module.second = nn.Linear(16, 4).requires_grad_(False)
    assert is_right()
    module.offset = 2.5
    assert is_right()
    module.table = module.table * 3
    assert is_right()
    module.rows[0] = torch.ones(4)
    assert is_right()
    module.first.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) * 2})
    assert is_right()
    module.second.register_forward_hook(lambda _, args, result: result + 3)
    assert is_right()
    module.first.weight.data.mul_(2)
    assert is_right()
    module.first.weight.data[1, 2] = 30.0
    sdonnx.refresh(compiled)
    assert is_right()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == module(x).dtype
    module.requires_grad_()
    assert compiled(x).requires_grad
    with torch.no_grad():
        assert is_right()


def test_training_mode_and_processors() -> None:
    block = diffusers.models.attention_processor.Attention(8, heads=2, dim_head=4, dropout=0.5).eval()

    class Scaled:
        def __init__(self) -> None:
            self.scale, self.inner = 0.3, AttnProcessor2_0()

        def __call__(self, attn: Any, hidden: Any, *args: Any, **_: Any) -> Any:
            return self.inner(attn, hidden) * self.scale

    processor: Any = Scaled()
    block.set_processor(processor)
    compiled, states = sdonnx.compile(block), torch.randn(1, 5, 8)
    with torch.no_grad():
        for processor.scale in (0.3, 0.9):
            assert _error(compiled(states), block(states)) < 1e-5
        compiled.train()
        torch.manual_seed(0)
        found = compiled(states)
        torch.manual_seed(0)
        assert torch.equal(found, block(states))
        compiled.eval()
        assert _error(compiled(states), block(states)) < 1e-5


def test_wrong_arguments_raise_the_error_of_the_module() -> None:
    compiled = sdonnx.compile(_made(Even))
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        compiled(torch.ones(2, 2), colour=1)
    with pytest.raises(IndexError):
        compiled(torch.ones(2))


def test_the_number_of_graphs_is_bounded(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "MAX_GRAPHS", 2)
    module = _made(Mlp)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    for step in (4, 5, 6):
        assert _error(compiled(x, step=step), module(x, step=step)) < 1e-5
    assert _graphs(compiled) == 2
    assert warned == ["torch computes a call of Mlp: it has been called with 2 other kinds of arguments"]


def test_hooks_of_the_module_run_once() -> None:
    """They are no part of the graph, also if they are registered before the export."""
    module = _made(Even)
    hook = module.register_forward_hook(lambda _, args, result: result + 1)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    for offset in (1, 0):
        assert torch.equal(compiled(x), x * 2 + offset)
        hook.remove()
    assert _graphs(compiled) == 1


def test_a_graph_that_disagrees_is_not_used(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is right for the sizes of its export only, for example because it rounds sizes the wrong way."""
    module, run, computed = _made(Mlp), Graph.run, []

    def faulty(graph: Graph, inputs: Any) -> dict[str, Any]:
        computed.append(len(inputs["input_0"]))
        return {name: value + (computed[-1] == 3) for name, value in run(graph, inputs).items()}

    monkeypatch.setattr(Graph, "run", faulty)
    compiled = sdonnx.compile(module, options=CHECKED)
    for rows in (2, 2, 3, 3, 2):
        x = torch.randn(rows, 8)
        assert _error(compiled(x), module(x)) < 1e-5
    assert computed == [2, 2, 3]
    assert "the graph of Mlp disagrees with torch, which computes its calls: a tensor (3, 4) " in warned[0]
    assert warned[1] == "torch computes a call of Mlp: its graph disagrees with torch"


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ((torch.ones(2), None, 3), (torch.ones(2) + 1e-6, None, 3), None),
        ((torch.ones(2),), [torch.ones(2)], "the results have different structures"),
        (torch.ones(2), torch.ones(3), "a tensor (2,) of torch.float32 instead of (3,) of torch.float32"),
        (torch.ones(2), torch.ones(2) * 1.01, "a tensor (2,) has a relative error of 0.0099, more than 0.001"),
        (torch.tensor([1]), torch.tensor([2]), "a tensor (1,) of torch.int64 has other values"),
        ({"a": 3}, {"a": 4}, "3 instead of 4"),
    ],
)
def test_differences_of_results(ours: Any, theirs: Any, difference: str | None, warned: list[str]) -> None:
    check = ResultCheck("Mlp", enabled=True)
    result = check.checked(ours, lambda: theirs, (torch.ones(2),))
    assert result is (ours if difference is None else theirs)
    assert check.failed == (difference is not None)
    expected = [] if difference is None else [difference]
    assert [line.partition(", which computes its calls: ")[2] for line in warned] == expected
    assert check.checked(ours, lambda: pytest.fail("compared twice"), (torch.ones(2),)) is ours


def test_a_third_size_is_not_compared() -> None:
    check, compared = ResultCheck("Mlp", enabled=True), list[int]()
    for rows in (2, 3, 2, 4, 3):
        x = torch.ones(rows, 1)
        check.checked(x, lambda x=x: compared.append(len(x)) or x, {"x": x, "scale": 1.0})  # type: ignore[func-returns-value,misc]
    assert compared == [2, 3]
    assert len(compared) == CHECKED_SIZES


@pytest.mark.parametrize(
    ("module", "reason"), [(nn.ModuleList(), "it has no forward"), (torch.ones(1), "it is no torch module")]
)
def test_modules_that_cannot_be_compiled(module: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        sdonnx.compile(module)
    with pytest.raises(OptionError, match="without a compiled module"):
        sdonnx.refresh(module)
