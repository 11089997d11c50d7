"""Train the text encoder and the denoiser of a pipeline on latents of drawings."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from training_step import Budget, CapturedStep, make_optimizer, set_learning_rate

from sdonnx.sample.architecture import Architecture, T5TokenizerSpec

__all__ = ["CaptionPool", "DenoiserTraining"]

_LEARNING_RATE, _WARMUP_STEPS, _WEIGHT_DECAY = 1.2e-3, 400, 0.01
_EMPTY_SHARE = 0.1  # of captions replaced by the empty one, for classifier-free guidance
_EMA_DECAY = 0.999
_TIME_EXPONENT = 1.25  # 1 for equal timesteps; more for early ones, with little noise, where outlines are decided
_T5_LENGTH = 16  # tokens; captions have 13 at most, and attention leaves out the padding up to 120


@dataclass(frozen=True)
class CaptionPool:
    """Latents of drawings and the captions that describe them.

    Attributes:
        captions: all captions; the first is empty.
        latents: (N,C,H,W), bfloat16.
        rows: (N,), index of each drawing's caption.
    """

    captions: tuple[str, ...]
    latents: torch.Tensor
    rows: torch.Tensor


class DenoiserTraining:
    """The training of one pipeline.

    Attributes:
        steps: number of steps so far.
        error: reason for which the step was not captured as a CUDA graph, if so.
    """

    def __init__(
        self,
        architecture: Architecture,
        tokenizer: Any,
        text_encoder: Any,
        denoiser: Any,
        scheduler: Any,
        pool: CaptionPool,
        device: str,
        batch: int,
        seed: int,
        compiled: bool,
    ) -> None:
        self._text_encoder, self._denoiser = text_encoder.train(), denoiser.train()
        self._is_t5 = isinstance(architecture.tokenizers["tokenizer"], T5TokenizerSpec)
        self._encode, self._run = text_encoder, denoiser
        if compiled:
            self._encode, self._run = torch.compile(text_encoder), torch.compile(denoiser)
        self._pool, self._device = pool, device
        self.steps = 0
        tokens = tokenizer(
            list(pool.captions),
            padding="max_length",
            max_length=_T5_LENGTH if self._is_t5 else tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        self._all_ids, self._all_masks = tokens.input_ids.to(device), tokens.attention_mask.to(device)
        self._parameters = [*text_encoder.parameters(), *denoiser.parameters()]
        # Shared parameters are listed once.
        self._parameters = list(dict.fromkeys(self._parameters))
        self._average = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = make_optimizer(self._parameters, _WEIGHT_DECAY)
        self._generator = torch.Generator(device).manual_seed(seed)
        kept = scheduler.alphas_cumprod.to(device, torch.float32)
        self._signal, self._noise_share = kept.sqrt(), (1 - kept).sqrt()
        self._latents = torch.zeros(batch, *pool.latents.shape[1:], device=device)
        self._noise = torch.zeros_like(self._latents)
        self._ids, self._masks = self._all_ids[:1].repeat(batch, 1), self._all_masks[:1].repeat(batch, 1)
        self._times = torch.zeros(batch, dtype=torch.long, device=device)
        self._loss = torch.zeros((), device=device)
        self._since = 0
        self._fill()
        self._captured = CapturedStep(self._step, device)
        self._captured.prepare()
        self.error = self._captured.error
        self._loss.zero_()

    def step(self, budget: Budget) -> None:
        """Train on one batch, with the budget's learning rate."""
        set_learning_rate(self._optimizer, budget.learning_rate(_LEARNING_RATE, _WARMUP_STEPS))
        self._captured(self._fill)
        self.steps += 1

    def mean_loss(self) -> float:
        """Return the mean loss since the last call; waits for the GPU."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        loss = float(self._loss) / max(1, self.steps - self._since)
        self._loss.zero_()
        self._since = self.steps
        return loss

    @torch.no_grad()
    def averaged(self) -> tuple[Any, Any]:
        """Return copies of the text encoder and the denoiser with the averaged weights, for inference."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        networks = copy.deepcopy((self._text_encoder, self._denoiser))
        parameters = dict.fromkeys([*networks[0].parameters(), *networks[1].parameters()])
        for parameter, average in zip(parameters, self._average, strict=True):
            parameter.copy_(average)
            parameter.grad = None
        return networks[0].eval(), networks[1].eval()

    def _fill(self) -> None:
        """Choose the batch, the noise and the timesteps at random."""
        count, device, generator = len(self._latents), self._device, self._generator
        chosen = torch.randint(len(self._pool.rows), (count,), generator=generator, device=device)
        self._latents.copy_(self._pool.latents[chosen])
        rows = self._pool.rows[chosen]
        rows = torch.where(torch.rand(count, generator=generator, device=device) < _EMPTY_SHARE, 0, rows)
        self._ids.copy_(self._all_ids[rows])
        self._masks.copy_(self._all_masks[rows])
        self._noise.normal_(generator=generator)
        times = torch.rand(count, generator=generator, device=device) ** _TIME_EXPONENT
        self._times.copy_((times * len(self._signal)).long().clamp(max=len(self._signal) - 1))

    def _predict(self, noisy: torch.Tensor) -> torch.Tensor:
        """Return the denoiser's prediction, as diffusers' pipelines compute it."""
        if not self._is_t5:
            embeddings = self._encode(self._ids)[0]
            return self._run(noisy, self._times, encoder_hidden_states=embeddings).sample  # type: ignore[no-any-return]
        # transformers waits for the GPU to see whether a mask (B,S) is full; a mask (B,1,1,S) is only added.
        added = (1.0 - self._masks[:, None, None].float()) * -1e9
        embeddings = self._encode(self._ids, attention_mask=added)[0]
        both = self._run(
            noisy,
            encoder_hidden_states=embeddings,
            encoder_attention_mask=self._masks,
            timestep=self._times,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return both.chunk(2, 1)[0]  # type: ignore[no-any-return]

    def _step(self) -> None:
        """Train on the batch: predict v = signal * noise - noise_share * latents (Salimans and Ho 2022)."""
        self._optimizer.zero_grad(set_to_none=True)
        signal = self._signal[self._times][:, None, None, None]
        share = self._noise_share[self._times][:, None, None, None]
        noisy = signal * self._latents + share * self._noise
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda", cache_enabled=False):
            predicted = self._predict(noisy)
        loss = F.mse_loss(predicted.float(), signal * self._noise - share * self._latents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            self._loss.add_(loss.detach())
            torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - _EMA_DECAY)
