"""What the words of the page mean."""

from __future__ import annotations

from sdonnx.benchmark.results import LARGE_SPREAD, LEAST_PSNR_DB, REFERENCE

__all__ = ["TERMS"]

TERMS: tuple[tuple[str, str], ...] = (
    ("round", "One process of one engine, from its start to its last image. Memory and start are its own."),
    ("run", "Drawing one batch of one prompt, from the prompt to the pixels."),
    ("latency", "Seconds of a timed run, over the timed runs of all rounds. Half of them are below the median, nine in"
     " ten below p90."),
    ("spread", "(p90 \N{MINUS SIGN} p10) / median: how far apart the middle 80 % of the runs lie."
     f" A row with more than {LARGE_SPREAD:.0%} says so."),
    ("load", "Importing the library, reading the weights and putting them on the device; median over the rounds."),
    ("first image", "From the start of loading to the first image, with everything that is captured, compiled or"
     " searched on the way; median over the rounds."),
    ("warm-up", "The runs before the clock counted, together; median over the rounds."),
    ("it/s", "Calls of the denoiser in a second, the first one left out."),
    ("text, step, decode", "On the device's own clock: prompts to hidden states; one call of the denoiser with guidance"
     " and sampler; latents to pixels; medians over the rounds."),
    ("first run, second run", "The highest memory in the very first run, and in one after the timed ones, which nothing"
     " watches; the largest of the rounds. 1 MB is 2²⁰ bytes."),
    ("allocator, host", "The peak as the library's own allocator counts it (ONNX Runtime's Python does not tell), and"
     " the highest resident memory of the process."),
    ("PSNR, SSIM, LPIPS", f"How alike the images are to those of {REFERENCE}: the same weights, noise and sampler."
     f" Higher is closer for PSNR and SSIM, lower for LPIPS. An engine below {LEAST_PSNR_DB:g} dB draws something"
     " else."),
    ("other values", "Share of the pixels' values that are not the reference's, by however little."),
    ("TFLOP a call", "Floating-point operations of one call of the denoiser, in 10¹²."),
    ("of matrix rate", "How much of the rate that the chip's matrix product was measured to reach is reached by a"
     " step. More than all of it is possible: some convolutions need fewer operations than are counted."),
)  # fmt: skip
"""Each with its definition."""
