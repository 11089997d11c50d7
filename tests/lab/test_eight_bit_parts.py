"""Which convolutions and attentions a call of a denoiser has, and the sums of their times."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.pipeline_cache import PipelineCache
from support.scripts import load_script
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = load_script("eight_bit_parts")


@pytest.mark.parametrize("architecture", ["tiny", "sdxl-tiny", "pixart-alpha-tiny"])
def test_parts_have_the_operations_that_torch_counts(architecture: str, pipelines: PipelineCache) -> None:
    with FlopCounterMode(display=False) as counter:
        parts = SCRIPT.recorded_parts(pipelines.sample(architecture), 128, 96, 2)
    flops = Counter[str]()
    for part, count in parts.items():
        flops[type(part).__name__] += part.flops * count
    theirs = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    assert flops["Convolution"] == theirs["aten.convolution"]
    # Without attention, only linear layers have products.
    attention = sum(value for name, value in theirs.items() if "attention" in name or "bmm" in name)
    assert flops["Attention"] == attention > 0


def test_sums_take_the_faster_type() -> None:
    convolution = SCRIPT.Convolution((2, 32, 8, 8), (64, 32, 3, 3), (2, 2), (1, 1))
    first = SCRIPT.Convolution((2, 4, 8, 8), (32, 4, 3, 3), (1, 1), (1, 1))
    attention = SCRIPT.Attention((2, 8, 64, 40), (2, 8, 77, 40))
    times: dict[Any, tuple[float, float | str]] = {
        convolution: (3.0, 2.0), first: (1.0, "4 channels"), attention: (0.5, 0.75)
    }  # fmt: skip

    def milliseconds(part: Any, dtype: torch.dtype) -> float | str:
        return times[part][dtype is not torch.float16]

    found = SCRIPT.measured(Counter({convolution: 4, first: 1, attention: 2}), milliseconds)
    assert found["sums"] == {
        "convolution": {"fp16_ms": 13.0, "fp8_ms": 9.0},
        "attention": {"fp16_ms": 1.0, "fp8_ms": 1.0},
    }
    assert [(row["kind"], row["count"], row["fp8_ms"]) for row in found["parts"]] == [
        ("attention", 2, 0.75),
        ("convolution", 4, 2.0),
        ("convolution", 1, "4 channels"),
    ]
    times[first] = ("no plan", "no plan")  # type: ignore[assignment]
    with pytest.raises(SCRIPT.OptionError, match="cannot be timed in fp16: no plan"):
        SCRIPT.measured(Counter({first: 1}), milliseconds)


@pytest.mark.parametrize("has_sample", [True, False])
def test_what_is_missing_is_one_line(
    has_sample: bool, pipelines: PipelineCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = pipelines.sample("tiny") if has_sample else tmp_path
    arguments = [str(sample), "--height", "64", "--json", str(tmp_path / "parts.json")]
    with mock.patch.object(sys, "argv", ["eight_bit_parts.py", *arguments]):
        assert SCRIPT.main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert ("nvidia-cudnn-frontend" in lines[0]) == has_sample
    assert ("has no UNet and no transformer" in lines[0]) != has_sample
    assert not (tmp_path / "parts.json").exists()
