"""Make the changes of a module's parameters from the tensors that an adapter file has for it.

* LoHa (FedPara): https://arxiv.org/abs/2108.06098
* LoKr: https://arxiv.org/abs/2309.14859
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_scale import AdapterScale
from sdonnx.lora.weight_change import LinearChange, NormalizedChange, WeightChange, low_rank, tucker

__all__ = ["Tensors", "module_changes"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Tensors = dict[str, Array]

_MAX_RANK = 1 << 14  # above every width of these models; the factors of a larger rank are larger than the weight

_LORA = ("down", "up", "mid")
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
_METHODS = (_LORA, _LOHA, _LOKR, ("diff",))
_LENGTHS = ("lora_magnitude_vector", "dora_scale")


def module_changes(source: str, module: str, tensors: Tensors, scale: AdapterScale) -> dict[str, WeightChange]:
    """Return the changes of a module's weight and bias, by their names in the state dict.

    Args:
        source: the file and the module, for messages.
        module: the module's name with dots.
        tensors: the tensors by part, see `AdapterKey`.
        scale: scale of a change without the tensor "alpha".

    Raises:
        WeightsError: tensors are missing, do not fit together, or belong to different methods.
    """
    factory = _Factory(source, module, tensors, scale)
    named = {f"{module}.weight": factory.weight(), f"{module}.bias": factory.bias()}
    changes = {name: change for name, change in named.items() if change is not None}
    if not changes:
        raise WeightsError(f"{source} has only {', '.join(tensors)}", "the factors of a change")
    return changes


class _Factory:
    """Makes the changes of one module; see `module_changes`."""

    def __init__(self, source: str, module: str, tensors: Tensors, scale: AdapterScale) -> None:
        self._source, self._module, self._tensors, self._scale = source, module, tensors, scale

    def weight(self) -> WeightChange | None:
        """Return the change of the weight, or None if there is none."""
        methods = [method for method in _METHODS if self._tensors.keys() & set(method)]
        lengths = [part for part in _LENGTHS if part in self._tensors]
        if not methods and not lengths:
            return None
        if len(methods) != 1 or len(lengths) > 1:
            raise self._refused("has tensors of no method or of several ones", "LoRA, LoHa or LoKr")
        makers = {_LORA: self._lora, _LOHA: self._loha, _LOKR: self._lokr}
        change = makers[methods[0]]() if methods[0] in makers else self._difference(1.0, self._tensors["diff"])
        if 0 in change.shape:
            raise self._refused(f"changes a weight of shape {change.shape}", "a weight with elements")
        return self._normalized(change, lengths[0]) if lengths else change

    def bias(self) -> WeightChange | None:
        """Return the change of the bias, or None if there is none."""
        difference, factor = self._tensors.get("diff_b"), 1.0
        if (of_up := self._tensors.get("up_bias")) is not None:
            if difference is not None or "down" not in self._tensors:
                raise self._refused("has a bias that belongs to no factor", "the bias of lora_B")
            difference, factor = of_up, self._factor(len(self._tensors["down"]))
        if difference is None:
            return None
        if difference.ndim != 1 or difference.size == 0:
            raise self._refused(f"changes a bias of shape {difference.shape}", "one dimension")
        return self._difference(factor, difference)

    def _difference(self, factor: float, values: Array) -> LinearChange:
        return LinearChange(self._source, "difference", 0, values.shape, factor, partial(values.astype, np.float32))

    def _lora(self) -> LinearChange:
        self._require(_LORA[:2])
        down, up, mid = self._tensors["down"], self._tensors["up"], self._tensors.get("mid")
        rank = self._rank(down, 0)
        if down.ndim not in (2, 4) or up.ndim not in (2, 4) or up.shape[1:] not in ((rank,), (rank, 1, 1)):
            raise self._mismatch(_LORA)
        if mid is not None and (mid.ndim != 4 or mid.shape[:2] != (rank, rank) or down.shape[2:] not in ((), (1, 1))):
            raise self._mismatch(_LORA)
        return low_rank(self._source, self._factor(rank), down, up, mid)

    def _loha(self) -> LinearChange:
        """Return the elementwise product of two changes of low rank, `(w1_a @ w1_b) * (w2_a @ w2_b)`.

        With cores t1 and t2 (rank, rank, height, width), w1_a and w2_a are (rank, out), otherwise (out, rank). w1_b and
        w2_b are (rank, in).
        """
        self._require(_LOHA[:4])
        w1_a, w1_b, w2_a, w2_b = (self._tensors[part] for part in _LOHA[:4])
        if not w1_a.ndim == w1_b.ndim == w2_a.ndim == w2_b.ndim == 2:
            raise self._mismatch(_LOHA)
        rank = self._rank(w1_b, 0)
        first: tuple[Array, ...] = (w1_a, w1_b)
        second: tuple[Array, ...] = (w2_a, w2_b)
        if "hada_t1" in self._tensors or "hada_t2" in self._tensors:
            self._require(_LOHA[4:])
            t1, t2 = (self._tensors[part] for part in _LOHA[4:])
            first, second = (*first, t1), (*second, t2)
        if not (_fit(first) and _fit(second)) or _shape(first) != _shape(second) or not self._rank(w2_b, 0):
            raise self._mismatch(_LOHA)
        product = partial(_product, np.multiply, first, second)
        return LinearChange(self._source, "LoHa", rank, _shape(first), self._factor(rank), product)

    def _lokr(self) -> LinearChange:
        """Return the Kronecker product of two matrices, of which each is whole or a product of low rank.

        They are w1, or w1_a @ w1_b; and w2, or w2_a @ w2_b, or Tucker's form with the core t2 and w2_a (rank, out).
        """
        first, second = self._matrix("lokr_w1"), self._matrix("lokr_w2")
        if "lokr_t2" in self._tensors:
            second = (*second, self._tensors["lokr_t2"])
        if not _fit(first) or not _fit(second):
            raise self._mismatch(_LOKR)
        ranks = [self._rank(parts[1], 0) for parts in (second, first) if len(parts) > 1]
        # LyCORIS: whole matrices have a scale of 1, and the file's alpha means nothing.
        rank = ranks[0] if ranks else 0
        (rows, columns, *_), (inner_rows, inner_columns, *window) = _shape(first), _shape(second)
        shape = (rows * inner_rows, columns * inner_columns, *window)
        product = partial(_product, _kronecker, first, second)
        return LinearChange(self._source, "LoKr", rank, shape, self._factor(rank), product)

    def _matrix(self, name: str) -> tuple[Array, ...]:
        """Return a whole matrix of LoKr, or its two factors."""
        parts = (f"{name}_a", f"{name}_b")
        if name in self._tensors:
            if self._tensors.keys() & {*parts, *(["lokr_t2"] if name == "lokr_w2" else [])}:
                raise self._mismatch(_LOKR)
            whole = self._tensors[name]
            if whole.ndim != 2 and not (name == "lokr_w2" and whole.ndim == 4):
                raise self._mismatch(_LOKR)
            return (whole,)
        self._require(parts)
        return tuple(self._tensors[part] for part in parts)

    def _normalized(self, change: LinearChange, part: str) -> WeightChange:
        magnitude, (rows, *others) = self._tensors[part], change.shape
        if not others or magnitude.size == 0:
            raise self._mismatch((part,))
        is_lycoris = part == "dora_scale"
        # LyCORIS has (out, 1, ...) or, in older versions, (1, in, ...); flattened changes do not show the inputs.
        by_output = not is_lycoris or magnitude.shape[:1] == (rows,)
        if (magnitude.size != rows) if by_output else (others[0] % magnitude.size != 0):
            raise self._mismatch((part,))
        kind = "DoRA" if change.kind == "LoRA" else f"DoRA of {change.kind}"
        return NormalizedChange(
            self._source, kind, change.rank, change.shape, change, magnitude, by_output, is_blended=is_lycoris
        )

    def _factor(self, rank: int) -> float:
        """Return the factor of a change, from the tensor "alpha" or the configuration."""
        alpha = self._tensors.get("alpha")
        if alpha is None:
            return self._scale.factor(self._module, rank)
        if alpha.size != 1:
            raise self._refused(f"has an alpha of shape {alpha.shape}", "one number")
        return float(alpha.reshape(())[()]) / rank if rank else 1.0

    def _rank(self, tensor: Array, axis: int) -> int:
        rank = int(tensor.shape[axis]) if tensor.ndim > axis else 0
        if not 0 < rank <= _MAX_RANK:
            raise self._refused(f"has rank {rank}", f"1 to {_MAX_RANK}")
        return rank

    def _require(self, parts: tuple[str, ...]) -> None:
        if missing := [part for part in parts if part not in self._tensors]:
            raise self._refused(f"lacks {', '.join(missing)}", ", ".join(parts))

    def _mismatch(self, parts: tuple[str, ...]) -> WeightsError:
        shapes = {part: self._tensors[part].shape for part in parts if part in self._tensors}
        shown = ", ".join(f"{part} {shape}" for part, shape in shapes.items())
        return self._refused(f"has shapes that do not fit together ({shown})", "the shapes of one change")

    def _refused(self, problem: str, expected: str) -> WeightsError:
        return WeightsError(f"{self._source} {problem}", expected, "download the file again, or use another adapter")


# Matrices of LoHa and LoKr: whole; or two factors (out, rank) and (rank, in); or Tucker's form (rank, out), (rank, in)
# and a core.


def _fit(parts: tuple[Array, ...]) -> bool:
    """Return whether the factors of a matrix fit together."""
    if len(parts) == 1:
        return True
    rows, columns, *core = parts
    if rows.ndim != 2 or columns.ndim != 2:
        return False
    if core:
        return core[0].ndim == 4 and core[0].shape[:2] == (len(rows), len(columns))
    return bool(rows.shape[1] == len(columns))


def _shape(parts: tuple[Array, ...]) -> tuple[int, ...]:
    if len(parts) == 1:
        return parts[0].shape
    rows, columns, *core = parts
    return (rows.shape[1 if core else 0], columns.shape[1], *(core[0].shape[2:] if core else ()))


def _whole(parts: tuple[Array, ...]) -> Float32:
    if len(parts) == 3:
        return tucker(parts[2], parts[0].T, parts[1])
    first, *others = (part.astype(np.float32) for part in parts)
    return first @ others[0] if others else first


def _product(multiply: Any, first: tuple[Array, ...], second: tuple[Array, ...]) -> Float32:
    product: Float32 = multiply(_whole(first), _whole(second))
    return product


def _kronecker(first: Float32, second: Float32) -> Float32:
    return np.kron(first.reshape(*first.shape, *[1] * (second.ndim - 2)), second)
