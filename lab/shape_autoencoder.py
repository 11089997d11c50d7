"""Train the autoencoder that both pipelines share, and encode drawings with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shape_drawing import SceneTable, draw, place
from torch.nn import functional as F  # noqa: N812
from training_step import Budget, CapturedStep, make_optimizer, set_learning_rate

__all__ = ["encode_drawings", "initialized", "normalize_latents", "train_autoencoder"]

_LEARNING_RATE, _WARMUP_STEPS = 1.5e-3, 200
_ABSOLUTE_WEIGHT = 0.5  # of the absolute error next to the squared one: sharp outlines
_KL_WEIGHT = 1e-4  # of the mean divergence per latent: decodes alike for latents that differ by about 0.05
_ENCODING_BATCH = 1024


def initialized(network: Any, device: str) -> Any:
    """Return a network of the meta device on `device`, with the initial weights of its classes."""
    build = getattr(type(network), "from_config", None) or type(network)
    return build(network.config).to(device)


def train_autoencoder(
    network: Any,
    table: SceneTable,
    device: str,
    budget: Budget,
    batch: int,
    seed: int,
    compiled: bool,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Train AutoencoderKL on drawings of the scenes, and normalize its latents.

    Args:
        network: the autoencoder, on `device`.
        table: the scenes to draw.
        device: "cuda" or "cpu".
        budget: length of the training.
        batch: drawings per step.
        seed: seed of drawings and noise.
        compiled: compile the network with torch.compile.
        report: receives the step, the seconds and the mean errors now and then.
    """
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = make_optimizer(list(network.parameters()), 0.01)
    images = torch.zeros(batch, 3, network.config.sample_size, network.config.sample_size, device=device)
    side = network.config.sample_size // 2 ** (len(network.config.block_out_channels) - 1)
    noise = torch.zeros(batch, network.config.latent_channels, side, side, device=device)
    errors = torch.zeros(2, device=device)
    encode = torch.compile(network._encode) if compiled else network._encode
    decode = torch.compile(network.decoder) if compiled else network.decoder

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            mean, log_variance = encode(images).float().chunk(2, 1)
            log_variance = log_variance.clamp(-20, 10)
            latents = mean + noise * (0.5 * log_variance).exp()
            decoded = decode(network.post_quant_conv(latents)).float()
        squared, absolute = F.mse_loss(decoded, images), F.l1_loss(decoded, images)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        (squared + _ABSOLUTE_WEIGHT * absolute + _KL_WEIGHT * divergence).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        errors.add_(torch.stack([squared.detach(), absolute.detach()]))

    def fill() -> None:
        rows = torch.randint(len(table.relations), (batch,), generator=generator, device=device)
        images.copy_(draw(place(table, rows, generator)))
        noise.normal_(generator=generator)

    fill()
    captured = CapturedStep(step, device)
    captured.prepare()
    if captured.error:
        report({"not captured": 1.0})
    errors.zero_()
    since, interval = 0, 250
    while budget.progress < 1:
        set_learning_rate(optimizer, budget.learning_rate(_LEARNING_RATE, _WARMUP_STEPS))
        captured(fill)
        budget.done += 1
        if budget.done % interval == 0 or budget.progress >= 1:
            squared, absolute = (errors / (budget.done - since)).tolist()
            report({"step": budget.done, "squared": squared, "absolute": absolute})
            errors.zero_()
            since = budget.done
    if device == "cuda":
        torch.cuda.synchronize()
    normalize_latents(network, table, generator)


@torch.no_grad()
def normalize_latents(
    network: Any, table: SceneTable, generator: torch.Generator, count: int = _ENCODING_BATCH
) -> None:
    """Change the layers next to the latents so that each channel has mean 0 and variance 1; images do not change.

    Args:
        network: the autoencoder, which is changed.
        table: the scenes to draw.
        generator: the generator that chooses scenes and positions, on the network's device.
        count: number of drawings to measure the mean and the variance on.
    """
    rows = torch.randint(len(table.relations), (count,), generator=generator, device=generator.device)
    latents = encode_drawings(network, table, rows, generator).float()
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    channels = len(mean)
    into, out = network.quant_conv, network.post_quant_conv
    into.weight[:channels] /= std[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()
    out.bias += (out.weight[:, :, 0, 0] * mean).sum(1)
    out.weight *= std[None, :, None, None]


@torch.no_grad()
def encode_drawings(network: Any, table: SceneTable, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the latents (N,C,H,W) of drawings of these rows of the table, in bfloat16: means, without noise."""
    latents = []
    device = rows.device.type
    for part in rows.split(_ENCODING_BATCH):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            encoded = network.encode(draw(place(table, part, generator))).latent_dist.mean
        latents.append(encoded.to(torch.bfloat16))
    return torch.cat(latents)
