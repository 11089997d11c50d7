"""Single-file checkpoints: the same tensors as diffusers' conversion, and the same graphs as the folder's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.micro import changed
from support.original_layout import original_clip, original_open_clip, original_unet, original_vae, write_original
from support.pipeline_cache import PipelineCache
from support.pipelines import edit_json, refused

from sdonnx.__main__ import main
from sdonnx.errors import FolderError, OptionError, SdonnxError, WeightsError
from sdonnx.export.component_plan import plan_component
from sdonnx.export.export_pipeline import export_pipeline
from sdonnx.export.single_file.checkpoint_file import RenamedWeights
from sdonnx.export.single_file.checkpoint_kinds import KINDS, kind_of
from sdonnx.export.single_file.convert_keys import text_encoder_weights, unet_weights, vae_weights
from sdonnx.export.single_file.open_single_file import SingleFile, open_single_file
from sdonnx.export.single_file.shape_configs import text_encoder_config, unet_config, vae_config
from sdonnx.export.stored_tensors import StoredTensors
from sdonnx.models.registry import family_of
from sdonnx.sample import write_sample as sample
from sdonnx.sample.write_sample import ARCHITECTURES

_U = "model.diffusion_model."

# Changes to a tiny pipeline. diffusers distinguishes the encoders of XL by their width.
_SD2 = {
    "unet": {"block_out_channels": [64, 128], "attention_head_dim": [1, 2], "use_linear_projection": True},
    "text_encoder": {"hidden_act": "gelu"},
}
_SD1 = {"unet": {"block_out_channels": [64, 128]}}
_XL_UNET = {"block_out_channels": [64, 128], "attention_head_dim": [1, 2]}
_XL = {"unet": {**_XL_UNET, "cross_attention_dim": 160}, "text_encoder_2": {"hidden_size": 96}}
_SMALL: Mapping[str, tuple[str, Mapping[str, Any], str, bool]] = {
    "sd1": ("tiny", _SD1, "StableDiffusionPipeline", False),
    "sd2": ("tiny", _SD2, "StableDiffusionPipeline", True),
    "inpainting": (
        "tiny",
        {"unet": {**_SD1["unet"], "in_channels": 9, "layers_per_block": 2}},
        "StableDiffusionInpaintPipeline",
        False,
    ),
    "xl": ("sdxl-tiny", _XL, "StableDiffusionXLPipeline", False),
    "refiner": ("sdxl-refiner-tiny", {"unet": _XL_UNET}, "StableDiffusionXLImg2ImgPipeline", False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small diffusers folder of each kind."""
    root, made = tmp_path_factory.mktemp("folders"), {}
    for name, (arch, changes, pipeline, _) in _SMALL.items():
        made[name] = root / name
        with changed(arch, changes):
            sample.write_sample(arch, made[name])
        index = json.loads((made[name] / "model_index.json").read_text()) | {"_class_name": pipeline}
        (made[name] / "model_index.json").write_text(json.dumps(index))
    return made


