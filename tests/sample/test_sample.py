"""Sample pipelines, loaded with diffusers, transformers and tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from support.diffusers_pipelines import in_diffusers
from support.pipelines import largest_file

from sdonnx.errors import OptionError, OutputError
from sdonnx.sample.architecture import WORDS, T5TokenizerSpec, TokenizerSpec
from sdonnx.sample.sample_weights import seeded_weights
from sdonnx.sample.shapes.shape_architectures import SHIPPED
from sdonnx.sample.tokenizer import build_tokenizer, save_tokenizer
from sdonnx.sample.write_sample import ARCHITECTURES, build_network, write_sample

WEIGHTS = {
    "unet": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
PROMPTS = ["a photo of an astronaut riding a horse on mars", "", "Ünïcode & 4k, it's GREAT!", "the <|endoftext|> of it"]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "tiny"
    write_sample("tiny", out)
    return out


@pytest.fixture(scope="module")
def pipeline(tiny: Path) -> Any:
    return in_diffusers(tiny)


def test_diffusers_generates_an_image(pipeline: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    image = np.array(pipeline("a red fox", num_inference_steps=4, generator=generator).images[0])
    assert image.shape == (128, 128, 3)
    assert image.std() > 10
    assert ((image == 0) | (image == 255)).mean() < 0.01


def test_folder_is_complete(tiny: Path, pipeline: Any) -> None:
    assert json.loads((tiny / "model_index.json").read_text())["safety_checker"] == [None, None]
    assert pipeline.vae_scale_factor == 8
    assert isinstance(pipeline.scheduler, diffusers.PNDMScheduler)
    assert {path.name for path in (tiny / "tokenizer").iterdir()} >= {
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    assert [path for path in tiny.rglob("*") if path.suffix in {".bin", ".pt", ".ckpt"}] == []


@pytest.mark.parametrize(
    ("component", "network_class"),
    [
        ("unet", diffusers.UNet2DConditionModel),
        ("vae", diffusers.AutoencoderKL),
        ("text_encoder", transformers.CLIPTextModel),
    ],
)
def test_libraries_load_every_weight(tiny: Path, component: str, network_class: Any) -> None:
    network, report = network_class.from_pretrained(tiny / component, output_loading_info=True)
    assert [list(report[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [[], [], []]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


# Published counts; text encoders without position_ids, which is a constant.
@pytest.mark.parametrize(
    ("arch", "counts"),
    [
        ("sd15", {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480}),
        ("sd21", {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}),
        ("sd21-base", {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}),
        (
            "sdxl",
            {"unet": 2_567_463_684, "vae": 83_653_863, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840},
        ),
    ],
)
def test_parameter_counts_match_the_published_ones(arch: str, counts: dict[str, int]) -> None:
    networks = {name: build_network(spec) for name, spec in ARCHITECTURES[arch].networks.items()}
    assert {name: sum(p.numel() for p in net.parameters()) for name, net in networks.items()} == counts


@pytest.mark.parametrize(
    ("arch", "scheduler", "prediction_type", "pixels"),
    [
        ("tiny", "PNDMScheduler", "epsilon", 128),
        ("sd15", "PNDMScheduler", "epsilon", 512),
        ("sd21", "DDIMScheduler", "v_prediction", 768),
        ("sd21-base", "PNDMScheduler", "epsilon", 512),
    ],
)
def test_scheduler_and_size_match_the_published_ones(
    arch: str, scheduler: str, prediction_type: str, pixels: int
) -> None:
    spec = ARCHITECTURES[arch].scheduler
    assert spec.name == scheduler
    instance = getattr(diffusers, spec.name).from_config(dict(spec.config))
    assert instance.config.prediction_type == prediction_type
    # alpha_0 and alpha_T of Stable Diffusion's schedule, as in CompVis' v1-inference.yaml.
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alphas = np.cumprod(1 - betas)
    np.testing.assert_allclose(instance.alphas_cumprod[[0, -1]].numpy(), alphas[[0, -1]], rtol=1e-4)
    assert ARCHITECTURES[arch].networks["unet"].config["sample_size"] * 8 == pixels


def test_weights_depend_only_on_the_seed(tiny: Path, tmp_path: Path) -> None:
    write_sample("tiny", tmp_path / "again", seed=0)
    write_sample("tiny", tmp_path / "other", seed=1)
    first, again, other = digests(tiny), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert again == first
    differing = {name for name in first if other[name] != first[name]}
    assert differing == {f"{component}/{file}" for component, file in WEIGHTS.items()}


@pytest.mark.weekly
def test_weights_do_not_depend_on_processor_or_threads() -> None:
    """torch has two code paths for random numbers; a normal distribution would differ between them."""
    code = (
        "import hashlib, torch\n"
        "from sdonnx.sample.write_sample import ARCHITECTURES, build_network\n"
        "from sdonnx.sample.sample_weights import seeded_weights\n"
        "weights = seeded_weights('vae', build_network(ARCHITECTURES['tiny'].networks['vae']), 7)\n"
        "print(hashlib.sha256(b''.join(weights[k].numpy().tobytes() for k in sorted(weights))).hexdigest())"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    weights = seeded_weights("vae", build_network(ARCHITECTURES["tiny"].networks["vae"]), 7)
    joined = b"".join(weights[key].numpy().tobytes() for key in sorted(weights))
    assert result.stdout.strip() == hashlib.sha256(joined).hexdigest()


@pytest.mark.parametrize("component", WEIGHTS)
def test_biases_are_not_zero_and_parameters_differ(tiny: Path, component: str) -> None:
    weights = load_file(tiny / component / WEIGHTS[component])
    biases = [tensor for name, tensor in weights.items() if name.endswith("bias")]
    assert len(biases) > 10
    assert all(torch.all(bias != 0) for bias in biases)
    assert all(0.03 < bias.std() < 0.2 for bias in biases)
    assert len({tensor.flatten()[:3].numpy().tobytes() for tensor in weights.values()}) == len(weights)


@torch.no_grad()
def test_activations_fit_float16_and_inputs_matter(pipeline: Any) -> None:
    peaks: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                peaks[name] = max(peaks.get(name, 0.0), output.abs().max().item())

        return hook

    networks = {name: getattr(pipeline, name) for name in WEIGHTS}
    hooks = [
        module.register_forward_hook(note(f"{name}.{path}"))
        for name, network in networks.items()
        for path, module in network.named_modules()
    ]
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 16, 16, generator=generator) * 10  # the scale that latents grow to in the last steps
    ids = pipeline.tokenizer(["a red fox", "an old castle"], padding="max_length", return_tensors="pt").input_ids
    fox, castle = pipeline.text_encoder(ids)[0].split(1)
    noise = pipeline.unet(latents, torch.tensor(500), fox)[0]
    for changed in (pipeline.unet(latents, torch.tensor(500), castle)[0], pipeline.unet(latents, 1, fox)[0]):
        assert (changed - noise).norm() > 0.1 * noise.norm()
    image = pipeline.vae.decode(latents / 0.18215)[0]
    pipeline.vae.encode(image.clamp(-1, 1))
    for hook in hooks:
        hook.remove()
    assert len(peaks) > 200
    assert max(peaks.values()) < 500  # float16's maximum is 65504
    assert 0.1 < noise.std() < 1


TOKENIZERS = [(arch, name, spec) for arch, each in ARCHITECTURES.items() for name, spec in each.tokenizers.items()]


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch, name, spec in TOKENIZERS if isinstance(spec, TokenizerSpec)]
)
def test_clip_tokenizer_loads_equally_in_every_library(arch: str, name: str, tmp_path: Path) -> None:
    spec = ARCHITECTURES[arch].tokenizers[name]
    save_tokenizer(build_tokenizer(spec), tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, transformers.CLIPTokenizer)
    # The published ones have 49,408 tokens.
    size = 704 if arch in SHIPPED else 49408
    assert (len(loaded), loaded.model_max_length) == (size, 77)
    # OpenCLIP pads with "!", CLIP with the last token.
    bos, eos = size - 2, size - 1
    pad_id = 0 if arch.startswith("sd21") or name == "tokenizer_2" else eos
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (bos, eos, pad_id)
    encoded = [loaded(prompt).input_ids for prompt in PROMPTS]
    assert [ids[0] for ids in encoded] == [bos] * len(PROMPTS)
    assert [ids[-1] for ids in encoded] == [eos] * len(PROMPTS)
    padded = loaded(PROMPTS[0], padding="max_length").input_ids
    assert padded == encoded[0] + [pad_id] * (77 - len(encoded[0]))

    from_json = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [from_json.encode(prompt).ids for prompt in PROMPTS] == encoded
    older = transformers.CLIPTokenizer(
        vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"), pad_token=loaded.pad_token
    )
    assert [older(prompt).input_ids for prompt in PROMPTS] == encoded
    special = json.loads((tmp_path / "special_tokens_map.json").read_text())
    assert special == loaded.special_tokens_map

    loaded.save_pretrained(tmp_path / "again")
    again = transformers.CLIPTokenizer.from_pretrained(tmp_path / "again")
    assert [again(prompt).input_ids for prompt in PROMPTS] == encoded


@pytest.mark.parametrize(("arch", "spec"), [(arch, spec) for arch, _, spec in TOKENIZERS if arch.startswith("pixart")])
def test_t5_tokenizer_loads_equally_in_every_library(arch: str, spec: T5TokenizerSpec, tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(spec), tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, transformers.T5Tokenizer)
    assert (len(loaded), loaded.model_max_length) == (32100, 300 if "sigma" in arch else 120)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    encoded = loaded("a red fox zq").input_ids
    assert loaded.convert_ids_to_tokens(encoded)[:3] == ["\u2581a", "\u2581red", "\u2581fox"]
    assert (encoded[-1], len(encoded)) == (1, 7)  # an unknown word is split into characters
    padded = loaded("a red fox zq", padding="max_length").input_ids
    assert padded == encoded + [0] * (loaded.model_max_length - len(encoded))
    from_json = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert from_json.encode("a red fox zq").ids == encoded


def test_tokenizer_splits_only_unknown_words(pipeline: Any) -> None:
    tokenizer = pipeline.tokenizer
    assert {len(tokenizer(word).input_ids) for word in WORDS} == {3}
    assert len({tokenizer(word).input_ids[1] for word in WORDS}) == len(WORDS)
    text = "zyzzyva 東京 ñandú 😀"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        write_sample("sd16", tmp_path / "out")
    assert all(name in str(caught.value) for name in ["sd16", *ARCHITECTURES])
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("kept")
    with pytest.raises(OutputError, match="not empty"):
        write_sample("tiny", tmp_path / "out")
    assert digests(tmp_path) == {"out/precious.txt": hashlib.sha256(b"kept").hexdigest()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_write_leaves_no_files(error: type[BaseException], tmp_path: Path) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith("vae"):
            raise error

    with pytest.raises(error):
        write_sample("tiny", tmp_path / "out", progress=interrupt)
    assert "unet: 77.6 million parameters" in lines
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size_bytes", "last"), [(1_000_000, "tokenizer"), (100_000_000, "unet")])
def test_full_disk_is_reported_and_leaves_no_files(size_bytes: int, last: str, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(OutputError, match="free space"), largest_file(size_bytes):
        write_sample("tiny", tmp_path / "out", progress=lines.append)
    assert lines[-1].startswith(last)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_table_needs_no_torch() -> None:
    code = "import sys, sdonnx.sample.write_sample; print({'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
