"""The shortest time of a denoiser call: its counts against torch's counter, its times against sums by hand."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from denoiser_limits import OperatorWork, Peak, limits_ms
from denoiser_times import _Case
from support.pipeline_cache import PipelineCache
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "pixart-tiny"])
def test_operations_equal_torchs(arch: str, pipelines: PipelineCache) -> None:
    options = Namespace(pipeline=pipelines.micro(arch), batch_size=1, height=64, width=48, tokens=9)
    case = _Case(options, "cpu")
    model, run = case.model(torch.float16), case.run
    with torch.inference_mode(), OperatorWork() as counted:
        run(model)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(model)
    assert sum(flops for _, flops, *_ in counted.work) == counter.get_total_flops()
    limits = case.limits_ms("NVIDIA H200")
    kinds = {"convolution", "matrix product", "attention", "normalization"}
    assert set(limits) == kinds | ({"element-wise"} if arch != "pixart-tiny" else set())
    assert case.limits_ms("another GPU") == {}


def _on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.float16)


@pytest.mark.parametrize(
    ("peak", "milliseconds"),
    [
        (Peak(1e6, 1e12, 1e12), {"matrix product": 2 * 6 * 8 * 16 / 1e3, "attention": 2 * 2 * 5 * 7 * (4 + 4) / 1e3}),
        (Peak(1e12, 1e6, 1e12), {"matrix product": 2 * (48 + 128 + 96) / 1e3, "attention": 2 * (80 + 112) / 1e3}),
        (Peak(1e12, 1e12, 1e6), {"matrix product": 0.0, "attention": 2 * 5 * 7 / 1e3}),
    ],
)
def test_slowest_rate_counts(peak: Peak, milliseconds: dict[str, float]) -> None:
    def call() -> None:
        functional.linear(_on_meta(6, 8), _on_meta(16, 8))
        functional.scaled_dot_product_attention(_on_meta(2, 5, 4), _on_meta(2, 7, 4), value=_on_meta(2, 7, 4))

    assert limits_ms(call, peak) == pytest.approx(milliseconds, abs=1e-4)


def test_norms_and_geglu_move_bytes() -> None:
    def call() -> None:
        functional.layer_norm(_on_meta(1000, 8), (8,))
        functional.group_norm(_on_meta(1, 8, 1000), 4)
        functional.gelu(_on_meta(1000, 8))
        functional.gelu(_on_meta(1000, 8), approximate="tanh")  # part of a product

    peak = Peak(1e15, 1e6, 1e15)
    assert limits_ms(call, peak) == {"normalization": 2 * 2 * 2 * 8000 / 1e3, "element-wise": 2 * 3 * 8000 / 1e3}
