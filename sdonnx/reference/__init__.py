"""The same images by diffusers and by an optimized folder, from the same noise: what a folder is compared with."""

REFERENCE = "torch fp32"
"""Name of the images that all others are compared with."""
