#!/usr/bin/env python3
"""Train the sample pipelines `shapes` and `shapes-dit` on drawings, and measure their accuracy.

    python lab/train_shapes.py -o trained                     # one GPU, 15 minutes at most
    python lab/train_shapes.py -o trained --device cpu --dry_run

The autoencoder is trained first. Then both denoisers are trained at the same time, each with its text encoder, on
latents of drawings. The result is a diffusers folder in float16 for each pipeline, `result.json` with the curve and the
accuracy on held-out captions, and `samples.png`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from denoiser_training import CaptionPool, DenoiserTraining
from shape_autoencoder import encode_drawings, initialized, train_autoencoder
from shape_drawing import SceneTable
from shape_evaluation import contact_sheet, generate, summarize_relations
from training_step import Budget

from sdonnx.sample.architecture import Architecture, ClassSpec
from sdonnx.sample.shapes.shape_architectures import TRAINED
from sdonnx.sample.shapes.shape_judge import held_out_captions, score_images, summarize
from sdonnx.sample.shapes.shape_scenes import all_scenes, captions, is_held_out
from sdonnx.sample.tokenizer import build_tokenizer, save_tokenizer
from sdonnx.sample.write_sample import build_network

SINGLE_SHARE = 0.15  # of the training's drawings; the others are divided equally between the relations
EVALUATION_SEED = 1000
FINAL_SECONDS = 30  # for the evaluation of each pipeline at the end, with --total_seconds
SHEET_PROMPTS = 16


def arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--arch", nargs="+", default=list(TRAINED), choices=list(TRAINED), help="pipelines to train")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, drawings and noise (default: 0)")
    parser.add_argument("--vae_seconds", type=float, default=90, help="duration of the autoencoder's training")
    parser.add_argument("--vae_steps", type=int, help="number of its steps, instead of a duration")
    parser.add_argument("--seconds", type=float, default=600, help="duration of the denoisers' training")
    parser.add_argument("--steps", type=int, help="number of its steps, instead of a duration")
    parser.add_argument("--total_seconds", type=float, help="duration of everything, at which training ends earlier")
    parser.add_argument("--vae_batch", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 512], help="batch of each pipeline")
    parser.add_argument("--drawings", type=int, default=1 << 19, help="number of encoded drawings")
    parser.add_argument("--compile", action="store_true", help="compile the networks with torch.compile")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run whose weights to continue from")
    parser.add_argument("--vae", type=Path, help="folder of a trained autoencoder to use")
    parser.add_argument("--prompts", type=int, default=2000, help="number of held-out captions to evaluate on")
    parser.add_argument("--points", type=int, default=4, help="evaluations on 240 captions during the training")
    parser.add_argument("--sampling_steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--dry_run", action="store_true", help="3 steps of small batches, to test the script")
    options = parser.parse_args()
    if options.dry_run:
        options.vae_steps, options.steps, options.vae_batch, options.batch = 3, 3, 8, [8] * len(options.arch)
        options.drawings, options.prompts, options.points, options.sampling_steps = 64, 12, 1, 3
    return options


class Log:
    """Prints lines with the time since the start, and keeps the records."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.records: list[dict[str, Any]] = []

    def __call__(self, part: str, values: Mapping[str, Any]) -> None:
        """Print and keep a record of a part of the training."""
        seconds = time.perf_counter() - self.started
        self.records.append({"part": part, "seconds": round(seconds, 2), **values})
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(f"{seconds:7.1f} s  {part}: {shown}", flush=True)


def new_network(spec: ClassSpec, device: str, seed: int) -> Any:
    """Return a network with the initial weights of its class, or of its authors' code for PixArt's transformer.

    Source: `initialize_weights` in PixArt-alpha's `diffusion/model/nets/PixArt.py`.
    """
    torch.manual_seed(seed)
    network: Any = initialized(build_network(spec), device).float()
    if spec.name == "UNet2DConditionModel":
        torch.nn.init.zeros_(network.conv_out.weight)
    if spec.name == "PixArtTransformer2DModel":
        for module in network.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
                torch.nn.init.zeros_(module.bias)
        for linear in (network.adaln_single.linear, *_two_layers(network.adaln_single.emb.timestep_embedder),
                       *_two_layers(network.caption_projection)):  # fmt: skip
            torch.nn.init.normal_(linear.weight, std=0.02)
        for block in network.transformer_blocks:
            torch.nn.init.zeros_(block.attn2.to_out[0].weight)
        torch.nn.init.zeros_(network.proj_out.weight)
    return network


def _two_layers(module: Any) -> tuple[Any, Any]:
    return module.linear_1, module.linear_2


