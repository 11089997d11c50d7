"""Class labels of a UNet2DConditionModel, such as the noise level of an upscaler: an input of its graph."""

from __future__ import annotations

from typing import Any

import torch

from sdonnx.models.spec import TensorSpec

__all__ = ["LABELS", "class_label_inputs", "class_label_values", "why_not_labels"]

LABELS = "class_labels"

_KINDS = (None, "timestep", "identity", "projection", "simple_projection")


def why_not_labels(unet: Any) -> str | None:
    """Return why the class labels of a UNet cannot be compiled, or None."""
    kind = unet.config.class_embed_type
    return None if kind in _KINDS else f"its configuration has class_embed_type={kind!r}"


def class_label_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the input for class labels; none for a UNet without them."""
    kind = unet.config.class_embed_type
    if unet.class_embedding is None:
        return ()
    if kind in (None, "timestep"):
        # One index, or one number, for each image.
        return (TensorSpec(LABELS, ("batch_size",), integer=kind is None, keeps_float32=True),)
    width = unet.time_embedding.linear_2.out_features
    if kind != "identity":
        width = unet.config.projection_class_embeddings_input_dim
    return (TensorSpec(LABELS, ("batch_size", width)),)


def class_label_values(unet: Any, labels: Any, batch: int) -> Any:
    """Return class labels in the type of the input, one for each image; unchanged if they do not fit."""
    kind = unet.config.class_embed_type
    if unet.class_embedding is None or kind not in (None, "timestep"):
        return labels
    if not isinstance(labels, torch.Tensor) or labels.ndim != 1:
        return labels
    if kind is None:
        if labels.dtype not in (torch.int32, torch.int64) or not _are_indexes(labels, unet.class_embedding):
            return labels
        converted = labels.to(torch.int32)
    else:
        converted = labels.to(torch.float32)
    return converted.expand(batch) if len(labels) == 1 else converted


def _are_indexes(labels: torch.Tensor, embedding: torch.nn.Embedding) -> bool:
    return bool((labels >= 0).all()) and bool((labels < embedding.num_embeddings).all())
