"""T5's encoder as it can be traced: positions looked up, and a mask that fp16 can hold.

transformers computes the buckets of all distances with logarithms, in the type of the model, and gathers the mask by
computed places; here both are lookups and sums, and the results are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

__all__ = ["additive_mask", "traceable"]

# Leaves nothing of a score in any softmax, and is no infinity in fp16.
_REFUSED = -10000.0


def traceable(encoder: Any) -> None:
    """Change how a T5EncoderModel computes the biases of positions, in place; parameters and results stay."""
    for module in encoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            module.compute_bias = partial(_bias, module)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores (B,1,1,S) for a mask (B,S), 1 for tokens and 0 for padding."""
    return ((1 - mask.to(dtype)) * _REFUSED)[:, None, None, :]


def _bias(attention: Any, query_length: int, key_length: int, **_: Any) -> torch.Tensor:
    """Return the bias of each pair of positions, (1,N,S,S).

    Raffel et al. 2020 (arXiv:1910.10683), section 2.1: distances from `relative_attention_max_distance` on are one.
    """
    most = attention.relative_attention_max_distance
    bucket = partial(
        attention._relative_position_bucket,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=most,
    )
    # That of distance 0 is 0; computed, it would be a logarithm of 0 that is thrown away.
    own = torch.zeros(1, dtype=torch.int64)
    buckets = torch.cat([bucket(torch.arange(-most, 0)), own, bucket(torch.arange(1, most + 1))])
    distances = torch.arange(key_length)[None, :] - torch.arange(query_length)[:, None]
    # A lookup of rows: the exporter writes an index as GatherND, which no captured graph may have.
    table = attention.relative_attention_bias(buckets)
    values = torch.nn.functional.embedding(distances.clamp(-most, most) + most, table)
    return values.permute(2, 0, 1)[None]
