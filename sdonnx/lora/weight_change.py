"""Changes that adapters make to weights, computed with numpy in float32.

Layouts are as in torch's state dicts: `(out, in)` for a linear layer, `(out, in, height, width)` for a convolution.

* LoRA: https://arxiv.org/abs/2106.09685
* LoHa (FedPara): https://arxiv.org/abs/2108.06098
* LoKr, and Tucker's form of convolutions: https://arxiv.org/abs/2309.14859
* DoRA: https://arxiv.org/abs/2402.09353
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError

__all__ = [
    "FullDifference",
    "Hadamard",
    "Kronecker",
    "LinearChange",
    "LowRank",
    "NormalizedChange",
    "WeightChange",
    "changed_by_all",
    "core_times_columns",
    "tucker",
]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WeightChange(ABC):
    """What one adapter changes in one weight of one component.

    Attributes:
        source: the file and its keys, for messages.
    """

    source: str

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the method: "LoRA", "LoHa", "LoKr", "DoRA" or "difference"."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of the factors; 0 without factors of low rank."""

    @property
    @abstractmethod
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of the change as the file has it; see `check` for the weights that it fits."""

    @property
    @abstractmethod
    def is_linear(self) -> bool:
        """Whether the change does not depend on the base weight, so that `delta` exists."""

    @abstractmethod
    def delta(self, shape: tuple[int, ...]) -> Float32:
        """Return the weight's new value minus its base at scale 1.

        Args:
            shape: the shape of the weight.

        Raises:
            WeightsError: the change has another shape.
            ValueError: the change is not linear.
        """

    @abstractmethod
    def applied(self, weight: Float32, base: Float32, scale: float) -> Float32:
        """Return a weight that other adapters may have changed before, with this adapter.

        Args:
            weight: the weight so far; it is not changed.
            base: the weight without adapters.
            scale: the weight of the adapter.

        Raises:
            WeightsError: the change has another shape.
        """

    def changed(self, base: Array, scale: float) -> Float32:
        """Return a weight with the adapter.

        Args:
            base: the weight without adapters.
            scale: the weight of the adapter.

        Raises:
            WeightsError: the change has another shape.
        """
        base = base.astype(np.float32, copy=False)
        return self.applied(base, base, scale)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise if the change does not fit a weight; nothing is computed.

        Linear layers and 1x1 convolutions are interchangeable, and changes of convolutions may be flattened to two
        dimensions.

        Args:
            shape: the shape of the weight.

        Raises:
            WeightsError: the change has another shape.
        """
        found = self.shape_of_delta
        is_flat = len(shape) > 2 and found == (shape[0], math.prod(shape[1:]))
        is_pointwise = len(shape) == 2 and found == (*shape, 1, 1)
        if found != shape and not is_flat and not is_pointwise:
            raise WeightsError(
                f"{self.source} changes a weight of shape {found}, and the model's weight has shape {shape}",
                "an adapter for this model",
                "use an adapter for the family and version of the model",
            )


@dataclass(frozen=True, eq=False)
class LinearChange(WeightChange):
    """A change that does not depend on the base weight.

    Attributes:
        factor: number that the product of the factors is multiplied by at scale 1, such as alpha / rank.
    """

    factor: float

    @property
    def is_linear(self) -> bool:
        """True."""
        return True

    @abstractmethod
    def _product(self) -> Float32:
        """Return the change without `factor`, in any shape with the right number of elements."""

    def delta(self, shape: tuple[int, ...]) -> Float32:
        """Return the weight's new value minus its base at scale 1."""
        self.check(shape)
        return (self._product() * np.float32(self.factor)).reshape(shape)

    def applied(self, weight: Float32, base: Float32, scale: float) -> Float32:
        """Return the weight plus the scaled change."""
        return weight + np.float32(scale) * self.delta(base.shape)


def changed_by_all(base: Array, changes: Iterable[tuple[WeightChange, float]]) -> Float32:
    """Return a weight with several adapters, applied in their order.

    The sum of linear changes does not depend on the order, except for rounding. PEFT's DoRA also multiplies the changes
    of earlier adapters, as in diffusers, with a norm that is computed for the base weight.

    Args:
        base: the weight without adapters.
        changes: changes of the weight and the weights of their adapters.

    Raises:
        WeightsError: a change has another shape.
    """
    base = base.astype(np.float32, copy=False)
    weight = base
    for change, scale in changes:
        weight = change.applied(weight, base, scale)
    return weight


