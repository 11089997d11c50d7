"""Trace a torch module without its weights, and attach the weights to the graph lazily.

The module is built and traced with fake tensors, which have shapes but no storage. The graph's initializers keep the
names of the module's parameters. Each becomes a lazy tensor that reads the parameter from the weight files when the
ONNX file is written.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sdonnx.export.decomposition import FLOOR_DIVISION, TRANSLATIONS, divides_negatives, skip_decomposition
from sdonnx.export.module_construction import module_buffers
from sdonnx.export.repeated_blocks import repeat_blocks, shortened
from sdonnx.export.simplify import WRAPPED, simplify
from sdonnx.export.stored_tensors import Weights
from sdonnx.export.wrappers import Wrapper
from sdonnx.graph.edit import required, tensor_of
from sdonnx.graph.tensors import Origin, lazy
from sdonnx.models.spec import ComponentSpec

__all__ = ["OPSET", "quiet_exporter", "trace"]

OPSET = 23
_CHATTY = (
    "torch.onnx._internal.exporter._registration",
    "torch.utils._sympy.interp",
    "torch._export.non_strict_utils",
    "torch.fx.experimental.symbolic_shapes",
)

# Example sizes while tracing. Height and width are odd, so that neither torch nor diffusers specializes on even sizes:
# UNet2DConditionModel then passes the size of each skip connection to its upsampler (`forward_upsample_size`), which
# latents of arbitrary size need.
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


def trace(
    spec: ComponentSpec,
    config: Mapping[str, Any],
    build: Callable[[], torch.nn.Module],
    wrapper: type[Wrapper],
    weights: Weights,
    dtype: torch.dtype,
    buffers: Callable[[], dict[str, torch.Tensor]] | None = None,
    type_of: Callable[[str], np.dtype[Any] | None] = lambda key: None,
) -> ir.Model:
    """Return the component as an ONNX graph of standard operators (opset 23).

    Args:
        spec: The component.
        config: Its configuration, which defines the sizes of its inputs.
        build: Returns its torch module; called with fake tensors.
        wrapper: Class that gives the module the component's signature.
        weights: Source of the parameters when the graph is written.
        dtype: Floating-point type of parameters, inputs and outputs.
        buffers: Returns the module's buffers with their values. By default, the buffers of another module from `build`.
        type_of: Returns the type in which a parameter is stored, by its key, if that is narrower than `dtype` and the
            graph may be converted to it; otherwise None.

    Raises:
        WeightsError: A parameter is missing or has another shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with quiet_exporter(), _default_dtype(dtype), mode, torch.no_grad():
        module = wrapper(build(), [tensor.name for tensor in spec.inputs]).eval()
        names = tuple(_dynamic_axes(tensor.resolve(config)) for tensor in spec.inputs)
        with shortened(module) as repeated:
            model = _exported(module, names, spec, config, dtype)
        if not repeat_blocks(model, repeated):
            model = _exported(module, names, spec, config, dtype)
    _attach_weights(model, module, weights, buffers or (lambda: module_buffers(build)), dtype, type_of)
    simplify(model)
    model.graph.name = spec.name
    return model


def _exported(
    module: Wrapper,
    axes: Sequence[dict[int, str] | None],
    spec: ComponentSpec,
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> ir.Model:
    """Return the graph of a module of fake tensors, as torch writes it. `axes` has the dynamic axes of each input."""
    # Captured here, because torch.onnx.export first captures without assumptions on sizes (`backed_size_oblivious`),
    # which fails for odd latents, and then falls back to a slower path.
    captured = torch.export.export(
        module,
        tuple(_examples(spec, config, dtype, {**_EXAMPLE_SIZES, **module.example_sizes})),
        dynamic_shapes=(tuple(_all_dynamic(each) for each in axes),),
        strict=False,
    )
    division = FLOOR_DIVISION if divides_negatives(captured) else {}
    program = torch.onnx.export(
        captured,
        custom_translation_table=division | (TRANSLATIONS if skip_decomposition(captured) else {}),
        dynamo=True,
        opset_version=OPSET,
        optimize=False,
        input_names=[tensor.name for tensor in spec.inputs],
        output_names=[tensor.name for tensor in spec.outputs_in(config)],
        dynamic_shapes=(tuple(axes),),  # names of the dynamic axes
        verbose=False,
    )
    return required(program, "exported program").model


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's messages about its internals."""
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
    """Create modules in `dtype`, because a fake parameter cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _examples(
    spec: ComponentSpec, config: Mapping[str, Any], dtype: torch.dtype, sizes: Mapping[str, int]
) -> Iterator[torch.Tensor]:
    for tensor in spec.inputs:
        shape = [dim if isinstance(dim, int) else _size(dim, sizes) for dim in tensor.resolve(config)]
        if tensor.integer:
            yield torch.zeros(shape, dtype=torch.int32)
        else:
            yield torch.zeros(shape, dtype=torch.float32 if tensor.keeps_float32 else dtype)


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    """Return an example size of an axis; numbered axes get different sizes."""
    name, _, number = dim.rpartition("_")
    return sizes[name] + int(number) if number.isdecimal() else sizes[dim]


def _dynamic_axes(dims: tuple[str | int, ...]) -> dict[int, str] | None:
    # "steps" is one value for the whole batch; torch specializes a size of one.
    axes = {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str) and dim != "steps"}
    return axes or None


def _all_dynamic(axes: dict[int, str] | None) -> dict[int, Any] | None:
    return None if axes is None else dict.fromkeys(axes, torch.export.Dim.DYNAMIC)


def _attach_weights(
    model: ir.Model,
    module: torch.nn.Module,
    weights: Weights,
    real_buffers: Callable[[], dict[str, torch.Tensor]],
    dtype: torch.dtype,
    type_of: Callable[[str], np.dtype[Any] | None],
) -> None:
    """Replace every fake initializer by one that reads the real values lazily."""
    stored = set(module.state_dict())
    buffers: dict[str, torch.Tensor] | None = None
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    for name, value in model.graph.initializers.items():
        shape = tuple(tensor_of(value).shape.numpy())
        if name in stored:
            key = weights.find(name.removeprefix(WRAPPED), shape)
            stored_type = type_of(key)
            value.const_value = lazy(
                partial(weights.read, key, numpy_dtype),
                ir.DataType.from_numpy(numpy_dtype),
                shape,
                name,
                None if stored_type is None else Origin(stored_type, partial(weights.read, key, stored_type)),
            )
        else:
            buffers = real_buffers() if buffers is None else buffers
            buffer = buffers[name.removeprefix(WRAPPED)]
            value.const_value = ir.Tensor(np.ascontiguousarray(buffer.numpy()), name=name)
