"""The denoising loop, its noise and host-side schedulers."""
