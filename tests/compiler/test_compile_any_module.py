"""`sdonnx.compile` of modules of any class, compared with the modules themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetOutput
from support.logged_lines import logged_lines
from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertModel

import sdonnx
from sdonnx.compiler import exported_module
from sdonnx.compiler.agreement_check import AgreementCheck
from sdonnx.compiler.call_structure import FlatCall
from sdonnx.compiler.compile_module import CompiledModule
from sdonnx.compiler.export_call import export_call
from sdonnx.errors import OptionError
from sdonnx.metrics import relative_error
from sdonnx.runtime.device.session import Graph


class Mlp(nn.Module):
    """Two layers, with a table that is no buffer, and a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.table = torch.linspace(0, 1, 16)
        self.rows = [torch.full((4,), 0.5)]

    def forward(self, x: torch.Tensor, scale: float = 1.0, activate: bool = True) -> torch.Tensor:
        hidden = self.first(x) + self.table
        if activate:
            hidden = torch.nn.functional.gelu(hidden)
        result: torch.Tensor = (self.second(hidden) + self.rows[0]) * scale
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


class Remembered(nn.Module):
    """Counts calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache += 1
        return x * self.cache


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
    """A module that returns a tensor with a data-dependent size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class Unique(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return object()


def _made(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return relative_error(ours.detach().numpy(), theirs.detach().numpy())


def _graphs(compiled: Any) -> int:
    return len(compiled._programs["forward"]._graphs)


@pytest.fixture(scope="module")
def mlps() -> tuple[Any, Any]:
    """A module and its drop-in with a graph; tests leave its weights as they were."""
    module = _made(Mlp)
    compiled = sdonnx.compile(module)
    assert isinstance(compiled, CompiledModule)
    assert isinstance(compiled, Mlp)
    assert _graphs(compiled) == 0
    compiled(torch.randn(2, 8))
    return module, compiled


def test_sizes_are_dynamic_and_constants_are_not(mlps: tuple[Any, Any], warned: list[str]) -> None:
    module, compiled = mlps
    for rows in (3, 4, 7):
        x = torch.randn(rows, 8)
        assert _error(compiled(x), module(x)) < 1e-5
    assert _graphs(compiled) == 1
    for graphs, arguments in ((2, {"scale": 2.0}), (3, {"activate": False}), (3, {"scale": 2.0})):
        assert _error(compiled(x, **arguments), module(x, **arguments)) < 1e-5
        assert _graphs(compiled) == graphs
    assert _error(compiled(x[:1]), module(x[:1])) < 1e-5  # torch.export fixes sizes of 1
    assert _graphs(compiled) == 4
    keys = {FlatCall.of((x,), {"scale": scale}).key for scale in (1.0, 1, True, float("nan"))}
    assert len(keys) == 4
    assert warned == []


def test_a_branch_on_a_size_is_a_condition_of_the_graph(warned: list[str]) -> None:
    module = _made(Even)
    compiled = sdonnx.compile(module)
    for sizes, graphs in (((3, 4), 1), ((2, 8), 1), ((3, 5), 2), ((5, 7), 2), ((2, 2), 2)):
        x = torch.randn(sizes)
        assert torch.equal(compiled(x), module(x))
        assert _graphs(compiled) == graphs
    assert warned == []


def test_structures_of_arguments_and_results_are_kept(warned: list[str]) -> None:
    module = _made(Block)
    compiled = sdonnx.compile(module)
    for batch in (2, 3):
        states = (torch.randn(batch, 6, 32), torch.arange(batch))
        ours, theirs = compiled({"states": states, "mask": None}), module({"states": states, "mask": None})
        assert list(ours) == list(theirs)
        assert _error(ours["x"], theirs["x"]) < 1e-5
        assert ours["again"] is ours["x"]
        assert ours["given"] is states[1]
        assert ours["name"] == "block"
        assert isinstance(ours["parts"], list)
        assert ours["parts"][1] is None
        assert _error(ours["parts"][0], theirs["parts"][0]) < 1e-5
    assert _graphs(compiled) == 1
    none, three = (FlatCall.of(({"states": states, "mask": mask},), {}) for mask in (None, 3))
    assert none.key != three.key
    assert warned == []


def test_dataclasses_of_diffusers_are_kept(warned: list[str]) -> None:
    module = _made(Residuals)
    compiled, x = sdonnx.compile(module), torch.randn(2, 3, 8, 6)
    ours: Any
    ours, theirs = compiled(x), module(x)
    assert type(ours).__name__ == "ControlNetOutput"
    assert ours.down_block_res_samples[1] is x
    assert _error(ours.down_block_res_samples[0], theirs.down_block_res_samples[0]) < 1e-5
    assert _error(ours.mid_block_res_sample, theirs.mid_block_res_sample) < 1e-5
    assert warned == []


class _SplitBySizes(nn.Module):
    """Splits at a size, as transformers of Flux do: the exporter writes a sequence of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self.linear(torch.cat([x, y], dim=1))
        length = x.shape[1]
        one, other = joined.split_with_sizes([length, joined.shape[1] - length], dim=1)
        return 2 * one, other


def test_sequences_of_tensors(warned: list[str]) -> None:
    module = _made(_SplitBySizes)
    compiled = sdonnx.compile(module)
    for length in (3, 5):
        call = torch.randn(2, length, 8), torch.randn(2, 4, 8)
        for ours, theirs in zip(compiled(*call), module(*call), strict=True):
            assert ours.shape == theirs.shape
            assert _error(ours, theirs) < 1e-5
    assert warned == []


def test_a_model_of_transformers() -> None:
    def bert() -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = BertConfig(**sizes)
        config.vocab_size = 50
        return BertModel(config)

    module = _made(bert)
    with logged_lines(logging.INFO) as lines:
        compiled = sdonnx.compile(module, options={"options": {"check_agreement": True}})
        for shape in ((2, 5), (3, 9)):
            ids = torch.randint(0, 50, shape)
            mask = (torch.arange(shape[1]) < 4).long().expand(shape)
            with torch.inference_mode():
                ours, theirs = compiled(ids, attention_mask=mask), module(ids, attention_mask=mask)
            assert type(ours) is type(theirs)
            assert list(ours) == list(theirs)
            assert _error(ours.last_hidden_state, theirs.last_hidden_state) < 1e-5
            assert _error(ours.pooler_output, theirs.pooler_output) < 1e-5
    fused = [line for line in lines if line.startswith("fused in BertModel: ")]
    assert len(fused) == 1
    assert "AttentionToMultiHeadAttention 2" in fused[0]
    assert "LayerNormToSkipLayerNorm" in fused[0]
    assert not any("torch" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Doubled, "torch.export failed (GuardOnDataDependentSymNode"),
        (Selected, "its sizes or its branches depend on the values of tensors"),
        (Noisy, "it generates random numbers (RandomNormalLike)"),
        (Unique, "it returns a object"),
        (Complex, "weight is torch.complex64"),
    ],
)
def test_torch_computes_other_modules(kind: Callable[[], nn.Module], reason: str, warned: list[str]) -> None:
    module = _made(kind)
    compiled = sdonnx.compile(module)
    for sign in (1, -1):
        x = torch.full((3, 4), 2.0 * sign)
        torch.manual_seed(1)
        ours = compiled(x)
        torch.manual_seed(1)
        theirs = module(x)
        assert type(ours) is type(theirs)
        assert not isinstance(ours, torch.Tensor) or torch.equal(ours, theirs)
    assert _graphs(compiled) == 0
    assert len(warned) == 1
    assert warned[0].startswith(f"torch computes a call of {kind.__name__}: {reason}")
    assert "\n" not in warned[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counted, "it changes count"),
        (Replaced, "it changes its own attributes"),
        (Numbered, "it changes its own attributes"),
        (Held, "it changes its own attributes"),
        (Listed, "torch.export failed ("),
        (Remembered, "it changes a tensor among its attributes"),
    ],
)
def test_modules_with_a_state_run_in_torch(
    kind: Callable[[], nn.Module], reason: str, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = mock.Mock(wraps=export_call)
    monkeypatch.setattr(exported_module, "export_call", export)
    module, other = _made(kind), _made(kind)
    compiled, x = sdonnx.compile(module), torch.ones(2, 3)
    for _ in range(3):
        assert torch.equal(compiled(x), other(x))
    assert torch.equal(compiled(x), torch.full((2, 3), 4.0))
    assert _graphs(compiled) == 0
    assert export.call_count == 1
    assert len(warned) == 1
    assert warned[0].startswith(f"torch computes a call of {kind.__name__}: {reason}")


def test_modules_that_change_arguments_run_in_torch(warned: list[str]) -> None:
    compiled = sdonnx.compile(_made(Overwritten))
    x = torch.ones(2, 3)
    assert torch.equal(compiled(x), torch.full((2, 3), 4.0))
    assert torch.equal(x, torch.full((2, 3), 2.0))
    emptied: Any = sdonnx.compile(_made(Emptied))
    values = [torch.ones(2), torch.ones(3)]
    assert torch.equal(emptied(values), torch.full((3,), 2.0))
    assert len(values) == 1
    assert warned == [
        "torch computes a call of Overwritten: it changes its arguments in place",
        "torch computes a call of Emptied: it changes the lists or dictionaries of its arguments",
    ]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.randn(2, 8, dtype=torch.float64), "an argument is a tensor of torch.float64"),
        (lambda: torch.randn(0, 8), "an argument has shape (0, 8)"),
        (lambda: torch.randn(2, 8).to_sparse(), "an argument is not a dense tensor on the CPU"),
        (lambda: torch.randn(2, 8, requires_grad=True), "an argument requires a gradient"),
    ],
)
def test_other_arguments_run_in_torch(make: Callable[[], torch.Tensor], reason: str, warned: list[str]) -> None:
    module = _made(Even)
    compiled, x = sdonnx.compile(module), make()
    ours, theirs = compiled(x), module(x)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.requires_grad == theirs.requires_grad
    assert warned == [f"torch computes a call of Even: {reason}"]


def test_states_of_the_module(warned: list[str]) -> None:
    module = _made(Mlp)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    before = compiled(x)
    with torch.no_grad():
        module.first.weight.mul_(2)
    assert _error(compiled(x), module(x)) < 1e-5
    assert _error(compiled(x), before) > 0.1
    module.train()
    compiled(x)
    module.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == module(x).dtype
    module.requires_grad_()
    assert compiled(x).requires_grad
    with torch.no_grad():
        assert _error(compiled(x), module(x)) < 1e-5
    meta = sdonnx.compile(_made(Residuals).to("meta"))
    assert meta(torch.randn(2, 3, 8, 6, device="meta")).mid_block_res_sample.is_meta
    assert meta._programs["forward"]._why_not(meta) == "conv.weight is on meta"
    lines = [line.removeprefix("torch computes a call of Mlp: ") for line in warned]
    assert lines[:4] == [
        "Mlp changed after it was compiled, and is compiled again",
        "Mlp changed after it was compiled, and is compiled again",
        "it is in training mode",
        "autocast is enabled",
    ]
    assert "its parameters require a gradient, outside torch.no_grad and torch.inference_mode" in lines
    assert warned[-1].endswith("Residuals: an argument is not a dense tensor on the CPU")


def test_wrong_arguments_raise_the_error_of_the_module(warned: list[str]) -> None:
    compiled = sdonnx.compile(_made(Even))
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        compiled(torch.ones(2, 2), colour=1)
    with pytest.raises(IndexError):
        compiled(torch.ones(2))
    assert all(line.startswith("torch computes a call of Even: torch.export failed (") for line in warned)
    assert len(warned) == 2


def test_the_number_of_graphs_is_bounded(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_module, "MAX_GRAPHS", 2)
    module = _made(Even)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    for columns in (8, 7, 6, 5):
        assert torch.equal(compiled(x[:, :columns]), module(x[:, :columns]))
    assert _graphs(compiled) == 2
    assert torch.equal(compiled(x.int()), module(x.int()))
    assert _graphs(compiled) == 2
    assert warned == ["torch computes a call of Even: it has been called with 2 other kinds of arguments"]


def test_hooks_of_the_module_run_once() -> None:
    """They are no part of the graph, also if they are registered before the export."""
    module = _made(Even)
    hook = module.register_forward_hook(lambda _, args, result: result + 1)
    compiled, x = sdonnx.compile(module), torch.randn(2, 8)
    for offset in (1, 0):
        assert torch.equal(compiled(x), x * 2 + offset)
        hook.remove()
    assert _graphs(compiled) == 1


def test_a_graph_that_disagrees_is_not_used(
    mlps: tuple[Any, Any], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, unchecked = mlps
    run = Graph.run
    monkeypatch.setattr(Graph, "run", lambda *args: {name: value * 1.01 for name, value in run(*args).items()})
    x = torch.randn(2, 8)
    assert 0.005 < _error(unchecked(x), module(x)) < 0.02
    compiled = sdonnx.compile(module, options={"options": {"check_agreement": True}})
    for _ in range(2):
        assert torch.equal(compiled(x), module(x))
    assert len(warned) == 2
    assert warned[0].startswith("the graph of Mlp disagrees with torch, which computes its calls: a tensor (2, 4) ")
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
    check = AgreementCheck("Mlp", enabled=True)
    result = check.checked(ours, lambda: theirs, (torch.ones(2),))
    assert result is (ours if difference is None else theirs)
    assert check.failed == (difference is not None)
    expected = [] if difference is None else [difference]
    assert [line.partition(", which computes its calls: ")[2] for line in warned] == expected
    assert check.checked(ours, lambda: pytest.fail("compared twice"), (torch.zeros(2),)) is ours


def test_a_second_size_is_compared(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is right for the sizes of its export only, for example because it rounds sizes the wrong way."""
    module, run, computed = _made(Mlp), Graph.run, []

    def faulty(graph: Graph, inputs: Any) -> dict[str, Any]:
        computed.append(len(inputs["input_0"]))
        return {name: value + (computed[-1] == 3) for name, value in run(graph, inputs).items()}

    monkeypatch.setattr(Graph, "run", faulty)
    compiled = sdonnx.compile(module, options={"options": {"check_agreement": True}})
    for rows in (2, 2, 3, 3, 2):
        x = torch.randn(rows, 8)
        assert _error(compiled(x), module(x)) < 1e-5
    assert computed == [2, 2, 3]
    assert "the graph of Mlp disagrees with torch, which computes its calls: a tensor (3, 4) " in warned[0]


def test_a_third_size_is_not_compared() -> None:
    check, compared = AgreementCheck("Mlp", enabled=True), list[int]()
    for rows in (2, 3, 2, 4, 3):
        x = torch.ones(rows, 1)
        check.checked(x, lambda x=x: compared.append(len(x)) or x, {"x": x, "scale": 1.0})  # type: ignore[func-returns-value,misc]
    assert compared == [2, 3]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ModuleList(), "it has no forward"),
        (torch.ones(1), "it is no torch module"),
    ],
)
def test_modules_that_cannot_be_compiled(module: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        sdonnx.compile(module)
