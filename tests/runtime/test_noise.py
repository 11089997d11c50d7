"""Seeded noise, compared with torch's CPU generator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdonnx.errors import OptionError
from sdonnx.runtime.sampling.noise import TorchCpuGenerator, fresh_seed

TOLERANCE = 1e-6

SEEDS = (0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**63 - 1, 2**63, 2**64 - 1, -1, -7, -(2**31), -(2**63))


def assert_same_draws(seed: int, shapes: list[tuple[int, ...]]) -> None:
    theirs = torch.Generator("cpu").manual_seed(seed)
    ours = TorchCpuGenerator(seed)
    for shape in shapes:
        expected = torch.randn(shape, generator=theirs).numpy()
        found = ours.randn(shape)
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds(seed: int) -> None:
    assert_same_draws(seed, [(1, 4, 8, 8), (5,), (1, 4, 5, 5)])


@pytest.mark.parametrize("size", range(40))
def test_sizes_around_the_block(size: int) -> None:
    assert_same_draws(3, [(size,), (size,), (64,), (size,)])


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (16, 4, 96, 96), (1, 4, 65, 63), (4, 1, 128, 131)])
def test_latents(shape: tuple[int, ...]) -> None:
    assert_same_draws(1234, [shape, shape])


def test_second_value_of_a_pair_is_kept_for_the_next_call() -> None:
    # torch keeps the second value of a pair across a large sample in between.
    assert_same_draws(9, [(3,), (100,), (1,), (), (32,), (15,), (2, 0, 4), (7,)])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    shapes=st.lists(st.lists(st.integers(0, 23), max_size=3).map(tuple), min_size=1, max_size=5),
)
def test_any_seed_and_shapes(seed: int, shapes: list[tuple[int, ...]]) -> None:
    assert_same_draws(seed, shapes)


def test_numpy_integers_are_seeds() -> None:
    np.testing.assert_array_equal(TorchCpuGenerator(np.int64(-3)).randn((20,)), TorchCpuGenerator(-3).randn((20,)))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.0, "1", None, True, math.nan])
def test_rejected_seeds(seed: Any) -> None:
    with pytest.raises(OptionError, match="the seed is"):
        TorchCpuGenerator(seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_range_of_seeds_is_that_of_torch(seed: int) -> None:
    with pytest.raises((RuntimeError, OverflowError, ValueError)):
        torch.Generator("cpu").manual_seed(seed)


def test_negative_sizes() -> None:
    with pytest.raises(OptionError, match="sizes from 0 on"):
        TorchCpuGenerator(0).randn((4, -1))


def test_random_seeds_differ_and_are_valid() -> None:
    seeds = {fresh_seed() for _ in range(16)}
    # 16 of 2**32 are all different except once in 36 million runs; fewer than 12 never happen.
    assert len(seeds) >= 12
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert TorchCpuGenerator(seeds.pop()).randn((4,)).shape == (4,)
