"""Turn a torch module in memory into a loaded ONNX Runtime graph.

The module is traced as a copy of fake tensors, which have shapes but no storage. Its weights are passed to ONNX Runtime
in memory. On the CPU, one that the graph uses as it is shares the memory of the module's parameter, and is never
written to disk (docs/decisions/0168-compile-modules-in-memory.md). The weights of a module on a GPU are copied to the
host. The graph of a denoiser is quantized where the options name a type, or where `O3` chooses fp8
(docs/decisions/0184-quantize-compiled-denoisers.md).
"""

from __future__ import annotations

import copy
import functools
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from sdonnx.compiler.compile_options import DENOISERS, CompileOptions, named_quantization
from sdonnx.compiler.graph_method import GraphSignature
from sdonnx.compiler.graph_target import REMEDY, GraphTarget, for_types
from sdonnx.compiler.saved_graph import float_tensors, loaded_graph, stored_place
from sdonnx.errors import refusing
from sdonnx.export.trace import trace
from sdonnx.folder.pipeline_folder import ONNX_MODEL, ONNX_WEIGHTS
from sdonnx.fusions.fusion_table import StageOutcome, fuse
from sdonnx.fusions.sdonnx_domain.use_kernels import KERNEL_STAGE, default_sizes, use_kernels
from sdonnx.graph.passes import tidy
from sdonnx.graph.tensors import cast, lazy
from sdonnx.models.spec import Role
from sdonnx.optimize.component_passes import GRAPH_PASSES, ComponentJob, apply_passes
from sdonnx.optimize.exported_pipeline import OpenedComponent
from sdonnx.optimize.optimize_request import OptimizeRequest
from sdonnx.precision.policy import Precision
from sdonnx.quantization.quantization_config import FP8_CAPABILITY, require_fp8_matmuls
from sdonnx.quantization.quantize_weights import QuantizedWeight, restore_late
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.session import Graph

if TYPE_CHECKING:
    from sdonnx.quantization.quantization_config import QuantizationConfig, QuantizationPolicy

__all__ = [
    "EXPORTED",
    "GraphQuantization",
    "build_model",
    "denoiser_policy",
    "first_line",
    "fuse_model",
    "load_model",
    "numbered",
    "save_model",
    "widen",
]

_LOGGER = logging.getLogger(__name__)

# Smaller tensors, such as axes and sizes, stay in the graph, where ONNX Runtime's optimizations read them.
_MIN_INJECTED_BYTES = 1024

EXPORTED = "sdonnx.exported"
"""Key of `meta` of a built model for a copy of the graph from before it was optimized."""

_PAGE = 4096  # bytes

# Types that ONNX Runtime accepts from memory; 8-bit floating-point types have no DLPack.
_SHARED = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int64), np.dtype(np.int32))

_READERS = 4  # threads that compute weights; each has a copy of one in float32

_NOWHERE = "in_memory"  # name of the file of external data, which does not exist

_MAX_CHARACTERS = 200  # of an error of torch in the log

_REMEDY = ("a module that sdonnx can compile", REMEDY)


