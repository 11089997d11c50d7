"""Tracing a torch module without its weights, and giving the graph its weights back lazily.

The module is built and traced with fake tensors, which have shapes and no storage. The graph's
initializers keep the names of the module's parameters; each becomes a lazy tensor that reads the
parameter from the weight files when the ONNX file is written.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sdonnx.errors import cause_of
from sdonnx.export.weights import Weights
from sdonnx.families import ComponentSpec
from sdonnx.graph.modules import keep_module_paths
from sdonnx.graph.passes import FoldWeightTransposes
from sdonnx.graph.tensors import lazy

__all__ = ["OPSET", "trace"]

OPSET = 23
_CHATTY = ("torch.onnx._internal.exporter._registration", "torch.utils._sympy.interp")
_PREFIX = "model."  # where the wrappers hold their model

# Example sizes while tracing. Height and width are odd multiples of nothing, so that neither torch
# nor diffusers specializes on even sizes: UNet2DConditionModel then passes the size of each skip
# connection to its upsampler (`forward_upsample_size`), which any latent size needs.
_EXAMPLE_SIZES = {
    "batch_size": 2,
    "steps": 1,
    "sequence_length": 77,
    "height": 37,
    "width": 43,
    "height_latent": 5,
    "width_latent": 7,
    "images": 3,
    "image_tokens": 11,
}
# By where a component comes from. The image encoder takes pixels, in whole latents; the transformer whole patches, an
# odd number of them.
_OTHER_SIZES: Mapping[str, Mapping[str, int]] = {
    "vae": {"height": 40, "width": 56},
    "transformer": {"height": 38, "width": 46},
}


def trace(
    spec: ComponentSpec,
    config: Mapping[str, Any],
    build: Callable[[], torch.nn.Module],
    wrap: Callable[[ComponentSpec, torch.nn.Module], torch.nn.Module],
    weights: Weights,
    dtype: torch.dtype,
) -> ir.Model:
    """Return the component as an ONNX graph of standard operators (opset 23).

    Args:
        spec: the component.
        config: its configuration, for the sizes of its inputs.
        build: makes its torch module; called with fake tensors.
        wrap: puts the module behind the component's signature.
        weights: where the parameters are read from when the graph is written.
        dtype: floating-point type of parameters, inputs and outputs.

    Raises:
        WeightsError: a parameter is missing or has another shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with _quiet(), _default_dtype(dtype), mode, torch.no_grad():
        module = wrap(spec, build())
        names = tuple(_dynamic_axes(tensor.resolve(config)) for tensor in spec.inputs)
        # Captured here: torch.onnx.export would first capture with sizes of which it assumes nothing
        # (`backed_size_oblivious`), which fails for odd latents, and then fall back to a slower way.
        captured = torch.export.export(
            module,
            tuple(_example(spec, config, dtype)),
            dynamic_shapes=(tuple(_all_dynamic(axes) for axes in names),),
            strict=False,
        )
        program = torch.onnx.export(
            captured,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs_in(config)],
            dynamic_shapes=(names,),  # gives the dynamic axes their names
            verbose=False,
        )
    assert program is not None
    model = program.model
    _attach_weights(model, module, weights, lambda: _real_buffers(build), dtype)
    keep_module_paths(model, _PREFIX)
    try:
        FoldWeightTransposes()(model)
        onnxscript.optimizer.optimize(model, onnx_shape_inference=False)
        FoldWeightTransposes()(model)
    except ir.passes.PassError as error:
        raise cause_of(error) from error  # small weights are read here, and one may not fit
    model.graph.name = spec.name
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on its own internals off the user's terminal."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in `dtype`: a fake parameter cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _example(spec: ComponentSpec, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    sizes = {**_EXAMPLE_SIZES, **_OTHER_SIZES.get(spec.source, {})}
    for tensor in spec.inputs:
        shape = [dim if isinstance(dim, int) else _size(dim, sizes) for dim in tensor.resolve(config)]
        if tensor.integer:
            yield torch.zeros(shape, dtype=torch.int32)
        else:
            yield torch.zeros(shape, dtype=torch.float32 if tensor.keeps_float32 else dtype)


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    """Return an example size of an axis; of those that are numbered each has its own."""
    name, _, number = dim.rpartition("_")
    return sizes[name] + int(number) if number.isdecimal() else sizes[dim]


def _dynamic_axes(dims: tuple[str | int, ...]) -> dict[int, str] | None:
    # "steps" is one value for the whole batch: torch specializes a size of one.
    axes = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str) and dim != "steps"}
    return axes or None


def _all_dynamic(axes: dict[int, str] | None) -> dict[int, Any] | None:
    return None if axes is None else dict.fromkeys(axes, torch.export.Dim.DYNAMIC)


def _real_buffers(build: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers that no weight file holds, with their values."""
    with init_empty_weights(include_buffers=False):
        return {_PREFIX + name: buffer for name, buffer in build().named_buffers()}


def _attach_weights(
    model: ir.Model,
    module: torch.nn.Module,
    weights: Weights,
    real_buffers: Callable[[], dict[str, torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    """Replace every fake initializer with one that reads the real values lazily."""
    stored = set(module.state_dict())
    buffers: dict[str, torch.Tensor] | None = None
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        shape = tuple(value.const_value.shape.numpy())
        if name in stored:
            key = weights.find(name.removeprefix(_PREFIX), shape)
            value.const_value = lazy(
                lambda key=key: weights.read(key, numpy_dtype),  # type: ignore[misc]
                ir.DataType.from_numpy(numpy_dtype),
                shape,
                name,
            )
        else:
            buffers = real_buffers() if buffers is None else buffers
            value.const_value = ir.Tensor(np.ascontiguousarray(buffers[name].numpy()), name=name)
