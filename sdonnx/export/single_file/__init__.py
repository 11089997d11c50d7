"""Single-file checkpoints of Stable Diffusion in the layout of the original repositories."""
