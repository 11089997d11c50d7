"""The operations of a denoiser call, and the rate that they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdonnx.benchmark.operator_times import generate_and_count_flops, matrix_rates
from sdonnx.folder.prompt_file import PROMPTS
from sdonnx.reference.diffusers_pipeline import DiffusersPipeline
from sdonnx.reference.workload import Workload

WORKLOAD = Workload(batch_size=2, height=64, width=64, steps=3, seed=5)


@pytest.fixture(scope="module")
def source(micro: Path) -> DiffusersPipeline:
    made = DiffusersPipeline(micro, "cpu")
    made.load(WORKLOAD)
    return made


def test_flops_match_the_layers(source: DiffusersPipeline) -> None:
    """The operations are counted by hand from the shapes of convolutions, linear layers and attention."""
    counted = 0

    def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
        nonlocal counted
        if output.is_meta:
            return  # the copy that FlopCounterMode counts
        # One multiplication and one addition for each weight and each position.
        places = output.numel() // output.shape[1 if isinstance(module, torch.nn.Conv2d) else -1]
        counted += 2 * module.weight.numel() * places

    attended: list[tuple[int, int, int, int]] = []

    def attend(module: Any, inputs: Any, options: Any, output: torch.Tensor) -> None:
        hidden, text = inputs[0], options.get("encoder_hidden_states")
        keys = (hidden if text is None else text).shape[1]
        if output.is_meta:
            return
        attended.append((*hidden.shape[:2], keys, module.to_q.weight.shape[0]))

    unet = source.denoiser
    hooks = [
        module.register_forward_hook(attend, with_kwargs=True)
        for name, module in unet.named_modules()
        if name.endswith((".attn1", ".attn2"))
    ]
    hooks += [
        module.register_forward_hook(count)
        for module in unet.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)
    ]
    images, flops = generate_and_count_flops(source, PROMPTS[0], WORKLOAD)
    for hook in hooks:
        hook.remove()
    assert len(images) == 2
    # Two products (queries with keys, weights with values) of two operations. The denoiser was called 4 times.
    attention = sum(2 * 2 * batch * queries * keys * width for batch, queries, keys, width in attended)
    assert flops == (counted + attention) / 4
    assert "forward" not in vars(unet)


def test_matrix_rates() -> None:
    (name, rate), *others = matrix_rates("cpu").items()
    assert (name, others) == ("float32", [])
    assert 1e9 < rate < 1e14