def _tensors(single: SingleFile, name: str, wanted: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Require that each tensor of a component is equal in the single file."""
    weights = single.weights[name]
    for key, tensor in wanted.items():
        read = weights.read(weights.find(key, tuple(tensor.shape)), dtype)
        assert torch.equal(torch.from_numpy(read), tensor), (name, key)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", _SMALL)
def test_tensors_are_those_of_diffusers(name: str, dtype: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, (_, _, pipeline_class, open_clip) = folders[name], _SMALL[name]
    file = write_original(folder, tmp_path / "m.safetensors", dtype=getattr(torch, dtype), open_clip=open_clip)
    loader: Any = getattr(diffusers, pipeline_class)
    converted = loader.from_single_file(str(file), config=str(folder), local_files_only=True)
    with open_single_file(file, folder) as single:
        assert single.folder.class_name == pipeline_class
        compared = [each for each in single.weights if getattr(converted, each) is not None]
        assert compared == [each for each in ("unet", "text_encoder", "text_encoder_2", "vae") if each in compared]
        assert len(compared) == {"xl": 4}.get(name, 3)
        for component in compared:
            _tensors(single, component, getattr(converted, component).state_dict(), dtype)
        for spec in family_of(single.folder).components:  # no tensor is missing, none is left over
            plan_component(single.folder, spec, (), single=single)


def _stored(shapes: Mapping[str, tuple[int, ...]]) -> StoredTensors:
    return cast(StoredTensors, SimpleNamespace(path=Path("m"), shapes=shapes))


def _shapes(weights: RenamedWeights) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix("text_model."): source.shape for name, source in weights.sources.items()}


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl", "sdxl-refiner"])
def test_published_sizes(name: str) -> None:
    """Each parameter of the published pipelines is found, and the configurations are the published ones."""
    architecture = ARCHITECTURES[name]
    kind = next(kind for kind in KINDS if kind.published is architecture)
    networks = {key: sample.build_network(spec).state_dict() for key, spec in architecture.networks.items()}
    unet, vae = architecture.networks["unet"].config, architecture.networks["vae"].config
    # The layout of the original files, with the name of each parameter, and with its tensor.
    names = {f"{_U}{key}": each for key, each in original_unet({key: key for key in networks["unet"]}, unet).items()}
    names |= {f"vae.{key}": each for key, each in original_vae({key: key for key in networks["vae"]}).items()}
    tensors = {f"{_U}{key}": each for key, each in original_unet(networks["unet"], unet).items()}
    tensors |= {f"vae.{key}": each for key, each in original_vae(networks["vae"]).items()}
    for encoder in kind.encoders:
        original = original_open_clip if encoder.is_open_clip else original_clip
        tensors |= {encoder.prefix + key: each for key, each in original(networks[encoder.name]).items()}
    shapes = {key: tuple(each.shape) for key, each in tensors.items()}
    file = _stored(shapes)
    found = {"unet": unet_weights(file, has_sizes=kind.sizes > 0), "vae": vae_weights(file, "vae.")}
    mapping = {source.key: key for weights in found.values() for key, source in weights.sources.items()}
    assert mapping == names
    found |= {encoder.name: text_encoder_weights(file, encoder) for encoder in kind.encoders}
    for component, weights in found.items():
        wanted = {key.removeprefix("text_model."): tuple(each.shape) for key, each in networks[component].items()}
        assert _shapes(weights) == wanted, component

    pooled = networks["text_encoder_2"]["text_projection.weight"].shape[0] if kind.sizes else None
    assert unet_config(_shapes(found["unet"]), unet, pooled, kind.sizes) == unet
    assert vae_config(_shapes(found["vae"]), vae) == vae
    for encoder in kind.encoders:
        of_text, published = _shapes(found[encoder.name]), architecture.networks[encoder.name].config
        assert text_encoder_config(of_text, published, encoder.unused) == published
        last = f"encoder.layers.{published['num_hidden_layers']}.layer_norm1.weight"
        longer = text_encoder_config(of_text | {last: (1,)}, published, encoder.unused)
        assert longer["num_hidden_layers"] == published["num_hidden_layers"] + 1 - encoder.unused


def test_tensors_that_the_converters_require() -> None:
    encoder = next(each for each in KINDS if each.title == "Stable Diffusion 2").encoders[0]
    for shapes in ({"text_projection": ()}, {"transformer.resblocks.0.attn.in_proj_weight": ()}):
        with refused(WeightsError, "m lacks a tensor of the text_encoder, or one has too few axes"):
            text_encoder_weights(_stored({encoder.prefix + key: shape for key, shape in shapes.items()}), encoder)
    with refused(WeightsError, "m lacks a tensor of the unet", "label_emb.0.0.weight"):
        unet_weights(_stored({f"{_U}time_embed.0.weight": (4, 4)}), has_sizes=True)
    many = {f"{_U}input_blocks.{number}.0.in_layers.2.weight": (4, 4) for number in range(10**5)}
    with refused(WeightsError, "m has a unet of 100000 blocks"):
        unet_weights(_stored(many), has_sizes=False)


def test_sizes_follow_from_shapes(folders: dict[str, Path], tmp_path: Path) -> None:
    """Without configurations in `--config`, everything but heads and groups equals the small pipeline's."""
    bare = tmp_path / "bare"
    for folder in sorted(folders["xl"].glob("tokenizer*")):
        shutil.copytree(folder, bare / folder.name)
    with open_single_file(write_original(folders["xl"], tmp_path / "m.safetensors"), bare) as single:
        for name in single.weights:
            made = json.loads((single.configs[name] / "config.json").read_text())
            wanted = json.loads((folders["xl"] / name / "config.json").read_text())
            differing = {key for key in wanted if made[key] != wanted[key]}
            assert differing <= {"num_attention_heads", "norm_num_groups", "sample_size", "projection_dim"}, name
        assert "EulerDiscreteScheduler" in (single.folder.path / "scheduler" / "scheduler_config.json").read_text()
        assert single.folder.class_name == "StableDiffusionXLPipeline"


@pytest.mark.parametrize("marks", [[], ["v_pred"], ["v_pred", "ztsnr"]])
def test_marks_of_v_prediction(marks: list[str], folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["xl"], tmp_path / "folder")
    shutil.rmtree(folder / "scheduler")
    file = write_original(folder, tmp_path / "m.safetensors", extra={mark: torch.zeros(0) for mark in marks})
    with open_single_file(file, folder) as single:
        scheduler = single.folder.config("scheduler", "scheduler_config.json")
    assert scheduler["prediction_type"] == ("v_prediction" if marks else "epsilon")
    assert scheduler["rescale_betas_zero_snr"] == ("ztsnr" in marks)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "model_index.json"
    }