def _float32(tensor: Array) -> Float32:
    return tensor.astype(np.float32, copy=False)


def _matrix(tensor: Array) -> Float32:
    """Return a tensor as a matrix, of which the rows are the first dimension."""
    return _float32(tensor).reshape(tensor.shape[0], -1)


def core_times_columns(core: Array, columns: Array) -> Float32:
    """Return the factor (rank_out, in, height, width) that follows the rows in Tucker's form.

    Args:
        core: (rank_out, rank_in, height, width).
        columns: (rank_in, in), or with further dimensions of size 1.
    """
    factor: Float32 = np.einsum("ojhw,jc->ochw", _float32(core), _matrix(columns), optimize=True)
    return factor


def tucker(core: Array, rows: Array, columns: Array) -> Float32:
    """Return a convolution's weight from Tucker's form.

    Args:
        core: (rank_out, rank_in, height, width).
        rows: (out, rank_out).
        columns: (rank_in, in).

    Returns:
        (out, in, height, width).
    """
    middle = np.tensordot(_float32(rows), _float32(core), 1)  # (out, rank_in, height, width)
    weight: Float32 = np.einsum("ojhw,jc->ochw", middle, _float32(columns), optimize=True)
    return weight


@dataclass(frozen=True, eq=False)
class LowRank(LinearChange):
    """LoRA, also of convolutions (LoCon): `factor * up @ down`.

    Attributes:
        down: (rank, in) or (rank, in, height, width).
        up: (out, rank) or (out, rank, 1, 1).
        mid: None, or the core (rank, rank, height, width) of Tucker's form, in which `down` is 1x1.
    """

    down: Array
    up: Array
    mid: Array | None = None

    @property
    def kind(self) -> str:
        """Name of the method."""
        return "LoRA"

    @property
    def rank(self) -> int:
        """Rank of the change."""
        return int(self.down.shape[0])

    @property
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of `up @ down`."""
        window = self.down.shape[2:] if self.mid is None else self.mid.shape[2:]
        return (self.up.shape[0], self.down.shape[1], *window)

    def _product(self) -> Float32:
        if self.mid is None:
            return _matrix(self.up) @ _matrix(self.down)
        return tucker(self.mid, _matrix(self.up), _matrix(self.down))


@dataclass(frozen=True, eq=False)
class Hadamard(LinearChange):
    """LoHa: the elementwise product of two changes of low rank, `factor * (w1_a @ w1_b) * (w2_a @ w2_b)`.

    With cores, w1_a and w2_a are (rank, out); otherwise they are (out, rank). w1_b and w2_b are (rank, in).

    Attributes:
        pairs: (w1_a, w1_b) and (w2_a, w2_b).
        cores: None, or (t1, t2), each (rank, rank, height, width).
    """

    pairs: tuple[tuple[Array, Array], tuple[Array, Array]]
    cores: tuple[Array, Array] | None = None

    @property
    def kind(self) -> str:
        """Name of the method."""
        return "LoHa"

    @property
    def rank(self) -> int:
        """Rank of each of the two products."""
        return int(self.pairs[0][1].shape[0])

    @property
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of each of the two products."""
        rows, columns = self.pairs[0]
        if self.cores is None:
            return (rows.shape[0], columns.shape[1])
        return (rows.shape[1], columns.shape[1], *self.cores[0].shape[2:])

    def _product(self) -> Float32:
        if self.cores is None:
            first, second = (_float32(rows) @ _float32(columns) for rows, columns in self.pairs)
        else:
            first, second = (
                tucker(core, rows.T, columns) for core, (rows, columns) in zip(self.cores, self.pairs, strict=True)
            )
        return first * second


