"""`sdonnx.compile` and `compile_pipe` on a GPU: images, streams, sizes, changed weights, and the time of a call."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.diffusers_pipelines import in_diffusers
from support.recording import Note

import sdonnx
from sdonnx.compiler import module_graph
from sdonnx.compiler.compile_module import programs_of
from sdonnx.compiler.graph_runs import MAX_SIZES
from sdonnx.compiler.result_checks import CHECKED_CALLS
from sdonnx.metrics import relative_error
from sdonnx.runtime.device.device import device_for
from sdonnx.runtime.device.device_thread import device_thread

Source = Callable[[str], Path]

CHECKED = {"options": {"check_agreement": True}}
PROMPT = "a red fox in the snow"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Return a function that writes a sample once, and returns its folder."""
    from sdonnx.sample.write_sample import write_sample

    @functools.cache
    def write(arch: str) -> Path:
        folder = tmp_path_factory.mktemp("samples") / arch
        write_sample(arch, folder)
        return folder

    return write


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "0")


def loaded(folder: Path, dtype: torch.dtype, device: str = "cuda") -> Any:
    pipeline = in_diffusers(folder, dtype=dtype)
    if getattr(pipeline, "vae", None) is not None:
        pipeline.vae.register_to_config(force_upcast=False)
    return pipeline.to(device)


def latents_of(pipeline: Any, **arguments: Any) -> np.ndarray[Any, Any]:
    """Return the latents after three steps. A pipeline in float16 begins with the same noise, rounded."""
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    height, width = (
        arguments.get(name, denoiser.config.sample_size * pipeline.vae_scale_factor) // pipeline.vae_scale_factor
        for name in ("height", "width")
    )
    rows = arguments.get("num_images_per_prompt", 1)
    noise = torch.randn(rows, 4, height, width, generator=torch.Generator().manual_seed(3))
    given = {"num_inference_steps": 3, "output_type": "latent", "latents": noise.to("cuda", denoiser.dtype)} | arguments
    return np.asarray(pipeline(PROMPT, **given).images.float().cpu())


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of this project in the log, without the lines of torch's tracing."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("sdonnx")]


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny", "pixart-alpha-tiny"])
def test_pipelines(arch: str, source: Source, note: Note, caplog: pytest.LogCaptureFixture) -> None:
    """The error to float32 is at most twice torch's in float16; other sizes and batches compile nothing anew."""
    wide, half = (loaded(source(arch), dtype) for dtype in (torch.float32, torch.float16))
    cases = [{}, {"height": 96, "width": 128}, {"num_images_per_prompt": 2}]
    if arch.startswith("pixart"):
        cases = [{"use_resolution_binning": False, **case} for case in cases]
    exact = [latents_of(wide, **case) for case in cases]
    plain = [latents_of(half, **case) for case in cases]
    start = time.perf_counter()
    compiled = sdonnx.compile_pipe(half, options=CHECKED)
    row: dict[str, Any] = {"arch": arch, "compile_s": round(time.perf_counter() - start, 2)}
    with caplog.at_level(logging.WARNING, logger="sdonnx.compiler"):
        ours = [latents_of(compiled, **case) for case in cases]
    row["errors"] = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    row["torch_errors"] = [relative_error(a, b) for a, b in zip(plain, exact, strict=True)]
    row["lines"] = lines_of(caplog)
    image = compiled(PROMPT, num_inference_steps=2, output_type="np", generator=torch.manual_seed(0)).images
    note("compiled pipelines", row)
    assert np.isfinite(image).all()
    assert row["lines"] == []
    assert all(a <= 2 * b for a, b in zip(row["errors"], row["torch_errors"], strict=True))


def test_autoencoder_that_pipelines_convert(tmp_path: Path, note: Note, caplog: pytest.LogCaptureFixture) -> None:
    """No conversion is needed: values that overflow in torch's float16 are scaled, and results are in float32."""
    import diffusers

    from sdonnx.sample.write_sample import write_sample

    write_sample("sdxl-tiny", tmp_path / "sample", overflow="vae")
    models = [diffusers.AutoencoderKL.from_pretrained(tmp_path / "sample", subfolder="vae") for _ in range(2)]
    plain, half = (model.to("cuda").requires_grad_(False) for model in models)
    compiled: Any = sdonnx.compile(half.half())
    latents = torch.randn(1, 4, 32, 32, generator=torch.manual_seed(0)).to("cuda")
    pixels = torch.randn(1, 3, 64, 64, generator=torch.manual_seed(1)).to("cuda")
    errors, times = list[float](), list[float]()
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="sdonnx.compiler"):
        exact = plain.decode(latents).sample, plain.encode(pixels).latent_dist.parameters
        for _ in range(3):
            start = time.perf_counter()
            found = compiled.decode(latents).sample, compiled.encode(pixels).latent_dist.parameters
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
            errors += [relative_error(a.cpu().numpy(), b.cpu().numpy()) for a, b in zip(found, exact, strict=True)]
    note("converted autoencoder", {"errors": errors, "ms": times})
    assert lines_of(caplog) == []
    assert {each.dtype for each in found} == {torch.float32}
    assert compiled.dtype == torch.float16
    assert not compiled.config.force_upcast
    assert max(errors) < 1e-2


