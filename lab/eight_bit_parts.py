"""Time the convolutions and attentions of a denoiser in fp8 next to fp16, to see which are worth quantizing.

    pip install nvidia-cudnn-frontend==1.18.0
    python lab/eight_bit_parts.py SAMPLE --height 1024 --json docs/results/eight-bit-parts-h100.json

SAMPLE is a pipeline of diffusers, of which only the configuration is read. The shapes occur in a call of the
denoiser with guidance. cuDNN computes each in both types, by the fastest of its plans, in a CUDA graph. Activations are
in fp8 already: what quantizing them takes is not counted, so the difference is the most that fp8 can bring. Attention
has per-tensor scales, and head sizes that are no multiple of 16 are padded. What cuDNN has no fp8 plan for counts with
the time of fp16.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from sdonnx.benchmark.files import append_json, check_writable
from sdonnx.environment_record import environment
from sdonnx.errors import FolderError, OptionError
from sdonnx.terminal import console, guarded

_DENOISERS = ("unet", "transformer")

_CLIP_TOKENS, _T5_TOKENS = 77, 120  # of PixArt-alpha; a longer caption changes little

_MAX_PLANS = 12  # of cuDNN, fastest first by its heuristics

_REPLAYS, _ROUNDS = 20, 7

_STEP = 16  # cuDNN's fp8 kernels need channels and head sizes that are multiples of it


@dataclass(frozen=True)
class Convolution:
    """A convolution: input (N, C, H, W), weight (K, C, R, S), stride and padding of both axes."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def flops(self) -> int:
        """Floating point operations: two for each product of a weight and a value."""
        (_, _, *sizes), (_, _, *kernel) = self.image, self.weight
        steps = zip(sizes, kernel, self.stride, self.padding, strict=True)
        outputs = math.prod((size + 2 * pad - width) // stride + 1 for size, width, stride, pad in steps)
        return 2 * self.image[0] * outputs * math.prod(self.weight)


@dataclass(frozen=True)
class Attention:
    """An attention without a mask: queries (N, heads, tokens, size), keys and values (N, heads, keys, size)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Floating point operations of both matmuls."""
        return 4 * math.prod(self.queries) * self.keys[2]


Part = Convolution | Attention


def recorded_parts(folder: Path, height: int, width: int, images: int) -> Counter[Part]:
    """Return the convolutions and attentions of a call of a pipeline's denoiser with guidance, and how often each is.

    Args:
        folder: A pipeline of diffusers.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        images: Images of a batch; the call has two rows for each.

    Raises:
        FolderError: The folder has no denoiser.
    """
    import diffusers

    name = next((each for each in _DENOISERS if (folder / each / "config.json").is_file()), None)
    if name is None:
        raise FolderError(f"{folder} has no UNet and no transformer", "a pipeline of diffusers", "pass its folder")
    config = json.loads((folder / name / "config.json").read_text())
    with torch.device("meta"):
        denoiser: Any = getattr(diffusers, config["_class_name"]).from_config(config).eval()
        scale = 2 ** (len(json.loads((folder / "vae" / "config.json").read_text())["block_out_channels"]) - 1)
        arguments = _arguments(denoiser, 2 * images, height // scale, width // scale)
        with _recording() as found, torch.no_grad():
            denoiser(**arguments)
    return found


def _arguments(denoiser: Any, rows: int, height: int, width: int) -> dict[str, Any]:
    config = denoiser.config
    captions = config.get("caption_channels")
    text: tuple[int, ...] = (
        (rows, _T5_TOKENS, captions) if captions else (rows, _CLIP_TOKENS, config["cross_attention_dim"])
    )
    arguments: dict[str, Any] = {"encoder_hidden_states": torch.empty(text)}
    sample, timestep = torch.empty(rows, config["in_channels"], height, width), torch.ones(rows)
    if config.get("addition_embed_type") == "text_time":
        sizes = 6
        pooled = config["projection_class_embeddings_input_dim"] - sizes * config["addition_time_embed_dim"]
        arguments["added_cond_kwargs"] = {"text_embeds": torch.empty(rows, pooled), "time_ids": torch.ones(rows, sizes)}
    elif captions:
        added = {"resolution": torch.ones(rows, 2), "aspect_ratio": torch.ones(rows, 1)}
        arguments["added_cond_kwargs"] = added if denoiser.use_additional_conditions else {}
    first = next(iter(inspect.signature(denoiser.forward).parameters))
    return {first: sample, "timestep": timestep, **arguments}


@contextmanager
def _recording() -> Iterator[Counter[Part]]:
    """Count convolutions and attentions that torch computes."""
    found = Counter[Part]()
    attend, convolve = torch.nn.functional.scaled_dot_product_attention, torch.nn.Conv2d._conv_forward

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
        found[Attention(tuple(query.shape), tuple(key.shape))] += 1
        return attend(query, key, value, *more, **named)

    def convolution(module: Any, image: torch.Tensor, weight: torch.Tensor, bias: Any) -> Any:
        found[Convolution(tuple(image.shape), tuple(weight.shape), module.stride, module.padding)] += 1
        return convolve(module, image, weight, bias)

    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        mock.patch.object(torch.nn.Conv2d, "_conv_forward", convolution),
    ):
        yield found


class CudnnTimes:
    """Times of convolutions and attentions by cuDNN's frontend on the current GPU.

    Raises:
        OptionError: The frontend is not installed, or there is no GPU.
    """

    def __init__(self) -> None:
        try:
            import cudnn
        except ImportError as error:
            remedy = "pip install nvidia-cudnn-frontend==1.18.0"
            raise OptionError(f"cuDNN's frontend cannot be imported ({error})", "the module cudnn", remedy) from error
        if not torch.cuda.is_available():
            raise OptionError("torch finds no GPU", "an NVIDIA GPU", "run the script on one")
        self._cudnn: Any = cudnn
        self._handle = cudnn.create_handle()
        types = cudnn.data_type
        self._types = {torch.float16: types.HALF, torch.float8_e4m3fn: types.FP8_E4M3, torch.float32: types.FLOAT}

    def milliseconds(self, part: Part, dtype: torch.dtype) -> float | str:
        """Return the time of a part in fp16 or fp8, or why cuDNN has no plan for it.

        Args:
            part: The part.
            dtype: torch.float16 or torch.float8_e4m3fn.
        """
        try:
            return self._convolution(part, dtype) if isinstance(part, Convolution) else self._attention(part, dtype)
        except Exception as error:  # cuDNN's own classes of errors have no common base
            return str(error).strip().splitlines()[0][:200]

    def _graph(self) -> Any:
        return self._cudnn.pygraph(
            io_data_type=self._types[torch.float16],
            intermediate_data_type=self._types[torch.float32],
            compute_data_type=self._types[torch.float32],
            handle=self._handle,
        )

    def _tensor(self, graph: Any, tensor: torch.Tensor) -> Any:
        return graph.tensor(dim=list(tensor.shape), stride=list(tensor.stride()), data_type=self._types[tensor.dtype])

    def _convolution(self, part: Convolution, dtype: torch.dtype) -> float:
        is_fp8 = dtype is not torch.float16
        if is_fp8 and (part.image[1] % _STEP or part.weight[0] % _STEP):
            raise ValueError(f"{part.image[1]} or {part.weight[0]} channels are no multiple of {_STEP}")
        image, weight = (_random(shape, dtype, nhwc=True) for shape in (part.image, part.weight))
        graph = self._graph()
        inputs = [image, weight]
        handles = [self._tensor(graph, each) for each in inputs]
        output = graph.conv_fprop(
            image=handles[0],
            weight=handles[1],
            padding=list(part.padding),
            stride=list(part.stride),
            dilation=[1, 1],
        )
        if is_fp8:  # the product of the scales of both factors
            inputs.append(torch.full((1, 1, 1, 1), 1e-2, device="cuda"))
            handles.append(self._tensor(graph, inputs[-1]))
            output = graph.mul(output, handles[-1])
        output.set_output(True).set_data_type(self._types[torch.float16])
        expected = torch.nn.functional.conv2d(image.half(), weight.half(), stride=part.stride, padding=part.padding)
        result = torch.empty_like(expected, memory_format=torch.channels_last)
        return self._fastest(graph, dict(zip(handles, inputs, strict=True)), {output: result}, expected)

    def _attention(self, part: Attention, dtype: torch.dtype) -> float:
        size = part.queries[3]
        padded = size if dtype is torch.float16 else -(-size // _STEP) * _STEP
        # (N, tokens, heads, size) in memory, as matmuls write queries, keys and values.
        shapes = [(*each[:3], padded) for each in (part.queries, part.keys, part.keys)]
        inputs = [_random((n, tokens, heads, width), dtype).transpose(1, 2) for n, heads, tokens, width in shapes]
        graph = self._graph()
        handles = [self._tensor(graph, each) for each in inputs]
        named: dict[str, Any] = {"attn_scale": size**-0.5, "generate_stats": False}
        result = torch.empty_like(inputs[0])
        if dtype is torch.float16:
            output, _ = graph.sdpa(*handles, **named)
            outputs = {output: result}
        else:
            # Of queries, keys, values and probabilities as they are read; of probabilities and the result as written.
            scales = [torch.full((1, 1, 1, 1), each, device="cuda") for each in (1.0, 1.0, 1.0, 2**-8, 2.0**8, 2.0**4)]
            inputs += scales
            handles += [self._tensor(graph, each) for each in scales]
            output, _, amax_s, amax_o = graph.sdpa_fp8(*handles, **named)
            outputs = {output: result}
            for amax in (amax_s, amax_o):
                outputs[amax] = torch.empty(1, 1, 1, 1, device="cuda")
                amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
                amax.set_data_type(self._types[torch.float32])
        output.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
        output.set_data_type(self._types[dtype])
        query, key, value = (each.half() for each in inputs[:3])
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=size**-0.5)
        return self._fastest(graph, dict(zip(handles, inputs, strict=True)), outputs, expected)

    def _fastest(
        self,
        graph: Any,
        inputs: Mapping[Any, torch.Tensor],
        outputs: Mapping[Any, torch.Tensor],
        expected: torch.Tensor,
    ) -> float:
        """Return the time of the fastest plan with a result near torch's."""
        modes = self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        times, reason = [], "no plan"
        for index in range(min(graph.get_execution_plan_count(), _MAX_PLANS)):
            try:
                graph.build_plan_at_index(index)
                size = graph.get_workspace_size_plan_at_index(index)
                workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
                time = _replayed(self._launch(graph, {**inputs, **outputs}, workspace, index))
                result = next(iter(outputs.values()))
                error = _relative_error(result, expected)
            except Exception as error_of_plan:  # as above
                reason = str(error_of_plan)
                continue
            if error < 0.1:
                times.append(time)
            else:
                reason = f"its result has an error of {error:.2g}"
        if not times:
            raise ValueError(reason)
        return min(times)

    def _launch(
        self, graph: Any, tensors: Mapping[Any, torch.Tensor], workspace: torch.Tensor, index: int
    ) -> Callable[[], None]:
        def launch() -> None:
            self._cudnn.set_stream(self._handle, torch.cuda.current_stream().cuda_stream)
            graph.execute_plan_at_index(dict(tensors), workspace, index, self._handle)

        return launch


def _random(shape: tuple[int, ...], dtype: torch.dtype, *, nhwc: bool = False) -> torch.Tensor:
    values = torch.randn(shape, device="cuda")
    return values.to(dtype, memory_format=torch.channels_last if nhwc else torch.contiguous_format)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the 2-norm, of the nearest multiple of `expected`: results have scales."""
    one, other = found.double().flatten(), expected.double().flatten()
    other = other * (one @ other) / (other @ other)
    return float((one - other).norm() / other.norm())


def _replayed(launch: Callable[[], None]) -> float:
    """Return the median time of a launch in milliseconds, within a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_REPLAYS):
            launch()
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / _REPLAYS)
    return float(statistics.median(times))