def load_network(spec: ClassSpec, folder: Path, device: str) -> Any:
    """Return a network of an earlier run, in float32."""
    network_class: Any = type(build_network(spec))
    return network_class.from_pretrained(folder).float().to(device)


def make_pipeline(architecture: Architecture, components: Mapping[str, Any]) -> Any:
    """Return the pipeline of diffusers."""
    import diffusers

    pipeline = getattr(diffusers, architecture.pipeline)(**components, **architecture.options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(architecture: Architecture, components: Mapping[str, Any], folder: Path) -> None:
    """Write a pipeline in float16."""
    for name in architecture.networks:
        copy.deepcopy(components[name]).half().save_pretrained(folder / name)
    save_tokenizer(components["tokenizer"], folder / "tokenizer")
    components["scheduler"].save_pretrained(folder / "scheduler")
    make_pipeline(architecture, components).save_config(folder)


def rounded(network: Any) -> Any:
    """Return a float32 copy of a network with the weights that float16 holds."""
    return copy.deepcopy(network).half().float().eval()


@dataclass(frozen=True)
class Evaluation:
    """Images of held-out captions, and how many are right."""

    settings: dict[str, Any]
    accuracy: dict[str, dict[str, Any]]
    relations: dict[str, dict[str, Any]]
    prompts: tuple[str, ...]
    images: npt.NDArray[np.uint8]


class Run:
    """A run of the script."""

    def __init__(self, options: argparse.Namespace) -> None:
        import diffusers

        self.options, self.log = options, Log()
        self.device: str = options.device
        self.architectures = {name: TRAINED[name] for name in options.arch}
        self.tokenizers: dict[str, Any] = {}
        self.schedulers: dict[str, Any] = {}
        for name, architecture in self.architectures.items():
            self.tokenizers[name] = build_tokenizer(architecture.tokenizers["tokenizer"])
            scheduler = getattr(diffusers, architecture.scheduler.name)
            self.schedulers[name] = scheduler.from_config(dict(architecture.scheduler.config))
        self.autoencoder: Any = None
        self.trainings: dict[str, DenoiserTraining] = {}
        self.budget = Budget(1.0)

    def train_autoencoder(self) -> None:
        """Train the autoencoder, or load the one of an earlier run."""
        options = self.options
        spec = next(iter(self.architectures.values())).networks["vae"]
        folder = options.vae
        if folder is None and options.resume is not None:
            folder = options.resume / options.arch[0] / "vae"
        if folder is not None:
            self.autoencoder = load_network(spec, folder, self.device)
            return
        self.autoencoder = new_network(spec, self.device, options.seed)
        scenes = [scene for scene in all_scenes() if not is_held_out(scene)]
        budget = Budget(options.vae_seconds, options.vae_steps)
        train_autoencoder(
            self.autoencoder,
            SceneTable(scenes, self.device),
            self.device,
            budget,
            options.vae_batch,
            options.seed,
            options.compile,
            lambda values: self.log("vae", values),
        )

    def make_pool(self) -> CaptionPool:
        """Encode drawings of the scenes that are not held out, each with one of its captions."""
        pairs = [(text, scene) for scene in all_scenes() if not is_held_out(scene) for text in captions(scene)]
        table = SceneTable([scene for _, scene in pairs], self.device)
        generator = torch.Generator(self.device).manual_seed(self.options.seed + 1)
        groups = torch.bincount(table.relations + 1)
        shares = torch.full((len(groups),), (1 - SINGLE_SHARE) / (len(groups) - 1), device=self.device)
        shares[0] = SINGLE_SHARE
        weights = (shares / groups)[table.relations + 1]
        rows = torch.multinomial(weights, self.options.drawings, replacement=True, generator=generator)
        latents = encode_drawings(self.autoencoder, table, rows, generator)
        self.log("drawings", {"count": len(rows), "captions": len(pairs), "std": float(latents.float().std())})
        return CaptionPool(("", *(text for text, _ in pairs)), latents, rows + 1)

    def train_denoisers(self, pool: CaptionPool) -> None:
        """Train all denoisers, in turns of one step, and evaluate them now and then."""
        options = self.options
        for index, (name, architecture) in enumerate(self.architectures.items()):
            networks = {}
            for number, (part, spec) in enumerate(architecture.networks.items()):
                if part == "vae":
                    continue
                if options.resume is not None:
                    networks[part] = load_network(spec, options.resume / name / part, self.device)
                else:
                    networks[part] = new_network(spec, self.device, options.seed + 10 * index + number)
            text_encoder = networks.pop("text_encoder")
            (denoiser,) = networks.values()
            self.trainings[name] = DenoiserTraining(
                architecture,
                self.tokenizers[name],
                text_encoder,
                denoiser,
                self.schedulers[name],
                pool,
                self.device,
                options.batch[index],
                options.seed + 100 + index,
                options.compile,
            )
            self.log(name, {"captured": self.trainings[name].error or "yes"})
        seconds = options.seconds
        if options.total_seconds is not None:
            elapsed = time.perf_counter() - self.log.started
            seconds = min(seconds, options.total_seconds - FINAL_SECONDS * len(options.arch) - elapsed)
        self.budget = budget = Budget(seconds, options.steps)
        points = [(index + 1) / (options.points + 1) for index in range(options.points)]
        interval = 500
        while budget.progress < 1:
            for training in self.trainings.values():
                training.step(budget)
            budget.done += 1
            if budget.done % interval == 0 or budget.progress >= 1:
                for name, training in self.trainings.items():
                    self.log(name, {"step": budget.done, "loss": training.mean_loss()})
            if points and budget.progress >= points[0]:
                points.pop(0)
                for name in self.trainings:
                    self.evaluate(name, self.components(name), min(240, options.prompts))

    def components(self, name: str) -> dict[str, Any]:
        """Return the components of a pipeline, with the averaged weights that float16 holds, in float32."""
        text_encoder, denoiser = self.trainings[name].averaged()
        part = next(each for each in self.architectures[name].networks if each not in ("vae", "text_encoder"))
        networks = {"vae": self.autoencoder, "text_encoder": text_encoder, part: denoiser}
        others = {"tokenizer": self.tokenizers[name], "scheduler": copy.deepcopy(self.schedulers[name])}
        return {key: rounded(network) for key, network in networks.items()} | others

    def evaluate(self, name: str, components: Mapping[str, Any], count: int, **changes: float) -> Evaluation:
        """Generate images in float32 by diffusers and judge them."""
        options = self.options
        settings = {"steps": options.sampling_steps, "guidance_scale": options.guidance} | changes
        prompts = held_out_captions(count, EVALUATION_SEED)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        pipeline = make_pipeline(self.architectures[name], components)
        images = generate(pipeline, prompts, **settings, seed=EVALUATION_SEED, batch=250)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        scores = score_images(images, prompts)
        summary, relations = summarize(scores), summarize_relations(scores, prompts)
        named = summary | {f"relation {name}": values for name, values in relations.items()}
        shares = {measure: values["share"] for measure, values in named.items()}
        self.log(name, {"step": self.budget.done, "prompts": count, **settings, **shares})
        return Evaluation(settings, summary, relations, prompts, images)

    def finish(self) -> None:
        """Write the pipelines, the result and the samples."""
        options, output = self.options, self.options.output
        result: dict[str, Any] = {
            "command": sys.argv,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "seed": options.seed,
            "steps": self.budget.done,
            "pipelines": {},
        }
        made = {name: self.components(name) for name in self.architectures}
        for name, architecture in self.architectures.items():
            save_pipeline(architecture, made[name], output / name)
        sheets = {}
        for name, architecture in self.architectures.items():
            found = self.evaluate(name, made[name], options.prompts)
            counts = {
                part: sum(each.numel() for each in made[name][part].parameters()) for part in architecture.networks
            }
            result["pipelines"][name] = {
                "parameters": counts,
                "settings": found.settings,
                "accuracy": found.accuracy,
                "relations": found.relations,
            }
            # The first captions have one shape, the others two.
            chosen = [*range(4), *range(options.prompts - SHEET_PROMPTS + 4, options.prompts)]
            sheets[name] = ([found.prompts[index] for index in chosen], found.images[chosen])
            self.write(result)
        contact_sheet(sheets, 8).save(output / "samples.png", optimize=True)
        for name in () if options.dry_run else self.architectures:
            changes = ({"guidance_scale": 2.0}, {"guidance_scale": 7.5}, {"steps": 20}, {"steps": 50})
            others = [self.evaluate(name, made[name], min(240, options.prompts), **each) for each in changes]
            result["pipelines"][name]["others"] = [
                {"settings": each.settings, "accuracy": each.accuracy} for each in others
            ]
        self.write(result)

    def write(self, result: dict[str, Any]) -> None:
        """Write the result so far."""
        result["seconds"] = round(time.perf_counter() - self.log.started, 1)
        result["curve"] = self.log.records
        (self.options.output / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Train, evaluate and write."""
    options = arguments()
    if len(options.batch) < len(options.arch):
        raise SystemExit(f"{len(options.batch)} batches for {len(options.arch)} pipelines")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    options.output.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    run.log("start", {"device": options.device})
    run.train_autoencoder()
    run.autoencoder.eval().requires_grad_(False)
    run.train_denoisers(run.make_pool())
    run.finish()
    run.log("end", {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