def unet_of(source: Source) -> tuple[Any, dict[str, Any]]:
    unet = loaded(source("tiny"), torch.float16).unet
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float16)

    width = unet.config.cross_attention_dim
    call = {"sample": drawn(2, 4, 16, 16), "timestep": 7, "encoder_hidden_states": drawn(2, 77, width)}
    return unet, call


def test_calls_are_ordered_on_the_current_stream(source: Source) -> None:
    """Inputs that other streams compute late are waited for, and outputs are not overwritten by the next call."""
    unet, call = unet_of(source)
    compiled = sdonnx.compile(unet)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.inference_mode():
        expected = [compiled(**(call | {"sample": call["sample"] * scale})).sample for scale in (1, 2, 3, 4)]
        torch.cuda.synchronize()
        for _ in range(5):
            found = []
            for index, scale in enumerate((1, 2, 3, 4)):
                with torch.cuda.stream(streams[index % 2]):
                    torch.cuda._sleep(2_000_000)
                    late = call["sample"] * scale
                    found.append(compiled(**(call | {"sample": late})).sample)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_many_sizes_and_changed_weights(source: Source) -> None:
    unet, call = unet_of(source)
    compiled = sdonnx.compile(unet)
    with torch.inference_mode():
        for height in range(8, 8 + 8 * (MAX_SIZES + 2), 8):
            sample = torch.randn(1, 4, height, 16, device="cuda", dtype=torch.float16)
            text = call["encoder_hidden_states"][:1]
            ours, theirs = (each(sample, 3, text).sample for each in (compiled, unet))
            assert relative_error(ours.float().cpu().numpy(), theirs.float().cpu().numpy()) < 2e-2
    with torch.no_grad():
        unet.conv_out.weight.mul_(2)
        ours, theirs = compiled(**call).sample, unet(**call).sample
    assert relative_error(ours.float().cpu().numpy(), theirs.float().cpu().numpy()) < 2e-2


def bytes_of(*modules: Any) -> int:
    return sum(each.nbytes for module in modules for each in module.parameters())


@pytest.mark.parametrize("arch", ["tiny", "sdxl-tiny"])
def test_torch_copy_leaves_the_gpu(arch: str, source: Source, note: Note, caplog: pytest.LogCaptureFixture) -> None:
    """A pipeline gives the memory of torch's weights back, and notices changes of these on the host."""
    kept = sdonnx.compile_pipe(loaded(source(arch), torch.float16), options={"options": {"freezing": False}})
    expected = latents_of(kept)
    pipe = loaded(source(arch), torch.float16)
    before = torch.cuda.memory_allocated()
    sdonnx.compile_pipe(pipe)
    # The large weights of the graphs are in torch's memory, too.
    programs = [each for part in pipe.components.values() for each in programs_of(part).values()]
    graphs = [each._built.graph for each in programs if each._built]
    placed = sum(int(value.tensor_size_in_bytes()) for graph in graphs for value in graph._weights.values())
    freed = before - torch.cuda.memory_allocated() + placed
    size = bytes_of(*(part for part in pipe.components.values() if programs_of(part)))
    with caplog.at_level(logging.WARNING, logger="sdonnx.compiler"):
        pipe.to("cuda")
        found = latents_of(pipe), latents_of(pipe.to(torch.device("cuda", 0), torch.float16))
        image = pipe(PROMPT, num_inference_steps=2, output_type="np").images
    row: dict[str, Any] = {"arch": arch, "bytes": size, "freed": freed, "lines": lines_of(caplog)}
    row["errors"] = [relative_error(each, expected) for each in found]
    changed = {name: 0.9 * each for name, each in kept.unet.state_dict().items()}
    for each in (pipe, kept):
        each.unet.load_state_dict(changed)
    again = latents_of(pipe)
    row["change"] = relative_error(again, expected)
    row["changed_error"] = relative_error(again, latents_of(kept))
    note("weights on the host", row)
    assert freed >= 0.9 * size
    assert row["lines"] == []
    assert pipe.device == pipe.unet.device == torch.device("cuda", 0)
    assert pipe.unet.conv_in.weight.device.type == "cpu"
    assert np.isfinite(image).all()
    assert max(row["errors"]) < 1e-3
    assert row["change"] > 1e-2
    assert row["changed_error"] < 1e-3


