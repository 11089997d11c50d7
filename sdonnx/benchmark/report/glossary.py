"""Definitions of the terms on the page."""

from __future__ import annotations

from sdonnx.benchmark.results import LARGE_SPREAD, MIN_PSNR_DB, REFERENCE

__all__ = ["TERMS"]

TERMS: tuple[tuple[str, str], ...] = (
    ("round", "One process of one engine, from its start to its last image, with its own memory and start."),
    ("run", "Generation of one batch of one prompt, from the prompt to the pixels."),
    ("latency", "Seconds of a timed run, over the timed runs of all rounds. Half of them are below the median, 90 %"
     " are below p90."),
    ("spread", "(p90 \N{MINUS SIGN} p10) / median: the relative range of the middle 80 % of the runs."
     f" Results with more than {LARGE_SPREAD:.0%} are marked."),
    ("load", "Import of the library and loading of the weights onto the device; median over the rounds."),
    ("first image", "Time from the start of loading to the first image, including capture, compilation and kernel"
     " search; median over the rounds that start with empty caches."),
    ("first image, filled cache", "The same in a new process of an engine that compiles, with the caches that its first"
     " process filled."),
    ("warm-up", "Total time of the warm-up runs; median over the rounds."),
    ("it/s", "Denoiser calls per second, without the first call."),
    ("text, step, decode", "Measured with the device's clock: prompts to hidden states; one denoiser call with guidance"
     " and sampler; latents to pixels. Medians over the rounds."),
    ("first run, second run", "Peak memory in the first run, and in a run after the timed ones, which are not"
     " monitored; the maximum over the rounds. 1 MB is 2²⁰ bytes."),
    ("allocator, host", "Peak memory of the library's allocator (not available in ONNX Runtime's Python API), and peak"
     " resident memory of the process."),
    ("PSNR, SSIM, LPIPS", f"Similarity of the images to those of {REFERENCE}, with the same weights, noise and sampler."
     f" Higher is closer for PSNR and SSIM, lower for LPIPS. Below {MIN_PSNR_DB:g} dB an engine generates a different"
     " image."),
    ("differing values", "Share of the pixel values that differ from the reference, by any amount."),
    ("TFLOP per call", "Floating-point operations of one denoiser call, in 10¹²."),
    ("share of matrix rate", "Rate of a step over the measured rate of the device's matrix product. It can exceed"
     " 100 %: some convolutions need fewer operations than are counted."),
)  # fmt: skip
"""(term, definition)."""
