"""LoRA files and other adapters of Stable Diffusion 1, 2 and XL, read without torch."""