def test_graphs_are_those_of_the_folder(
    nano: Path, nano_exported: Path, pipelines: PipelineCache, tmp_path: Path
) -> None:
    out, file = tmp_path / "out", write_original(nano, tmp_path / "m.safetensors")
    with pipelines.reusing_components(nano, fresh={"unet", "vae_decoder"}):
        assert main(["export", "-m", str(file), "-o", str(out), "--config", str(nano)]) == 0
    assert _contents(out) == _contents(nano_exported)
    ours, wanted = (json.loads((folder / "model_index.json").read_text()) for folder in (out, nano_exported))
    assert ours == wanted


def test_vae_of_its_own(nano: Path, tmp_path: Path) -> None:
    file = write_original(nano, tmp_path / "m.safetensors", vae=False)
    published = load_file(nano / "vae" / "diffusion_pytorch_model.safetensors")
    bare = tmp_path / "bare"
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(nano / name, bare / name)
    shutil.copytree(nano / "vae", bare / "vae", ignore=shutil.ignore_patterns("*.safetensors"))
    with (
        refused(WeightsError, "m.safetensors has no autoencoder (VAE)", "pass --vae FILE"),
        open_single_file(file, bare),
    ):
        pass
    layouts = {
        "diffusers": published,
        "old": {key.replace(".to_q.", ".query.").replace("to_out.0", "proj_attn"): e for key, e in published.items()},
        "original": {key: each.contiguous() for key, each in original_vae(published).items()},
        "prefixed": {f"first_stage_model.{key}": each.contiguous() for key, each in original_vae(published).items()},
    }
    for layout, tensors in layouts.items():
        save_file({key: each + 1 for key, each in tensors.items()}, tmp_path / f"{layout}.safetensors")
        with open_single_file(file, bare, tmp_path / f"{layout}.safetensors") as single:
            _tensors(single, "vae", {key: each + 1 for key, each in published.items()}, "float32")
    with open_single_file(file, nano) as single:  # the folder's own
        _tensors(single, "vae", published, "float32")
    save_file(original_clip(load_file(nano / "text_encoder" / "model.safetensors")), tmp_path / "text.safetensors")
    with refused(WeightsError, "text.safetensors has no complete autoencoder", "AutoencoderKL"):
        export_pipeline(file, tmp_path / "out", config=bare, vae=tmp_path / "text.safetensors")
    with refused(WeightsError, "missing.safetensors is not a file"):
        export_pipeline(file, tmp_path / "out", config=bare, vae=tmp_path / "missing.safetensors")


def test_pickles(nano: Path, tmp_path: Path) -> None:
    tensors = load_file(write_original(nano, tmp_path / "m.safetensors"))
    torch.save({"state_dict": tensors | {"n": 3}, "global_step": 7}, tmp_path / "m.ckpt")
    with refused(WeightsError, "m.ckpt is a pickle", "--allow_pickle all"):
        export_pipeline(tmp_path / "m.ckpt", tmp_path / "out", config=nano)
    with open_single_file(tmp_path / "m.ckpt", nano, allow_pickle=["all"]) as single:
        _tensors(single, "unet", load_file(next((nano / "unet").glob("*.safetensors"))), "float32")
    torch.save({"state_dict": tensors, "callback": Path}, tmp_path / "code.ckpt")
    with refused(WeightsError, "code.ckpt contains more than named tensors", "convert it to safetensors"):
        export_pipeline(tmp_path / "code.ckpt", tmp_path / "out", config=nano, allow_pickle=["all"])