@dataclass(frozen=True, eq=False)
class Kronecker(LinearChange):
    """LoKr: the Kronecker product of two matrices, of which each is whole or a product of low rank.

    Attributes:
        first: w1, or (w1_a, w1_b).
        second: w2, or (w2_a, w2_b), or (w2_a, w2_b, t2) with w2_a of shape (rank, out).
    """

    first: tuple[Array, ...]
    second: tuple[Array, ...]

    @property
    def kind(self) -> str:
        """Name of the method."""
        return "LoKr"

    @property
    def rank(self) -> int:
        """Rank of the factored matrices; 0 if both are whole."""
        return next((int(parts[1].shape[0]) for parts in (self.second, self.first) if len(parts) > 1), 0)

    @property
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of the Kronecker product."""
        first, second = _factored_shape(self.first), _factored_shape(self.second)
        return (first[0] * second[0], first[1] * second[1], *second[2:])

    def _product(self) -> Float32:
        first, second = _multiplied(self.first), _multiplied(self.second)
        return np.kron(first.reshape(*first.shape, *[1] * (second.ndim - 2)), second)


def _factored_shape(parts: tuple[Array, ...]) -> tuple[int, ...]:
    if len(parts) == 1:
        return parts[0].shape
    if len(parts) == 2:
        return (parts[0].shape[0], *parts[1].shape[1:])
    return (parts[0].shape[1], parts[1].shape[1], *parts[2].shape[2:])


def _multiplied(parts: tuple[Array, ...]) -> Float32:
    if len(parts) == 1:
        return _float32(parts[0])
    if len(parts) == 2:
        return _float32(parts[0]) @ _float32(parts[1])
    return tucker(parts[2], parts[0].T, parts[1])


@dataclass(frozen=True, eq=False)
class FullDifference(LinearChange):
    """A difference with the shape of the weight, such as for a bias or a normalization.

    Attributes:
        difference: the difference.
    """

    difference: Array

    @property
    def kind(self) -> str:
        """Name of the method."""
        return "difference"

    @property
    def rank(self) -> int:
        """0: there are no factors."""
        return 0

    @property
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of the difference."""
        return self.difference.shape

    def _product(self) -> Float32:
        return _float32(self.difference)


@dataclass(frozen=True, eq=False)
class NormalizedChange(WeightChange):
    """DoRA: the weight with another change, scaled to a learned length for each output or each input.

    PEFT changes the weight to `magnitude * (base + scale * delta) / norm(base + scale * delta)`. Files of LyCORIS mean
    the same at scale 1; at other scales, the weight changes by that multiple of the difference, as in ComfyUI.

    Attributes:
        inner: the change of the direction.
        magnitude: the lengths.
        by_output: whether there is a length for each output, else for each input.
        is_blended: whether the scale multiplies the whole difference (LyCORIS), else the inner change (PEFT).
    """

    inner: WeightChange
    magnitude: Array
    by_output: bool
    is_blended: bool

    @property
    def kind(self) -> str:
        """Name of the method, and of the change of the direction if that is not LoRA."""
        return "DoRA" if self.inner.kind == "LoRA" else f"DoRA of {self.inner.kind}"

    @property
    def rank(self) -> int:
        """Rank of the change of the direction."""
        return self.inner.rank

    @property
    def shape_of_delta(self) -> tuple[int, ...]:
        """Shape of the change of the direction."""
        return self.inner.shape_of_delta

    @property
    def is_linear(self) -> bool:
        """False."""
        return False

    def delta(self, shape: tuple[int, ...]) -> Float32:
        """Raise ValueError: the difference depends on the base weight."""
        raise ValueError(f"{self.source}: the change by DoRA depends on the base weight")

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise WeightsError if the change or its lengths do not fit a weight."""
        self.inner.check(shape)
        wanted = shape[0] if self.by_output else shape[1]
        if self.magnitude.size != wanted:
            raise WeightsError(
                f"{self.source} has {self.magnitude.size} lengths of DoRA for a weight of shape {shape}",
                f"{wanted}",
                "use an adapter for the family and version of the model",
            )

    def applied(self, weight: Float32, base: Float32, scale: float) -> Float32:
        """Return the weight with its change and its length."""
        self.check(base.shape)
        delta = self.inner.delta(base.shape)
        if self.is_blended:
            turned = base + delta
            return weight + np.float32(scale) * (self._ratios(turned) * turned - base)
        delta *= np.float32(scale)
        return self._ratios(base + delta) * (weight + delta)

    def _ratios(self, turned: Float32) -> Float32:
        """Return what each row or column is multiplied by; 0 for a row or column of zeros, which has no direction."""
        axis = 0 if self.by_output else 1
        others = tuple(each for each in range(turned.ndim) if each != axis)
        norms = np.sqrt(np.square(turned).sum(axis=others, keepdims=True))
        wanted = _float32(self.magnitude).reshape(norms.shape)
        ratios: Float32 = np.divide(wanted, norms, out=np.zeros_like(norms), where=norms > 0)
        return ratios
