"""Compose the served graphs of a component, and list the weights that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from sdonnx.compose.absorption import absorb_projections
from sdonnx.compose.control_network import add_residuals, compose_adapt, compose_control
from sdonnx.compose.encoders import (
    compose_image_prompt_encoder,
    compose_image_prompt_projection,
    compose_safety_check,
    compose_second_text,
    compose_text,
)
from sdonnx.compose.precompute import hoist_step_invariants
from sdonnx.compose.step import compose_step
from sdonnx.compose.vae import compose_decode, compose_encode
from sdonnx.models import abi
from sdonnx.models.control_networks import Residual
from sdonnx.models.spec import Role

__all__ = ["ControlPlan", "compose_component", "shared_weights"]

_COMPOSE: Mapping[Role, Callable[[ir.Model, Mapping[str, Any]], None]] = {
    Role.TEXT_ENCODER: compose_text,
    Role.TEXT_ENCODER_2: compose_second_text,
    Role.IMAGE_ENCODER: compose_encode,
    Role.IMAGE_DECODER: compose_decode,
    Role.SAFETY_CHECKER: compose_safety_check,
    Role.IMAGE_PROMPT_ENCODER: compose_image_prompt_encoder,
    Role.IMAGE_PROMPT_ADAPTER: compose_image_prompt_projection,
    Role.T2I_ADAPTER: compose_adapt,
}


# Names of types in safetensors' headers.
# numpy has no type for 8-bit floating-point numbers.
_DTYPES = {ir.DataType.FLOAT16: "F16", ir.DataType.FLOAT: "F32", ir.DataType.INT8: "I8"}

# Smaller weights are not worth an allocation of their own, and the host may read them.
_MIN_BYTES = 1 << 16

# Also convolutions with channels last: no optimizer of ONNX Runtime changes their weights.
_MATMULS = {"MatMul", "Gemm", "NhwcConv"}
# Operators between a stored weight and a matmul: a gate, and the restoring of a weight in 8 bits.
_BEFORE = {"Mul", "DequantizeLinear"}


@dataclass(frozen=True)
class ControlPlan:
    """How ControlNets or T2I-Adapters change the graphs of a component.

    Attributes:
        residuals: the residuals of the pipeline's UNet.
        to_blocks: whether they belong to blocks, as T2I-Adapter's do.
        adds: for a ControlNet, whether it may run after another one.
        latent_size: for a ControlNet, the size of the latents that the UNet generates by default; None if unknown.
    """

    residuals: tuple[Residual, ...] = ()
    to_blocks: bool = False
    adds: bool = False
    latent_size: int | None = None


_PER_STEP_INPUTS = {"sample", "timestep"}


def compose_component(
    role: Role, model: ir.Model, config: Mapping[str, Any], controls: ControlPlan | None = None
) -> dict[str, ir.Model]:
    """Return the served graphs of an optimized component, by file name; `model` is changed in place.

    Args:
        role: the component's role.
        model: its optimized graph.
        config: its configuration.
        controls: for a denoiser, the residuals that it reads, or None; for a ControlNet, its place.

    Raises:
        FolderError: the denoiser has other skip connections than its configuration says.
    """
    if role is Role.CONTROLNET:
        return compose_control(model, config, adds=controls is not None and controls.adds)
    if role is not Role.DENOISER:
        _COMPOSE[role](model, config)
        return {abi.GRAPHS[role].file: model}
    conditioning = [str(value.name) for value in model.graph.inputs if value.name not in _PER_STEP_INPUTS]
    short, controlled = model.clone(), None if controls is None else model.clone()
    graphs = _compose_denoiser(model, conditioning, config, abi.STEP.file, abi.PRECOMPUTE.file)
    if absorb_projections(short, conditioning):
        files = abi.STEP.short_file or "", abi.PRECOMPUTE.short_file or ""
        graphs |= _compose_denoiser(short, conditioning, config, *files)
    if controlled is not None and controls is not None:
        graphs[abi.CONTROLLED_STEP.file] = _compose_controlled(controlled, conditioning, config, controls, model)
    return graphs


def _compose_denoiser(
    model: ir.Model, conditioning: list[str], config: Mapping[str, Any], step_file: str, precompute_file: str
) -> dict[str, ir.Model]:
    compose_step(model, config)
    precompute = hoist_step_invariants(model, conditioning)
    return {step_file: model} | ({} if precompute is None else {precompute_file: precompute})


def _compose_controlled(
    model: ir.Model, conditioning: list[str], config: Mapping[str, Any], controls: ControlPlan, step: ir.Model
) -> ir.Model:
    """Return the step graph with residuals. It reads the same precomputed values as the step graph."""
    add_residuals(model, controls.residuals, to_blocks=controls.to_blocks)
    compose_step(model, config)
    hoist_step_invariants(model, conditioning)
    model.graph.name = abi.CONTROLLED_STEP.name
    precomputed = [{str(value.name) for value in graph.inputs if abi.PRECOMPUTE.outputs[0].matches(str(value.name))}
                   for graph in (model.graph, step.graph)]  # fmt: skip
    if not precomputed[0] <= precomputed[1]:
        raise ValueError(f"residuals change what is precomputed: {sorted(precomputed[0] - precomputed[1])}")
    return model


def shared_weights(models: Iterable[ir.Model]) -> dict[str, dict[str, Any]]:
    """Return the external weights of matmuls and convolutions that two or more graphs share.

    A session accepts shared weights by name, instead of its own copies. ONNX Runtime moves transpositions through
    element-wise operators into their constants, which keep their names; weights of matmuls stay unchanged.

    Args:
        models: the graphs of one component, which read one weight file.

    Returns:
        As a safetensors header, by name `dtype`, `shape` and `data_offsets`, [begin, end) in bytes of the weight file.
    """
    found: defaultdict[str, list[dict[str, Any] | None]] = defaultdict(list)
    for model in models:
        for name, value in model.graph.initializers.items():
            found[name].append(_entry(value) if _is_weight_of_matmuls(value) else None)
        for graph in model.graph.subgraphs():
            for name in graph.initializers:
                found[name].append(None)
    return {
        name: entries[0]
        for name, entries in found.items()
        if len(entries) > 1 and entries[0] is not None and all(entry == entries[0] for entry in entries)
    }


def _is_weight_of_matmuls(value: ir.Value) -> bool:
    """Return whether every user is a matmul that reads it as its second factor, directly or behind `_BEFORE`."""
    if value.is_graph_output():
        return False
    return all(
        use.idx == 1
        if use.node.op_type in _MATMULS
        else use.node.op_type in _BEFORE and _is_weight_of_matmuls(use.node.outputs[0])
        for use in value.uses()
    )


def _entry(value: ir.Value) -> dict[str, Any] | None:
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in _DTYPES or tensor.nbytes < _MIN_BYTES:
        return None
    begin = tensor.offset or 0
    shape = [int(size) for size in tensor.shape.numpy()]
    return {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, begin + tensor.nbytes]}
