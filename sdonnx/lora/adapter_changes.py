"""Make the changes of a module's parameters from the tensors that an adapter file has for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from sdonnx.errors import WeightsError
from sdonnx.lora.adapter_scale import AdapterScale
from sdonnx.lora.weight_change import (
    FullDifference,
    Hadamard,
    Kronecker,
    LinearChange,
    LowRank,
    NormalizedChange,
    WeightChange,
)

__all__ = ["Tensors", "module_changes"]

Array = npt.NDArray[Any]
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
    changes: dict[str, WeightChange] = {}
    if (weight := factory.weight()) is not None:
        changes[f"{module}.weight"] = weight
    if (bias := factory.bias()) is not None:
        changes[f"{module}.bias"] = bias
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
        change = makers.get(methods[0], self._difference)()
        if 0 in change.shape_of_delta:
            raise self._refused(f"changes a weight of shape {change.shape_of_delta}", "a weight with elements")
        return self._normalized(change, lengths[0]) if lengths else change

    def bias(self) -> WeightChange | None:
        """Return the change of the bias, or None if there is none."""
        difference, factor = self._tensors.get("diff_b"), 1.0
        if (of_up := self._tensors.get("up_bias")) is not None:
            if difference is not None or "down" not in self._tensors:
                raise self._refused("has a bias that belongs to no factor", "the bias of lora_B")
            difference, factor = of_up, self._factor(int(self._tensors["down"].shape[0]))
        if difference is None:
            return None
        if difference.ndim != 1 or difference.size == 0:
            raise self._refused(f"changes a bias of shape {difference.shape}", "one dimension")
        return FullDifference(self._source, factor, difference)

    def _lora(self) -> LinearChange:
        self._require(_LORA[:2])
        down, up, mid = self._tensors["down"], self._tensors["up"], self._tensors.get("mid")
        rank = self._rank(down, 0)
        if down.ndim not in (2, 4) or up.ndim not in (2, 4) or up.shape[1:] not in ((rank,), (rank, 1, 1)):
            raise self._mismatch(_LORA)
        if mid is not None and (mid.ndim != 4 or mid.shape[:2] != (rank, rank) or down.shape[2:] not in ((), (1, 1))):
            raise self._mismatch(_LORA)
        return LowRank(self._source, self._factor(rank), down, up, mid)

    def _loha(self) -> LinearChange:
        self._require(_LOHA[:4])
        w1_a, w1_b, w2_a, w2_b = (self._tensors[part] for part in _LOHA[:4])
        if not w1_a.ndim == w1_b.ndim == w2_a.ndim == w2_b.ndim == 2:
            raise self._mismatch(_LOHA)
        rank, cores = self._rank(w1_b, 0), None
        if "hada_t1" in self._tensors or "hada_t2" in self._tensors:
            self._require(_LOHA[4:])
            first, second = cores = self._tensors["hada_t1"], self._tensors["hada_t2"]
            ranks = (w1_a.shape[0], w1_b.shape[0]), (w2_a.shape[0], w2_b.shape[0])
            fit = first.ndim == second.ndim == 4 and (first.shape[:2], second.shape[:2]) == ranks
            fit = fit and first.shape[2:] == second.shape[2:] and w1_a.shape[1] == w2_a.shape[1]
        else:
            fit = w1_a.shape[1] == w1_b.shape[0] and w2_a.shape[1] == w2_b.shape[0] and w1_a.shape[0] == w2_a.shape[0]
        if not fit or w1_b.shape[1] != w2_b.shape[1] or not self._rank(w2_b, 0):
            raise self._mismatch(_LOHA)
        return Hadamard(self._source, self._factor(rank), ((w1_a, w1_b), (w2_a, w2_b)), cores)

    def _lokr(self) -> LinearChange:
        first = self._matrix("lokr_w1")
        second = self._matrix("lokr_w2")
        if "lokr_t2" in self._tensors:
            core = self._tensors["lokr_t2"]
            if len(second) != 2 or core.ndim != 4 or core.shape[:2] != (second[0].shape[0], second[1].shape[0]):
                raise self._mismatch(_LOKR)
            if second[1].ndim != 2:
                raise self._mismatch(_LOKR)
            second = (*second, core)
        elif len(second) == 2 and second[0].shape[1] != second[1].shape[0]:
            raise self._mismatch(_LOKR)
        if len(first) == 2 and first[0].shape[1] != first[1].shape[0]:
            raise self._mismatch(_LOKR)
        ranks = [self._rank(parts[1], 0) for parts in (second, first) if len(parts) > 1]
        # LyCORIS: whole matrices have a scale of 1, and the file's alpha means nothing.
        factor = self._factor(ranks[0] if ranks else 0)
        return Kronecker(self._source, factor, first, second)

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
        factors = tuple(self._tensors[part] for part in parts)
        if any(factor.ndim != 2 for factor in factors):
            raise self._mismatch(_LOKR)
        return factors

    def _difference(self) -> LinearChange:
        return FullDifference(self._source, 1.0, self._tensors["diff"])

    def _normalized(self, change: LinearChange, part: str) -> WeightChange:
        magnitude, (rows, *others) = self._tensors[part], change.shape_of_delta
        if not others or magnitude.size == 0:
            raise self._mismatch((part,))
        is_lycoris = part == "dora_scale"
        # LyCORIS has (out, 1, ...) or, in older versions, (1, in, ...); flattened changes do not show the inputs.
        by_output = not is_lycoris or magnitude.shape[:1] == (rows,)
        if (magnitude.size != rows) if by_output else (others[0] % magnitude.size != 0):
            raise self._mismatch((part,))
        return NormalizedChange(self._source, change, magnitude, by_output, is_blended=is_lycoris)

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