def measured(parts: Counter[Part], milliseconds: Callable[[Part, torch.dtype], float | str]) -> dict[str, Any]:
    """Print the times of each part, and return them with sums for convolutions and attentions in milliseconds a call.

    Args:
        parts: How often a call has each part.
        milliseconds: Times a part in a type, or says why it cannot.

    Raises:
        OptionError: A part cannot be timed in fp16.
    """
    rows: list[dict[str, Any]] = []
    sums: dict[str, dict[str, float]] = {}
    for part, count in sorted(parts.items(), key=lambda each: -each[0].flops * each[1]):
        half, eight = (milliseconds(part, dtype) for dtype in (torch.float16, torch.float8_e4m3fn))
        if isinstance(half, str):
            raise OptionError(f"{part} cannot be timed in fp16: {half}", "a plan of cuDNN", "update cuDNN")
        kind = type(part).__name__.lower()
        rows.append({"kind": kind, **asdict(part), "count": count, "fp16_ms": half, "fp8_ms": eight})
        console().print(json.dumps(rows[-1]), markup=False, highlight=False, soft_wrap=True)
        best = half if isinstance(eight, str) else min(half, eight)
        total = sums.setdefault(kind, {"fp16_ms": 0.0, "fp8_ms": 0.0})
        total["fp16_ms"] += count * half
        total["fp8_ms"] += count * best
    return {"sums": sums, "parts": rows}


