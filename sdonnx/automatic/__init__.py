"""`--force_fp32_ops auto`: the smallest set of operators and modules that must stay out of fp16.

A pipeline is drawn with in float32, on the kernels of the device or, without a GPU, on what those compute. What each
component was given there is given to its graph again: with a look at every value that fp16 would hold, which tells what
goes beyond its range; and rounded as fp16 rounds, which tells whether what was kept is enough, and whether all of it is
needed.
"""

from __future__ import annotations

__all__ = ["AUTO"]

AUTO = "auto"
"""What --force_fp32_ops is given for it."""