_X = torch.zeros(4, 4, 3, 3)
_STRANGERS: Mapping[str, tuple[Mapping[str, torch.Tensor], str, str]] = {
    "lora": ({"lora_unet_down_blocks_0_attentions_0.lora_up.weight": _X}, "is a LoRA", "load_lora_weights"),
    "diffusers lora": ({"unet.down_blocks.0.attentions.0.to_q.lora_A.weight": _X}, "is a LoRA", "load_lora_weights"),
    "unet": ({"down_blocks.0.resnets.0.conv1.weight": _X}, "is a UNet without text encoders", "pass the checkpoint"),
    "original unet": ({"input_blocks.0.0.weight": _X}, "is a UNet without text encoders", "pass the checkpoint"),
    "prefixed unet": ({"model.diffusion_model.input_blocks.0.0.weight": _X}, "no complete text encoders", "all"),
    "vae": ({"encoder.conv_in.weight": _X}, "is an autoencoder (VAE)", "--vae"),
    "vae of a checkpoint": ({"first_stage_model.decoder.conv_in.weight": _X}, "is an autoencoder (VAE)", "--vae"),
    "text encoder": ({"text_model.final_layer_norm.weight": _X}, "is a text encoder", "pass a checkpoint"),
    "controlnet": ({"control_model.input_blocks.0.0.weight": _X}, "is a ControlNet", "--controlnet"),
    "flux": ({"model.diffusion_model.double_blocks.0.img_attn.proj.weight": _X}, "Flux", "pass a checkpoint"),
    "sd3": ({"model.diffusion_model.joint_blocks.0.x.weight": _X}, "Stable Diffusion 3", "pass a checkpoint"),
    "embedding": ({"emb_params": _X}, "is a textual inversion", "before the export"),
    "adapter": ({"ip_adapter.1.to_k_ip.weight": _X}, "is an IP-Adapter", "--ip_adapter"),
    "unknown": ({"a.weight": _X}, "has tensors of an unknown model, such as a.weight", "pass a checkpoint"),
    "empty": ({}, "has no tensors", "pass a checkpoint"),
}


