"""Changes that adapters make to weights, computed with numpy in float32.

Layouts are as in torch's state dicts: `(out, in)` for a linear layer, `(out, in, height, width)` for a convolution.

* LoRA: https://arxiv.org/abs/2106.09685
* DoRA: https://arxiv.org/abs/2402.09353
* Tucker's form of convolutions: https://arxiv.org/abs/2309.14859
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError

__all__ = ["LinearChange", "LowRank", "NormalizedChange", "WeightChange", "changed_by_all", "low_rank", "tucker"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WeightChange(ABC):
    """The change that one adapter makes to one weight of one component.

    Attributes:
        source: the file and its keys, for messages.
        kind: name of the method: "LoRA", "LoHa", "LoKr", "DoRA" or "difference".
        rank: rank of the factors; 0 without factors of low rank.
        shape: shape of the change as the file has it; see `check` for the weights that it fits.
    """

    source: str
    kind: str
    rank: int
    shape: tuple[int, ...]

    @abstractmethod
    def applied(self, weight: Float32, base: Float32, scale: float) -> Float32:
        """Return a weight that other adapters may have changed before, with this adapter.

        Args:
            weight: the weight so far; it is not changed.
            base: the weight without adapters.
            scale: the weight of the adapter.
        """

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise if the change does not fit a weight; nothing is computed.

        Linear layers and 1x1 convolutions are interchangeable, and changes of convolutions may be flattened to two
        dimensions.

        Args:
            shape: the shape of the weight.

        Raises:
            WeightsError: the change has another shape.
        """
        is_flat = len(shape) > 2 and self.shape == (shape[0], math.prod(shape[1:]))
        is_pointwise = len(shape) == 2 and self.shape == (*shape, 1, 1)
        if self.shape != shape and not is_flat and not is_pointwise:
            raise WeightsError(
                f"{self.source} changes a weight of shape {self.shape}, and the model's weight has shape {shape}",
                "an adapter for this model",
                "use an adapter for the family and version of the model",
            )


@dataclass(frozen=True, eq=False)
class LinearChange(WeightChange):
    """A change that does not depend on the base weight.

    Attributes:
        factor: number that the product is multiplied by at scale 1, such as alpha / rank.
        product: returns the change without `factor`, in any shape with the right number of elements.
    """

    factor: float
    product: Callable[[], Float32]

    def delta(self, shape: tuple[int, ...]) -> Float32:
        """Return the new value of a weight of this shape minus its base at scale 1.

        Raises:
            WeightsError: the change has another shape.
        """
        self.check(shape)
        return (self.product() * np.float32(self.factor)).reshape(shape)

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


def tucker(core: Array, rows: Array, columns: Array) -> Float32:
    """Return a convolution's weight (out, in, height, width) from Tucker's form.

    Args:
        core: (rank_out, rank_in, height, width).
        rows: (out, rank_out).
        columns: (rank_in, in).
    """
    middle = np.tensordot(rows.astype(np.float32), core.astype(np.float32), 1)  # (out, rank_in, height, width)
    weight: Float32 = np.einsum("ojhw,jc->ochw", middle, columns.astype(np.float32), optimize=True)
    return weight


@dataclass(frozen=True, eq=False)
class LowRank(LinearChange):
    """LoRA, also of convolutions (LoCon): `factor * up @ down`; made by `low_rank`.

    Attributes:
        down: (rank, in) or (rank, in, height, width).
        up: (out, rank).
        mid: None, or the core (rank, rank, height, width) of Tucker's form, in which `down` is 1x1.
    """

    down: Array
    up: Array
    mid: Array | None

    def whole_down(self) -> Array:
        """Return the factor (rank, in) or (rank, in, height, width): `down`, with the core in Tucker's form."""
        if self.mid is None:
            return self.down
        return tucker(self.mid, np.eye(len(self.mid), dtype=np.float32), self.down.reshape(len(self.down), -1))

    def factors(self, shape: tuple[int, ...], *, channels_last: bool) -> tuple[Array, Array]:
        """Return the factors (out, rank) and (rank, inputs) at scale 1, without `factor`.

        Args:
            shape: the shape of the weight.
            channels_last: whether the inputs of a convolution have the order (height, width, in).
        """
        down = self.whole_down().reshape(-1, *shape[1:])
        if channels_last and len(shape) == 4:
            down = down.transpose(0, 2, 3, 1)
        return self.up, down.reshape(len(down), -1)


def low_rank(source: str, factor: float, down: Array, up: Array, mid: Array | None = None) -> LowRank:
    """Return a change by LoRA; `up` may also be (out, rank, 1, 1). See `LowRank` and `LinearChange`."""
    up = up.reshape(len(up), -1)
    shape = (len(up), down.shape[1], *(down if mid is None else mid).shape[2:])

    def product() -> Float32:
        if mid is not None:
            return tucker(mid, up, down.reshape(len(down), -1))
        found: Float32 = up.astype(np.float32) @ down.reshape(len(down), -1).astype(np.float32)
        return found

    return LowRank(source, "LoRA", len(down), shape, factor, product, down, up, mid)


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

    inner: LinearChange
    magnitude: Array
    by_output: bool
    is_blended: bool

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise WeightsError if the change or its lengths do not fit a weight."""
        super().check(shape)
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
        """Return the factor of each row or column; 0 for a row or column of zeros, which has no direction."""
        axis = 0 if self.by_output else 1
        others = tuple(each for each in range(turned.ndim) if each != axis)
        norms = np.sqrt(np.square(turned).sum(axis=others, keepdims=True))
        wanted = self.magnitude.astype(np.float32).reshape(norms.shape)
        ratios: Float32 = np.divide(wanted, norms, out=np.zeros_like(norms), where=norms > 0)
        return ratios
