"""Attributes of diffusers' pipelines, copies of a folder, and arguments of `from_pretrained`."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from support.pipelines import edit_json, linked, refused, snapshot

from sdonnx.errors import FolderError, OptionError, OutputError, SchedulerError
from sdonnx.runtime.device.device import Device
from sdonnx.runtime.pipeline import OrtDiffusionPipeline

USUAL: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np", "seed": 0}
load = OrtDiffusionPipeline.from_pretrained


# Attributes


def test_device_is_that_of_torch(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    assert ours.device == theirs.device == torch.device("cpu")
    assert str(ours.device) == str(theirs.device) == "cpu"
    assert ours.device.type == theirs.device.type
    assert ours.device == "cpu"
    assert ours.device != "cuda"
    assert ours.device != torch.device("cuda")
    assert ours.device != 0
    gpu = Device("cuda", 1)
    assert (str(gpu), gpu.type, gpu.index) == ("cuda:1", "cuda", 1)
    assert gpu == "cuda"
    assert gpu == torch.device("cuda:1")
    assert torch.device("cuda:1") == gpu
    assert gpu != "cuda:0"
    assert gpu != Device("cuda", 0)
    assert len({gpu, Device("cuda", 1), Device("cpu")}) == 2
    assert torch.zeros(1, device=str(ours.device)).device == ours.device


def test_dtype_is_that_of_numpy_and_torch(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    assert str(ours.dtype) == "float32"
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.dtype == np.float32
    assert ours.dtype == np.dtype("float32")
    assert ours.dtype not in (torch.float16, np.float16, "float16", None)
    assert {ours.dtype: 1} == {"float32": 1}


def test_components_are_those_of_diffusers(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    assert ours.components.keys() == theirs.components.keys()
    for name, theirs_part in theirs.components.items():
        part = ours.components[name]
        assert (part is None) == (theirs_part is None), name
        if name in ("unet", "vae", "text_encoder"):
            assert part.class_name == type(theirs_part).__name__
            assert part.dtype == theirs_part.dtype
            assert part.device == theirs_part.device
            assert part.to(memory_format=torch.channels_last) is part
            with refused(OptionError, name, "call the pipeline"):
                part(torch.zeros(1))
            with refused(OptionError, name, "save_pretrained"):
                setattr(ours, name, torch.nn.Identity())
    assert ours.unet.config.in_channels == theirs.unet.config.in_channels
    assert ours.unet.config.sample_size == theirs.unet.config["sample_size"]
    assert ours.vae.config.scaling_factor == theirs.vae.config.scaling_factor
    assert ours.text_encoder.config.hidden_size == theirs.text_encoder.config.hidden_size
    assert ours.components["tokenizer"] is ours.tokenizer
    assert ours.components["scheduler"] == "PNDMScheduler"
    for name in ("transformer", "text_encoder_2"):
        assert hasattr(ours, name) == hasattr(theirs, name) is False
    assert tuple(ours.config.unet) == theirs.config.unet
    assert ours.config["_class_name"] == "StableDiffusionPipeline"


def test_autoencoder_has_the_switches_of_diffusers(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    for vae in (ours.vae, theirs.vae):
        for name in ("slicing", "tiling"):
            for switch, state in (("enable", True), ("disable", False)):
                getattr(vae, f"{switch}_{name}")()
                assert getattr(vae, f"use_{name}") is state
    ours.vae.enable_tiling(True)
    assert ours.vae_tiling
    ours.vae.enable_slicing()
    assert (ours.vae_slicing, ours._cache.splits.decoder(3, 4, 4).size) == (True, 1)
    ours.vae.enable_tiling(use_tiling=False)
    ours.disable_vae_slicing()
    assert (ours.vae.use_tiling, ours.vae.use_slicing) == (False, False)
    assert ours.components["vae"].use_slicing is False
    with pytest.raises(AttributeError):
        ours.unet.enable_tiling()


def test_folder_by_its_name_in_diffusers(micro_cpu: Path) -> None:
    with load(pretrained_model_name_or_path=micro_cpu, provider="cpu") as pipeline:
        assert pipeline.name_or_path == str(micro_cpu)
    with load(folder=str(micro_cpu)) as pipeline:
        assert pipeline.name_or_path == str(micro_cpu)
    with refused(OptionError, "the folder and pretrained_model_name_or_path", "one of them"):
        load(micro_cpu, pretrained_model_name_or_path=micro_cpu)
    with refused(OptionError, "the folder is None", "pass an optimized folder"):
        load()
    with refused(OptionError, "the folder is ''", "pass an optimized folder"):
        load(pretrained_model_name_or_path="")


def test_repr_names_folder_device_and_components(ours: OrtDiffusionPipeline, theirs: Any) -> None:
    name, _, text = repr(ours).partition(" ")
    assert name == "OrtDiffusionPipeline"
    content = json.loads(text)
    assert content["folder"] == ours.name_or_path == str(ours.folder.path)
    assert (content["device"], content["dtype"]) == ("cpu", "float32")
    assert content["unet"] == ["diffusers", "UNet2DConditionModel"]
    ours.scheduler = "euler"
    assert '"EulerDiscreteScheduler"' in repr(ours)


def test_to(ours: OrtDiffusionPipeline, caplog: pytest.LogCaptureFixture) -> None:
    for targets in ((), ("cpu",), (torch.device("cpu"),), (torch.float32,), ("cpu", "float32"), (ours.device,)):
        assert ours.to(*targets) is ours
    assert ours.to(device="cpu", dtype=torch.float32) is ours
    assert ours.cpu() is ours
    with caplog.at_level(logging.INFO, logger="sdonnx"):
        assert ours.to(memory_format=torch.channels_last) is ours
    assert "memory_format" in caplog.text
    for target in ("cuda", "cuda:1", torch.device("cuda"), 0):
        with refused(OptionError, "the pipeline is on cpu, and cuda was requested", "--provider cuda"):
            ours.to(target)
    with refused(OptionError, "--provider cuda"):
        ours.cuda()
    with refused(OptionError, "torch.float16", "float32", "--float16 --provider cuda"):
        ours.to("cpu", torch.float16)
    with refused(OptionError, "the device is 'tpu'", "cuda:1"):
        ours.to("tpu")


def test_to_another_gpu() -> None:
    pipeline = object.__new__(OrtDiffusionPipeline)
    pipeline.device = Device("cuda", 0)
    assert pipeline.to("cuda") is pipeline
    assert pipeline.to("cuda:0") is pipeline
    assert pipeline.to(0) is pipeline
    with refused(OptionError, "cuda:0", "cuda:1", "from_pretrained(..., device_index=1)"):
        pipeline.to("cuda:1")


# save_pretrained, push_to_hub


def test_saved_copy_has_the_scheduler(ours: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path) -> None:
    before = snapshot(micro_cpu)
    ours.save_pretrained(tmp_path / "same")
    assert _contents(tmp_path / "same") == _contents(micro_cpu)
    ours.scheduler = "DPM++ 2M Karras"
    ours.save_pretrained(str(tmp_path / "changed"), safe_serialization=True)
    copy = load(tmp_path / "changed")
    assert copy.scheduler == "DPMSolverMultistepScheduler"
    assert copy.scheduler.config.use_karras_sigmas is True
    assert copy.config.scheduler == ["diffusers", "DPMSolverMultistepScheduler"]
    np.testing.assert_array_equal(copy("fox", **USUAL).images, ours("fox", **USUAL).images)
    changed = {
        name
        for name, content in _contents(tmp_path / "changed").items()
        if _contents(tmp_path / "same")[name] != content
    }
    assert changed == {"model_index.json", "scheduler/scheduler_config.json"}
    assert snapshot(micro_cpu) == before


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_certificate_is_not_copied_to_a_changed_folder(micro_cpu: Path, tmp_path: Path) -> None:
    folder = linked(micro_cpu, tmp_path / "folder")
    (folder / "certificate.json").write_text("{}")
    (folder / ".hidden").write_text("")
    pipeline = load(folder)
    pipeline.save_pretrained(tmp_path / "same")
    assert (tmp_path / "same" / "certificate.json").is_file()
    assert not (tmp_path / "same" / ".hidden").exists()
    pipeline.scheduler = "euler"
    pipeline.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed" / "certificate.json").exists()


def test_save_replaces_only_pipelines(micro_cpu: Path, tmp_path: Path) -> None:
    pipeline = load(micro_cpu)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "note.txt").write_text("mine")
    for overwrite in (False, True):
        with refused(OutputError, "foreign"):
            pipeline.save_pretrained(foreign, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]
    assert (foreign / "note.txt").read_text() == "mine"
    pipeline.save_pretrained(tmp_path / "own")
    with refused(OutputError, "exists and is not empty", "pass overwrite=True"):
        pipeline.save_pretrained(tmp_path / "own")
    pipeline.scheduler = "euler"
    pipeline.save_pretrained(tmp_path / "own", overwrite=True)
    assert load(tmp_path / "own").scheduler == "EulerDiscreteScheduler"
    with refused(OutputError, "input"):
        pipeline.save_pretrained(micro_cpu, overwrite=True)
    with refused(OutputError, "the output is None"):
        pipeline.save_pretrained(None)  # type: ignore[arg-type]
    with refused(OptionError, "overwrit", "did you mean overwrite"):
        pipeline.save_pretrained(tmp_path / "other", overwrit=True)


def test_interrupted_copy_leaves_nothing(micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load(micro_cpu)
    copy = shutil.copy2
    copied: list[Any] = []

    def interrupted(source: Any, target: Any, **options: Any) -> Any:
        if len(copied) == 3:
            raise KeyboardInterrupt
        copied.append(source)
        return copy(source, target, **options)

    monkeypatch.setattr(shutil.copytree, "__defaults__", (False, None, interrupted, False, False))
    with pytest.raises(KeyboardInterrupt):
        pipeline.save_pretrained(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class _Hub:
    """Stands in for `huggingface_hub.HfApi`, and records an upload."""

    calls: list[tuple[str, Any]]
    error: Exception | None = None

    def __init__(self, token: Any = None) -> None:
        type(self).calls = [("token", token)]

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append((repo_id, options))
        return SimpleNamespace(repo_id=f"someone/{repo_id.rpartition('/')[2]}")

    def create_commit(self, repo_id: str, operations: Any, **options: Any) -> Any:
        self.calls.append((repo_id, options))
        files = {}
        for each in operations:
            with each.as_file() as file:
                files[each.path_in_repo] = file.read()
        self.calls.append(("files", files))
        return SimpleNamespace(commit_url="https://hub/commit/1")


def test_push_to_hub(
    ours: OrtDiffusionPipeline, micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", _Hub)
    ours.scheduler = "euler"
    assert ours.push_to_hub("someone/fast", token="secret", private=True) == "https://hub/commit/1"
    token, created, (repository, commit), (_, files) = _Hub.calls
    assert token == ("token", "secret")
    assert created == ("someone/fast", {"private": True, "exist_ok": True})
    assert repository == "someone/fast"
    assert commit["create_pr"] is False
    ours.save_pretrained(tmp_path / "fast", push_to_hub=True, repo_id="fast")
    assert _contents(tmp_path / "fast") == files == dict(_Hub.calls[-1:])["files"]
    with refused(OptionError, "private_", "did you mean private?"):
        ours.push_to_hub("a/b", private_=True)  # type: ignore[call-arg]
    monkeypatch.setattr(_Hub, "error", errors.HFValidationError("bad id"))
    with refused(OutputError, "uploading to a/b failed", "bad id", "hf auth login"):
        ours.push_to_hub("a/b")


# from_pretrained


def test_arguments_of_diffusers(micro_cpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    import diffusers

    accepted: list[dict[str, Any]] = [
        {"torch_dtype": torch.float32},
        {"torch_dtype": "auto", "device": "cpu"},
        {"dtype": np.float32, "device": torch.device("cpu"), "variant": "fp32"},
        {"device_map": "cpu", "token": None, "revision": "main"},
        {"device_map": "balanced", "provider": "CPUExecutionProvider", "local_files_only": True},
        {"provider": "cpu", "device": Device("cpu")},
    ]
    for options in accepted:
        with load(micro_cpu, **options) as pipeline:
            assert pipeline.device == "cpu"
    with load(micro_cpu, scheduler="euler a") as pipeline:
        assert pipeline.scheduler == "EulerAncestralDiscreteScheduler"
    scheduler = diffusers.LCMScheduler.from_config(pipeline.scheduler.config)
    with (
        caplog.at_level(logging.INFO, logger="sdonnx"),
        load(micro_cpu, scheduler=scheduler, use_safetensors=True) as pipeline,
    ):
        assert pipeline.scheduler == "LCMScheduler"
    assert "from_pretrained(use_safetensors=...) has no effect" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"torch_dtype": torch.float16}, OptionError, ["torch.float16", "is float32", "--float16 --provider cuda"]),
        ({"dtype": np.float16}, OptionError, ["dtype is float16"]),
        ({"torch_dtype": torch.bfloat16}, OptionError, ["torch.bfloat16", "float32 or float16"]),
        ({"variant": "fp16"}, OptionError, ["variant is fp16", "--float16"]),
        ({"variant": "ema"}, OptionError, ["variant is ema", "leave it out"]),
        ({"device": "tpu"}, OptionError, ["the device is 'tpu'"]),
        ({"device": "cuda:"}, OptionError, ["the device is 'cuda:'"]),
        ({"device": True}, OptionError, ["the device is True"]),
        ({"device_map": {"unet": 0}}, OptionError, ["the device is {'unet': 0}"]),
        ({"device": "cpu", "provider": "cuda"}, OptionError, ["provider is 'cuda' and device is 'cpu'"]),
        ({"device_index": "0"}, OptionError, ["device_index is '0'"]),
        ({"scheduler": "eulr"}, SchedulerError, ["did you mean"]),
        ({"torch_dtyp": torch.float32}, OptionError, ["torch_dtyp", "did you mean torch_dtype"]),
        ({"max_size": 3}, OptionError, ["did you mean max_sizes"]),
        ({"options": 3}, OptionError, ["options is unknown"]),
        ({"unet": object()}, OptionError, ["unet", "save_pretrained"]),
        ({"controlnet": object()}, OptionError, ["controlnet"]),
        ({"export": True}, OptionError, ["sdonnx export"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_rejected_arguments(options: dict[str, Any], error: Any, words: list[str], micro_cpu: Path) -> None:
    with refused(error, *words):
        load(micro_cpu, **options)


def test_precision_of_a_gpu_folder(micro_cpu: Path, tmp_path: Path) -> None:
    from sdonnx.runtime.interface.pretrained_folders import PretrainedOptions

    report = {"provider": "cuda", "precision": "float16"}
    for options in ({"torch_dtype": torch.float16}, {"variant": "fp16"}, {"dtype": "float16"}):
        PretrainedOptions(**options).require_precision("fast", report)
    with refused(OptionError, "torch_dtype is torch.float32, and fast is float16", "optimize again") as _:
        PretrainedOptions(torch_dtype=torch.float32).require_precision("fast", report)
    assert PretrainedOptions(device="cuda:1").place(None, 0) == ("cuda", 1)
    assert PretrainedOptions(device=1).place(None, 0) == ("cuda", 1)
    assert PretrainedOptions(device="cuda").place("CUDAExecutionProvider", 2) == ("cuda", 2)
    assert PretrainedOptions().place(None, 2) == (None, 2)


# Folders on the hub


def _cached(cache: Path, folder: Path, repo_id: str = "someone/fast") -> None:
    """Put a folder into a cache of the hub, as a download does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_folder_on_the_hub(micro_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cached(tmp_path, micro_cpu)
    with load("someone/fast", cache_dir=tmp_path, local_files_only=True) as pipeline:
        assert pipeline.folder.path.parent.name == "snapshots"
    asked: list[tuple[str, dict[str, Any]]] = []

    def ask(repo_id: str, *_: str, **options: Any) -> str:
        asked.append((repo_id, options))
        return str(micro_cpu)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    load("someone/fast", token="secret", revision="v2", cache_dir="here").close()
    expected = {"token": "secret", "revision": "v2", "local_files_only": False, "cache_dir": "here"}
    assert asked == [("someone/fast", {**expected, "force_download": False})] * 2
    (tmp_path / "someone").mkdir()
    with refused(FolderError, "someone/fast does not exist"):
        load("someone/fast")


def _answer(kind: Any) -> Exception:
    """Return an error without the HTTP response that its constructor requires."""
    error: Exception = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_answer(errors.RepositoryNotFoundError), ["there is none, or it is private", "hf auth login"]),
        (_answer(errors.GatedRepoError), ["access to it must be granted"]),
        (_answer(errors.RevisionNotFoundError), ["no such revision"]),
        (errors.LocalEntryNotFoundError("offline"), ["offline, and not in the cache"]),
        (errors.OfflineModeIsEnabled("offline"), ["offline", "HF_HUB_OFFLINE"]),
        (ConnectionError("no route"), ["offline"]),
        (errors.HFValidationError("bad"), ["the id is not valid", "NAMESPACE/NAME"]),
        (errors.EntryNotFoundError("no file"), ["has no sdonnx.json", "sdonnx export -m someone/slow"]),
        (OSError("disk\nfull"), ["OSError: disk full"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_hub_errors_are_one_line(error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with refused(FolderError, "someone/slow", *words):
        load("someone/slow")


def test_offline_and_unknown(tmp_path: Path) -> None:
    """The tests run with HF_HUB_OFFLINE=1."""
    with refused(FolderError, "someone/unknown", "offline, and not in the cache", "check the path"):
        load("someone/unknown", cache_dir=tmp_path)
    folder = tmp_path / "plain"
    folder.mkdir()
    edit = folder / "model_index.json"
    edit.write_text("{}")
    edit_json(edit, _class_name="StableDiffusionPipeline")
    with refused(FolderError, "sdonnx.json"):
        load(str(folder))
