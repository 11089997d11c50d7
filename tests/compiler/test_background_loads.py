"""`compile_pipe` loads cached graphs while it goes on with the next component."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.small_modules import small_autoencoder, small_text_encoder, small_unet
from transformers import CLIPTextModelWithProjection

import sdonnx
from sdonnx.compiler import compiled_method, graph_cache
from sdonnx.compiler.compile_module import CompiledModule, programs_of
from sdonnx.compiler.graph_cache import ModuleGraphs
from sdonnx.compiler.graph_method import checked_inputs
from sdonnx.compiler.graph_runs import start_warm_up
from sdonnx.compiler.graph_target import host_target
from sdonnx.compiler.saved_graph import load_saved
from sdonnx.errors import DeviceMemoryError
from sdonnx.folder.pipeline_folder import ONNX_MODEL
from sdonnx.metrics import relative_error
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.device.device_thread import DeviceThread
from sdonnx.runtime.device.session import Graph

WAIT_S = 60


def small_pipe() -> Any:
    """Return an object with the attributes of a pipeline that `compile_pipe` reads and sets."""
    components = {
        "vae": small_autoencoder(),
        "text_encoder": small_text_encoder(CLIPTextModelWithProjection),
        "unet": small_unet(),
    }
    return mock.Mock(components=components, **components)


def require_equal(pipe: Any) -> None:
    """Compare the decoder of a compiled pipeline with torch's."""
    latents = torch.randn(1, 4, 5, 7, generator=torch.manual_seed(0))
    with torch.inference_mode():
        ours, theirs = (each.decode(latents).sample for each in (pipe.vae, small_autoencoder()))
    assert relative_error(ours.numpy(), theirs.numpy()) < 1e-4


def test_a_graph_is_loaded_while_the_next_component_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    sdonnx.compile_pipe(small_pipe())
    hashed, order = threading.Event(), list[str]()
    key = ModuleGraphs._key

    def loading(*arguments: Any) -> Any:
        order.append(f"load starts for {type(arguments[3]).__name__}")
        assert hashed.wait(WAIT_S)
        return load_saved(*arguments)

    def hashing(self: ModuleGraphs, *arguments: Any) -> Any:
        found = key(self, *arguments)
        if isinstance(self.module, torch.nn.Module) and type(self.module).__name__ == "UNet2DConditionModel":
            order.append("the UNet is hashed")
            hashed.set()
        return found

    monkeypatch.setattr(graph_cache, "load_saved", loading)
    monkeypatch.setattr(ModuleGraphs, "_key", hashing)
    pipe = sdonnx.compile_pipe(small_pipe())
    assert hashed.is_set()
    assert len(order) == 4
    assert order.index("the UNet is hashed") < order.index("load starts for UNet2DConditionModel")
    assert order.index("load starts for AutoencoderKL") < order.index("load starts for UNet2DConditionModel")
    require_equal(pipe)


def test_a_broken_entry_is_built_again(folder: Path, builds: mock.Mock, warned: list[str]) -> None:
    sdonnx.compile_pipe(small_pipe())
    assert builds.call_count == 3
    for path in folder.glob(f"*/{ONNX_MODEL}"):
        path.write_bytes(b"\0" * path.stat().st_size)
    pipe = sdonnx.compile_pipe(small_pipe())
    assert builds.call_count == 6
    assert [each.split(":")[0] for each in warned] == ["removed a broken entry of the cache"] * 3
    require_equal(pipe)


def test_an_error_while_a_graph_is_loaded_leaves_the_pipeline_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sdonnx.compile_pipe(small_pipe())
    pipe, loaded = small_pipe(), list[weakref.ref[Graph]]()

    def loading(*arguments: Any) -> Any:
        if type(arguments[3]).__name__ == "UNet2DConditionModel":
            raise DeviceMemoryError("no memory", "some", "free it")
        graph = load_saved(*arguments)
        loaded.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(graph_cache, "load_saved", loading)
    with pytest.raises(DeviceMemoryError):
        sdonnx.compile_pipe(pipe)
    gc.collect()
    assert [each() for each in loaded] == [None, None]  # the graphs before are released
    assert not any(isinstance(getattr(pipe, name), CompiledModule) for name in pipe.components)
    assert not any(thread.name.startswith("sdonnx-load") for thread in threading.enumerate())


def test_small_inputs_run_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's and the text encoder's graph accept them; the UNet has none."""
    pipe = sdonnx.compile_pipe(small_pipe())
    runs: list[tuple[Graph, Any, Any]] = []
    monkeypatch.setattr(compiled_method, "start_warm_up", lambda *arguments: runs.append(arguments))
    again = sdonnx.compile_pipe(small_pipe())
    methods = [programs_of(part)[name] for part, name in ((again.vae, "_decode"), (again.text_encoder, "forward"))]
    assert [graph.path.parent for graph, _, _ in runs] == [
        each._built.graph.path.parent for each in methods if each._built
    ]
    for method, (graph, target, inputs) in zip(methods, runs, strict=True):
        (signature,) = method.signatures
        assert target == signature.target
        assert checked_inputs(inputs, signature) == inputs
        outputs = graph.run({name: tensor.numpy() for name, tensor in inputs.items()})
        assert all(len(each) == 1 for each in outputs.values())
    runs.clear()
    sdonnx.compile(small_autoencoder())  # which nothing else follows
    assert runs == []
    require_equal(pipe)


def test_no_warm_up_on_the_cpu() -> None:
    start_warm_up(mock.Mock(spec=[]), host_target(), {})


def test_a_thread_logs_errors_of_jobs_that_nobody_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sdonnx")
    thread, done = DeviceThread(Device("cpu")), list[int]()

    def fail() -> None:
        done.append(1)
        raise ValueError("a fault")

    thread.start(fail)
    thread.start(lambda: done.append(2))
    assert thread.run(lambda: done) == [1, 2]
    assert caplog.messages == ["a job of the device failed: a fault"]