def test_weights_return_for_calls_in_torch(source: Source) -> None:
    """They are moved once; the key of the graph in the cache is the same as for weights on the GPU."""
    unet, call = unet_of(source)
    compiled: Any = sdonnx.compile(unet, options="freezing")
    (program,) = programs_of(compiled).values()
    (signature,) = program.signatures
    key = program.graphs.key(signature)
    assert unet.conv_in.weight.device.type == "cpu"
    before = torch.cuda.memory_allocated()
    mask = torch.ones(2, 77, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        found = compiled(**call, encoder_attention_mask=mask).sample
        assert relative_error(found.float().cpu().numpy(), unet(**call).sample.float().cpu().numpy()) < 2e-2
        assert torch.cuda.memory_allocated() - before >= 0.9 * bytes_of(unet)
        built = program._built
        compiled(**call)
    assert program._built is built
    assert program.graphs.key(signature) == key
    with torch.no_grad():
        compiled.conv_out.weight.mul_(2)
        compiled(**call)
    assert unet.conv_in.weight.device.type == "cpu"


def test_cached_graphs_do_not_depend_on_where_weights_are(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's graph is built from weights on the host, and loaded for weights on the GPU."""
    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "1GB")
    pixels = torch.randn(1, 3, 64, 64, generator=torch.manual_seed(1)).to("cuda")
    found = []
    for freezing in (True, False):
        vae = loaded(source("tiny"), torch.float32).vae
        with mock.patch.object(module_graph, "build_model", wraps=module_graph.build_model) as builds:
            compiled: Any = sdonnx.compile(vae, options={"options": {"freezing": freezing}})
            with torch.inference_mode():
                found.append(compiled.encode(pixels).latent_dist.parameters)
        assert builds.call_count == (2 if freezing else 0)
        assert vae.encoder.conv_in.weight.device.type == ("cpu" if freezing else "cuda")
    assert relative_error(*(each.cpu().numpy() for each in found)) < 1e-3


def test_a_module_with_weights_on_the_host_moves_to_the_cpu(source: Source) -> None:
    unet = loaded(source("tiny"), torch.float32).unet
    compiled: Any = sdonnx.compile(unet, options={"options": {"freezing": True}})
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 77, unet.config.cross_attention_dim)
    with torch.no_grad():  # tensors that move in inference mode do not count changes
        first = compiled(sample.to("cuda"), 7, text.to("cuda")).sample
        compiled.to("cpu")
        assert compiled.device == torch.device("cpu")
        second = compiled(sample, 7, text).sample
        compiled.to("cuda")
        third = compiled(sample.to("cuda"), 7, text.to("cuda")).sample
    assert unet.conv_in.weight.device.type == "cpu"
    for each in (first, third):
        assert relative_error(each.cpu().numpy(), second.numpy()) < 1e-2  # in TF32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_modules_of_any_class(dtype: torch.dtype, note: Note, caplog: pytest.LogCaptureFixture) -> None:
    """Graphs of Dynamo's programs have the types of the module, or float32 for bfloat16, and notice changed weights."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, norm_first=True, activation="gelu")
    module = layer.eval().requires_grad_(False).to("cuda", dtype)
    compiled: Any = sdonnx.compile(module, options=CHECKED)
    errors = list[float]()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="sdonnx.compiler"):
        for length in (10, 7, 10):
            x = torch.randn(2, length, 64, device="cuda", dtype=dtype)
            found, expected = compiled(x), module(x)
            assert (found.dtype, found.device) == (dtype, x.device)
            errors.append(relative_error(found.float().cpu().numpy(), expected.float().cpu().numpy()))
        lines = lines_of(caplog)
        module.linear1.weight.mul_(2)
        errors.append(relative_error(compiled(x).float().cpu().numpy(), module(x).float().cpu().numpy()))
    note("modules of any class", {"dtype": str(dtype), "errors": errors, "lines": lines})
    assert lines == []
    assert max(errors) < 2e-2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_keep_the_graph(
    source: Source, note: Note, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Adapters on the GPU are added to weights that are in the host's memory, and back again bit for bit."""
    from peft import LoraConfig

    monkeypatch.setenv("SDONNX_CACHE", str(tmp_path))
    monkeypatch.setenv("SDONNX_CACHE_LIMIT", "1GB")
    plain, call = unet_of(source)
    unet, _ = unet_of(source)
    compiled = sdonnx.compile(unet, options="freezing")
    row: dict[str, Any] = {"errors": [], "changes": [], "s": []}
    with torch.no_grad(), mock.patch.object(module_graph, "build_model") as builds:
        first = compiled(**call).sample
        for each in (plain, unet):
            torch.manual_seed(0)
            each.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_out.0", "conv1"], init_lora_weights=False))
        for scale in (1.0, 0.25):
            named = {**call, "cross_attention_kwargs": {"scale": scale}}
            start = time.perf_counter()
            ours = compiled(**named).sample.float().cpu().numpy()
            row["s"].append(round(time.perf_counter() - start, 2))
            row["errors"].append(relative_error(ours, plain(**named).sample.float().cpu().numpy()))
            row["changes"].append(relative_error(ours, first.float().cpu().numpy()))
        unet.delete_adapters("default")
        last = compiled(**call).sample
    row["lines"] = lines_of(caplog)
    note("adapters of a compiled UNet", row)
    assert builds.call_count == 0
    assert unet.conv_in.weight.device.type == "cpu"
    assert max(row["errors"]) < 2e-2
    assert min(row["changes"]) > 5e-2
    assert torch.equal(last, first)