@pytest.mark.parametrize("name", _STRANGERS)
def test_other_files_are_named(name: str, tmp_path: Path) -> None:
    tensors, found, remedy = _STRANGERS[name]
    save_file(dict(tensors), tmp_path / "m.safetensors")
    with refused(WeightsError, found, remedy):
        export_pipeline(tmp_path / "m.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{_U}middle_block.1.transformer_blocks.0.norm9.weight": _X}, ["norm9.weight, which the unet does not have"]),
        ({f"{_U}novel.weight": _X}, ["novel.weight, which is no layer of the unet"]),
        ({f"{_U}out.2.weight": torch.zeros(4, 5, 3, 3)}, ["out.2.weight with shape (4, 5, 3, 3)", "conv_out"]),
        ({f"{_U}time_embed.0.weight": None}, ["no tensor for time_embedding.linear_1.weight of the unet"]),
        ({"first_stage_model.quant_conv.bias": None}, ["no tensor for quant_conv.bias of the vae"]),
        ({f"{_U}input_blocks.0.0.weight": torch.zeros(32, 8, 3, 3)}, ["8 input channels", "4 or, for inpainting, 9"]),
        ({f"{_U}input_blocks.0.0.weight": torch.zeros(())}, ["0 input channels"]),
        ({f"{_U}output_blocks.0.5.weight": _X}, ["output_blocks.0.5.weight, which is no layer of the unet"]),
        ({"first_stage_model.decoder.novel.weight": _X}, ["decoder.novel.weight, which is no layer of the vae"]),
        ({"first_stage_model.decoder.mid.attn_1.q.weight": _X}, ["attn_1.q.weight with shape (4, 4, 3, 3)", "vae"]),
        ({"edm_mean": torch.zeros(4)}, ["noise levels of EDM"]),
    ],
)
def test_other_layers(change: Mapping[str, torch.Tensor | None], words: list[str], nano: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {**load_file(write_original(nano, tmp_path / "whole.safetensors")), **change}
    save_file({key: each for key, each in tensors.items() if each is not None}, tmp_path / "m.safetensors")
    with refused(WeightsError, *words):
        export_pipeline(tmp_path / "m.safetensors", tmp_path / "out", config=nano)
    assert not (tmp_path / "out").exists()


def test_broken_files(nano: Path, tmp_path: Path) -> None:
    whole = write_original(nano, tmp_path / "m.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        with refused(WeightsError, "cut.safetensors cannot be read"):
            export_pipeline(tmp_path / "cut.safetensors", tmp_path / "out", config=nano)


def test_a_billion_layers(nano: Path, tmp_path: Path) -> None:
    """Few keys can describe many layers: as many blocks in each level as in the first one."""
    tensors = load_file(write_original(nano, tmp_path / "whole.safetensors"))
    tensors = {key: each for key, each in tensors.items() if not key.startswith(f"{_U}input_blocks.1.")}
    small = torch.zeros(32, 32)
    for number in range(1, 300):
        tensors[f"{_U}input_blocks.{number}.0.in_layers.2.weight"] = small.clone()
        tensors[f"{_U}input_blocks.1.1.transformer_blocks.{number - 1}.attn1.to_q.weight"] = small.clone()
    save_file(tensors, tmp_path / "m.safetensors")
    bare = shutil.copytree(nano, tmp_path / "bare", ignore=shutil.ignore_patterns("unet"))
    (bare / "unet").mkdir()
    with refused(WeightsError, "a unet whose sizes do not fit together", "far more layers than there are weights"):
        export_pipeline(tmp_path / "m.safetensors", tmp_path / "out", config=bare)


def test_folders_that_do_not_fit(nano: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_original(nano, tmp_path / "m.safetensors")

    def export(error: type[SdonnxError], *words: str, **options: Any) -> None:
        with refused(error, *words):
            export_pipeline(file, tmp_path / "out", **options)

    export(FolderError, "is Stable Diffusion 1, and", "a StableDiffusionXLPipeline with text", config=folders["xl"])
    export(FolderError, "nowhere is not a folder", config=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(nano, tmp_path / "broken")
    for file_name in ("tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json", "unet/config.json"):
        text = (broken / file_name).read_text()
        (broken / file_name).write_text("[")
        export(FolderError, f"{broken / file_name} cannot be read", config=broken)
        (broken / file_name).write_text(text)
    edit_json(broken / "unet" / "config.json", layers_per_block=2)
    export(WeightsError, "m.safetensors has no tensor for", "of the unet", "--config FOLDER", config=broken)
    edit_json(broken / "model_index.json", vae=["diffusers", "AutoencoderTiny"])
    export(FolderError, f"{broken / 'model_index.json'} says ['diffusers', 'AutoencoderTiny'] for vae", config=broken)
    export(FolderError, "empty has no tokenizer", "vocab.json", config=tmp_path / "empty")
    export(OptionError, "--variant fp16 with the file", variant="fp16")
    with refused(OptionError, "--vae with", "a single-file checkpoint"):
        export_pipeline(nano, tmp_path / "out", vae=file)
    assert main(["export", "-m", str(file), "-o", str(tmp_path / "out")]) == 2
    export(FolderError, "has no tokenizer, and stable-diffusion-v1-5/", "HF_HUB_OFFLINE", "pass --config FOLDER")
    assert not (tmp_path / "out").exists()


def test_tokenizers_of_the_hub(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    file, asked = write_original(nano, tmp_path / "m.safetensors"), []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(nano)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with open_single_file(file) as single:
        assert (single.folder.path / "tokenizer" / "tokenizer.json").read_bytes()
        assert single.folder.class_name == "StableDiffusionPipeline"
    with open_single_file(file, "owner/name") as single:
        assert single.configs["unet"] == nano / "unet"
    assert asked[0] == ("stable-diffusion-v1-5/stable-diffusion-v1-5", ["tokenizer/*"])
    assert asked[1][0] == "owner/name"
    assert not any(pattern.endswith(("safetensors", "bin")) for pattern in asked[1][1])


def test_kinds_by_keys_and_shapes() -> None:
    def kind(channels: int, *keys: str) -> tuple[str, str]:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(keys, (1,))
        found, pipeline = kind_of(shapes | {f"{_U}input_blocks.0.0.weight": (320, channels, 3, 3)}, Path("m"))
        return found.title, pipeline

    first, second = "conditioner.embedders.0.", "conditioner.embedders.1.model.x"
    inpainting = "StableDiffusionInpaintPipeline"
    assert kind(4, "cond_stage_model.transformer.x") == ("Stable Diffusion 1", "StableDiffusionPipeline")
    assert kind(4, "cond_stage_model.model.x") == ("Stable Diffusion 2", "StableDiffusionPipeline")
    assert kind(9, "cond_stage_model.model.x") == ("Stable Diffusion 2", inpainting)
    assert kind(4, first + "transformer.x", second) == ("Stable Diffusion XL", "StableDiffusionXLPipeline")
    assert kind(9, first + "transformer.x", second)[1] == "StableDiffusionXLInpaintPipeline"
    refiner = ("the refiner of Stable Diffusion XL", "StableDiffusionXLImg2ImgPipeline")
    assert kind(4, first + "model.x") == refiner
    with refused(WeightsError, "no complete text encoders"):
        kind(4, first + "transformer.x")
    with refused(WeightsError, "9 input channels", "expected 4 input channels"):
        kind(9, first + "model.x")