def _run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable(options.json)
    parts = recorded_parts(options.sample, options.height, options.width or options.height, options.batch_size)
    found = measured(parts, CudnnTimes().milliseconds)
    for kind, sums in found["sums"].items():
        gain = sums["fp16_ms"] - sums["fp8_ms"]
        text = f"{kind}: {sums['fp16_ms']:.2f} ms in fp16, {sums['fp8_ms']:.2f} ms with fp8 where it is faster"
        if options.call_ms:
            text += f"; at most {gain / options.call_ms:.1%} of a call of {options.call_ms:g} ms"
        console().print(text, markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        record = {"benchmark": "eight-bit parts", "command": shlex.join(sys.orig_argv), "call_ms": options.call_ms}
        append_json(options.json, record | found | {"environment": environment()})
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sample", type=Path, help="folder of a pipeline of diffusers")
    parser.add_argument("--height", type=int, default=1024, help="height of the image (%(default)s)")
    parser.add_argument("--width", type=int, default=None, help="width of the image (the height)")
    parser.add_argument("-b", "--batch_size", type=int, default=1, help="images of a batch (%(default)s)")
    parser.add_argument("--call_ms", type=float, default=None, help="time of a call of the denoiser, for shares of it")
    parser.add_argument("--json", type=Path, default=None, help="append the measurements to this file")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return guarded(_run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