def test_o3_quantizes(source: Source, note: Note, caplog: pytest.LogCaptureFixture) -> None:
    """The denoiser of a trained pipeline is quantized to fp8, and each checked call is within the bound."""
    wide, half = (loaded(source("shapes-dit"), dtype) for dtype in (torch.float32, torch.float16))
    case: dict[str, Any] = {"height": 64, "width": 64, "use_resolution_binning": False, "num_inference_steps": 20}
    exact, plain = (latents_of(each, **case) for each in (wide, half))
    compiled = sdonnx.compile_pipe(half, options={"mode": "O3"})
    with caplog.at_level(logging.INFO, logger="sdonnx.compiler"):
        ours = latents_of(compiled, **case)
    checks = [line for line in lines_of(caplog) if line.startswith("the quantized graph of")]
    row: dict[str, Any] = {
        "error": relative_error(ours, exact),
        "torch_error": relative_error(plain, exact),
        "checks": checks,
    }
    ours_only = [each for each in caplog.records if each.name.startswith("sdonnx") and each.levelno >= logging.WARNING]
    row["lines"] = [each.getMessage() for each in ours_only]
    note("a pipeline in 8 bits", row)
    assert row["lines"] == []
    assert len(checks) == len(CHECKED_CALLS)
    assert row["error"] > 2 * row["torch_error"], "not quantized"
    assert next(half.transformer.parameters()).device.type == "cpu"


@pytest.mark.weekly
def test_time_of_a_call(source: Source, note: Note) -> None:
    """Stable Diffusion 1.5 at 512x512 with guidance: calls without a pause, next to torch and the graph alone."""
    unet = loaded(source("sd15"), torch.float16).unet
    sample = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16)
    text = torch.randn(2, 77, 768, device="cuda", dtype=torch.float16)
    start = time.perf_counter()
    compiled = sdonnx.compile(unet)
    row: dict[str, Any] = {"compile_s": round(time.perf_counter() - start, 2)}
    with torch.inference_mode():
        compiled(sample, 7, text)
        (program,) = programs_of(compiled).values()
        built: Any = program._built
        (bound,) = built.runs._bound.values()
        device = device_for("cuda")
        calls: dict[str, Callable[[], Any]] = {
            "eager": lambda: unet(sample, 7, text),
            "compiled": lambda: compiled(sample, 7, text),
            "graph": lambda: device_thread(device).run(bound.run),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(8):
            for name, call in calls.items():
                device.synchronize()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(30):
                    call()
                queued = time.perf_counter()
                device.synchronize()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) / 30 * 1e3)
                row[f"{name}_host_ms"] = round((queued - start) / 30 * 1e3, 3)
    row |= {f"{name}_ms": round(statistics.median(found[2:]), 3) for name, found in times.items()}
    row["overhead"] = row["compiled_ms"] / row["graph_ms"] - 1
    note("a call of SD 1.5's UNet", row)
    assert row["compiled_ms"] < row["eager_ms"]
    assert row["overhead"] <= 0.03
