"""T5's encoder: its wrapper, and changes for tracing: position biases by lookup, and a mask within float16's range.

transformers computes the buckets of all distances with logarithms, in the model's dtype, and gathers the mask by
computed indices. Here both are lookups and sums, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sdonnx.export.wrappers import Wrapper

__all__ = ["MaskedTextEncoder", "additive_mask", "make_traceable"]

# Masked score: its softmax is zero, and float16 represents it as a finite number.
_MASKED = -10000.0


class MaskedTextEncoder(Wrapper):
    """T5: input_ids (B,S), attention_mask (B,S), 1 for tokens of the caption -> last_hidden_state (B,S,D)."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        make_traceable(model)

    def run(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Run the text encoder."""
        mask = additive_mask(attention_mask, self.model.dtype)
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return hidden


def make_traceable(encoder: Any) -> None:
    """Change how a T5EncoderModel computes position biases, in place. Parameters and results do not change."""
    for module in encoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            module.compute_bias = partial(_bias, module)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask (B,1,1,S) of a mask (B,S) that is 1 for tokens and 0 for padding."""
    return ((1 - mask.to(dtype)) * _MASKED)[:, None, None, :]


def _bias(attention: Any, query_length: int, key_length: int, **_: Any) -> torch.Tensor:
    """Return the bias of each pair of positions, (1,N,S,S).

    All distances of `relative_attention_max_distance` or more share a bucket (Raffel et al. 2020, arXiv:1910.10683,
    section 2.1).
    """
    max_distance = attention.relative_attention_max_distance
    bucket = partial(
        attention._relative_position_bucket,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=max_distance,
    )
    # The bucket of distance 0 is 0; computing it would take a logarithm of 0 and discard it.
    own = torch.zeros(1, dtype=torch.int64)
    buckets = torch.cat([bucket(torch.arange(-max_distance, 0)), own, bucket(torch.arange(1, max_distance + 1))])
    distances = torch.arange(key_length)[None, :] - torch.arange(query_length)[:, None]
    # An embedding lookup, because the exporter writes indexing as GatherND, which CUDA graphs cannot capture.
    table = attention.relative_attention_bias(buckets)
    values = torch.nn.functional.embedding(distances.clamp(-max_distance, max_distance) + max_distance, table)
    return values.permute(2, 0, 1)[None]