class _ModuleWeights:
    """Source of a graph's weights (`sdonnx.export.stored_tensors.Weights`): the tensors of a module in memory."""

    def __init__(self, module: torch.nn.Module) -> None:
        # Parameters, not aliases of them, which would keep memory from which the weights move.
        self._tensors = module.state_dict(keep_vars=True)

    def find(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the name of a parameter, which is also its key."""
        return name

    def type_of(self, key: str) -> np.dtype[Any] | None:
        """Return float16 for a parameter in float16, from which a graph in float16 needs no conversion."""
        return np.dtype(np.float16) if self._tensors[key].dtype == torch.float16 else None

    def read(self, key: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a parameter as an alias of its memory if the type allows it."""
        values: npt.NDArray[Any] = self._tensors[key].detach().cpu().numpy()
        return values if values.dtype == dtype else cast(values, dtype)


def build_model(
    module: torch.nn.Module, signature: GraphSignature, prepare: Callable[[torch.nn.Module], None]
) -> ir.Model:
    """Export and optimize a module.

    It is traced in float32, and converted as `sdonnx optimize` does: some operators stay in float32.

    Args:
        module: The module, in evaluation mode.
        signature: The signature of the graph, and where it runs.
        prepare: Changes the copy of the module that is traced, in place.

    Returns:
        The model. Its weights are aliases of the module's, or computed from them when they are read.

    Raises:
        FolderError: The module cannot be traced.
    """
    spec, config, name = signature.spec, signature.config, type(module).__name__

    def build() -> torch.nn.Module:
        copied = _fake_copy(module)
        for hooks in (copied._forward_hooks, copied._forward_pre_hooks):
            hooks.clear()  # they run around the graph
        prepare(copied)
        return copied

    def buffers() -> dict[str, torch.Tensor]:
        return {name: _wide(buffer.detach().cpu()) for name, buffer in module.named_buffers()}

    weights = _ModuleWeights(module)
    with refusing(f"the module {name}", *_REMEDY, first_line):
        model = trace(
            spec,
            config,
            build,
            signature.wrapper,
            weights,
            torch.float32,
            buffers,
            weights.type_of,
        )
        target = signature.target
        request = OptimizeRequest(target.device.provider, Precision(target.precision))
        opened = OpenedComponent(Path(name), model, dict(config), written=True, operators={}, notes=())
        policy = request.precision.policies([spec.name])[spec.name]
        job = ComponentJob(spec, opened, request, requested=policy)
        if signature.quantization is not None:
            job.quantization = denoiser_policy(signature.quantization, spec.name)
        model.meta[EXPORTED] = model.clone()  # weights stay where they are
        apply_passes(GRAPH_PASSES, job)
        outcomes = list(job.outcomes)
        if target.settings.library is not None:
            sizes = default_sizes(config) if spec.role is Role.DENOISER else (None, 1)
            outcomes.append(StageOutcome(KERNEL_STAGE, use_kernels(model, *sizes).fired, ()))
        _log_fusions(outcomes, name)
        if signature.quantization is not None:
            _log_quantized(job.quantized, name)
            restore_late(model)
    return model


def fuse_model(model: ir.Model, name: str, device: Device) -> None:
    """Fuse a graph of any form in place. A line in the log names the rules that fused something.

    Args:
        model: The graph, in standard operators.
        name: Name of the module in the log.
        device: Where the graph runs.
    """
    _log_fusions(fuse(model, device.provider), name)
    tidy(model)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error, or of the one that torch's exporter wrapped, shortened."""
    while isinstance(error, torch.onnx.OnnxExporterError) and error.__cause__ is not None:
        error = error.__cause__
    lines = chain(str(error).strip().splitlines(), [""])
    return f"{type(error).__name__}: {next(lines)}"[:_MAX_CHARACTERS]


def _log_fusions(outcomes: Iterable[StageOutcome], name: str) -> None:
    fired = Counter[str]()
    for outcome in outcomes:
        fired.update(outcome.fired)
    counts = ", ".join(f"{rule} {count}" for rule, count in fired.items() if count)
    _LOGGER.info("fused in %s: %s", name, counts or "nothing")


def _log_quantized(weights: Sequence[QuantizedWeight], name: str) -> None:
    types = ", ".join(dict.fromkeys(each.type.name for each in weights))
    before, after = (sum(getattr(each, key) for each in weights) / 1e6 for key in ("bytes_before", "bytes_after"))
    text = f"{len(weights)} weights in {types}, {before:.1f} MB -> {after:.1f} MB" if weights else "nothing"
    _LOGGER.info("quantized in %s: %s", name, text)


def load_model(model: ir.Model, name: str, target: GraphTarget) -> Graph:
    """Load a fused graph with weights in memory; the model loses these.

    Args:
        model: The graph.
        name: Name of the module in errors.
        target: Where the graph runs.

    Raises:
        FolderError: ONNX Runtime rejects the graph.
        DeviceMemoryError: The device has too little memory.
    """
    with refusing(f"the module {name}", *_REMEDY), tempfile.TemporaryDirectory(prefix="sdonnx-") as at:
        model.meta.pop(EXPORTED, None)  # its weights would stay in memory
        arrays = dict(_detach_weights(model.graph))
        narrow = [name for name, array in arrays.items() if array.dtype not in _SHARED]
        path = Path(at) / ONNX_MODEL
        _write_external(model.graph, {name: arrays.pop(name) for name in narrow}, path.parent)
        ir.save(model, path)
        return loaded_graph(path, target, arrays)


def save_model(model: ir.Model, module: torch.nn.Module, folder: Path) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Write a model of `build_model` into a folder, without the weights that are parameters of the module.

    Args:
        model: The model, which keeps its weights.
        module: The module that it was built from.
        folder: An empty folder.

    Returns:
        The names of the parameters and buffers that the model needs, by its own names for them, and the places of
        other weights in the folder's file (`sdonnx.compiler.saved_graph.stored_place`).

    Raises:
        OSError: The folder cannot be written.
    """
    tensors = {
        name: tensor
        for name, tensor in float_tensors(module).items()
        if tensor.device.type == "cpu" and tensor.is_contiguous()
    }
    named = {_memory_of(tensor.numpy()): name for name, tensor in tensors.items()}
    arrays = dict(_detach_weights(model.graph))
    references = {name: named[memory] for name, array in arrays.items() if (memory := _memory_of(array)) in named}
    written = [name for name in arrays if name not in references]
    try:
        _write_external(model.graph, {name: arrays[name] for name in written}, folder)
        places = {name: stored_place(model.graph.initializers[name].const_value) for name in written}
        ir.save(model, folder / ONNX_MODEL)
    finally:
        for name, array in arrays.items():
            model.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    return references, {name: place for name, place in places.items() if place is not None}


def _fake_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module with new, fake tensors; call it inside a FakeTensorMode.

    The copy has everything that was changed after the module was created, such as attention processors and adapters.
    """
    fakes: dict[int, Any] = {}
    for parameter in module.parameters():
        fakes[id(parameter)] = torch.nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
    for buffer in module.buffers():
        is_float = buffer.dtype.is_floating_point
        fakes[id(buffer)] = torch.empty(buffer.shape, dtype=torch.float32 if is_float else buffer.dtype)
    return copy.deepcopy(module, fakes)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.is_floating_point else tensor


def _detach_weights(graph: ir.Graph) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Replace large initializers by references to a file that does not exist, and yield their values by name."""
    tensors = {
        name: value.const_value
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _MIN_INJECTED_BYTES
    }
    with ThreadPoolExecutor(_READERS) as pool:  # NumPy transposes and converts without Python's lock
        arrays = pool.map(lambda tensor: np.ascontiguousarray(tensor.numpy()), tensors.values())
        for (name, tensor), array in zip(tensors.items(), arrays, strict=True):
            graph.initializers[name].const_value = ir.ExternalTensor(
                _NOWHERE, 0, array.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=name
            )
            yield name, array


def _write_external(graph: ir.Graph, arrays: Mapping[str, npt.NDArray[Any]], folder: Path) -> None:
    """Write initializers into a file of weights, to which the graph then refers."""
    # ONNX Runtime maps the file into memory, where the kernels need aligned values.
    external = ir.external_data.convert_tensors_to_external(
        [ir.Tensor(array, name=name) for name, array in arrays.items()],
        folder,
        ONNX_WEIGHTS,
        alignment=_PAGE,
        align_threshold=0,
    )
    for name, tensor in zip(arrays, external, strict=True):
        graph.initializers[name].const_value = tensor


def _memory_of(array: npt.NDArray[Any]) -> tuple[Any, ...]:
    """Return the identity of a contiguous array in memory; arrays with the same one are interchangeable."""
    return array.ctypes.data, array.dtype, array.shape


_FP8 = "fp8_e4m3_e4m3_dynamic"


def denoiser_policy(config: QuantizationConfig, name: str) -> QuantizationPolicy:
    """Return the types of a denoiser's modules.

    Args:
        config: The configuration.
        name: Name of the component.
    """
    return config.policies(DENOISERS, name)[name]


class GraphQuantization:
    """The quantization of a module's graphs, until one of them exceeds the bound.

    Args:
        chosen: Options.
        name: Name of the module in the log.
    """

    def __init__(self, chosen: CompileOptions, name: str) -> None:
        self._config, self._automatic, self._name = chosen.quantization, chosen.quantizes, name
        self._logged = False

    def applied(self, signature: GraphSignature) -> GraphSignature:
        """Return the signature of a graph with its quantization, and with the kernels for it.

        Raises:
            OptionError: The GPU has no matmuls of the type that the options name.
        """
        if signature.spec.role is not Role.DENOISER:
            return signature
        config = self._config
        if config is None and self._automatic:
            config = self._in_fp8(signature.target)
        if config is None or not denoiser_policy(config, signature.spec.name).is_active:
            return signature
        target = for_types(signature.target, (each.name for each in config.types))
        capability = target.device.capability() if target.settings.library is not None else None
        require_fp8_matmuls(config, capability)
        return replace(signature, target=target, quantization=config)

    def refuse(self) -> None:
        """Note that a graph exceeded the bound: further graphs are not quantized."""
        self._config, self._automatic = None, False

    def _in_fp8(self, target: GraphTarget) -> QuantizationConfig | None:
        """Return the configuration of O3, None with a line in the log where it is as O2."""
        reason = None
        if target.device.provider == "cpu":
            reason = "it is on the CPU"
        elif target.dtype != torch.float16:
            reason = "its weights are in float32"
        elif (target.device.capability() or (0, 0)) < FP8_CAPABILITY:
            reason = "its GPU has no fp8 matmuls"
        elif for_types(target, (_FP8,)).settings.library is None:
            reason = "our kernels for fp8 matmuls cannot be used"
        if reason is None:
            return named_quantization(_FP8, None)
        if not self._logged:
            self._logged = True
            _LOGGER.warning("O3 is as O2 for %s: %s; quant_type names a type for any device", self._name, reason)
        return None


def _float32(tensor: ir.TensorProtocol) -> npt.NDArray[np.float32]:
    return tensor.numpy().astype(np.float32)


def widen(model: ir.Model, types: Collection[ir.DataType]) -> None:
    """Compute values of some floating-point types in float32, in place."""
    wide = ir.DataType.FLOAT
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen_value(value, types)
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in types:
                value.const_value = lazy(functools.partial(_float32, tensor), wide, tuple(tensor.shape.numpy()), name)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            _widen_value(value, types)
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.INT and name in ("to", "dtype") and attribute.value in types:
                node.attributes[name] = ir.AttrInt64(name, wide)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in types:
                node.attributes[name] = ir.AttrTensor(name, ir.Tensor(attribute.value.numpy().astype(np.float32)))


def _widen_value(value: ir.Value, types: Collection[ir.DataType]) -> None:
    if value.dtype in types:
        value.dtype = ir.DataType.FLOAT


def numbered(shape: ir.Shape) -> ir.Shape:
    """Return a shape with numbers instead of names that are numbers; the exporter writes some fixed sizes so."""
    return ir.Shape(
        int(size.value) if isinstance(size, ir.SymbolicDim) and size.value and size.value.isdecimal() else size
        for size in shape
    )
