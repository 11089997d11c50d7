"""Infer a component's configuration from its graph when `config.json` is missing.

diffusers' OnnxRuntimeModel saves only `model.onnx`. The graph contains the values of `config.json` that the optimizer
and the run-time need: sizes of outputs follow from the weights (`graph.shapes`), and sizes of inputs from the weights
of the first operators that multiply them. A few values may not be in the graph. For these the published values of
Stable Diffusion are assumed, and each assumption is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.errors import FolderError
from sdonnx.graph.edit import static_dim
from sdonnx.graph.shapes.expressions import expression_of
from sdonnx.models.autoencoder import DEFAULT_SCALING_FACTOR
from sdonnx.models.spec import ComponentSpec, Role

__all__ = ["Derivation", "derive_configuration"]

# "sample_size" in unet/config.json of CompVis/stable-diffusion-v1-1 to v1-5 and stable-diffusion-2-base: 512 pixels.
_SAMPLE_SIZE = 64
# "image_size" in the vision_config of safety_checker/config.json of all of these: CLIP ViT-L/14's (Radford et al.
# 2021, arXiv:2103.00020, table 20).
_CLIP_IMAGE_SIZE = 224

# Size for comparing dynamic shapes; VAEs with up to ten halvings divide it.
_PROBE = 1024

# Operators between an input and the first weights. They do not change the size of the axis. If a Reshape does, the
# weights behind it disagree with others or with the declared size of the input.
_TRANSPARENT = frozenset({"Add", "Cast", "Clip", "Div", "Flatten", "Identity", "Mul", "Pad", "Reshape", "Sub"})


@dataclass(frozen=True)
class Derivation:
    """A configuration that was inferred from a graph.

    Attributes:
        config: content for `config.json`. It has no class name, so that it is not mistaken for a known architecture
            (`sdonnx.models.layer_counts`).
        note: one line on the values read and the values assumed.
    """

    config: dict[str, Any]
    note: str


def derive_configuration(path: Path, model: ir.Model, spec: ComponentSpec) -> Derivation:
    """Return a component's configuration from its graph and the published defaults.

    Args:
        path: the ONNX file, for error messages.
        model: its graph, prepared (`graph.prepare`), with the family's inputs and outputs. It is not changed.
        spec: the component.

    Raises:
        FolderError: a required value cannot be inferred from the graph.
    """
    graph = _Graph(path, model, spec)
    assumed: dict[str, Any] = {}
    if spec.role is Role.TEXT_ENCODER:
        read = graph.text_encoder()
    elif spec.role is Role.DENOISER:
        read = graph.denoiser()
        assumed["sample_size"] = _SAMPLE_SIZE
    elif spec.role is Role.SAFETY_CHECKER:
        read, size = {}, graph.fixed_size("clip_input")
        (assumed if size is None else read)["vision_config"] = {"image_size": size or _CLIP_IMAGE_SIZE}
    else:
        read = graph.autoencoder(decodes=spec.role is Role.IMAGE_DECODER)
        assumed["scaling_factor"] = DEFAULT_SCALING_FACTOR
    parts = [f"{_listed(read)} read from the graph"] if read else []
    if assumed:
        parts.append(
            f"{_listed(assumed)} assumed, as published with Stable Diffusion: if that is wrong, copy the original "
            f"pipeline's {spec.source}/config.json into {path.parent.name}/ and optimize again"
        )
    note = "; ".join([*parts, "the expected number of fusions is unknown"])
    return Derivation(read | assumed, f"no config.json: {note}")


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}.{_listed(value)}" if isinstance(value, Mapping) else f"{key} {value}" for key, value in values.items()
    )


class _Graph:
    """Values of a configuration, read from one graph."""

    def __init__(self, path: Path, model: ir.Model, spec: ComponentSpec) -> None:
        self.path = path
        self.graph = model.graph
        self.spec = spec
        self.inputs = {str(value.name): value for value in model.graph.inputs}
        self.outputs = {str(value.name): value for value in model.graph.outputs}

    def text_encoder(self) -> dict[str, Any]:
        config = {"hidden_size": self._output_size("hidden_size", self.outputs["last_hidden_state"], -1)}
        # Each layer of a text encoder attends once.
        layers = sum(node.op_type in ("Softmax", "Attention") and not node.domain for node in self.graph)
        return config | ({"num_hidden_layers": layers} if layers else {})

    def denoiser(self) -> dict[str, Any]:
        return {
            "in_channels": self._input_size("in_channels", self.inputs["sample"], 1),
            "out_channels": self._output_size("out_channels", self.outputs["out_sample"], 1),
            "cross_attention_dim": self._input_size("cross_attention_dim", self.inputs["encoder_hidden_states"], 2),
        }

    def fixed_size(self, name: str) -> int | None:
        """Return the height and width of an input if the graph fixes them and they are equal, or None."""
        height, width = (static_dim(self.inputs[name], axis) for axis in (2, 3))
        return height if height == width else None

    def autoencoder(self, decodes: bool) -> dict[str, Any]:
        if decodes:
            latents, pixels = self.inputs["latent_sample"], self.outputs["sample"]
            channels = self._input_size("latent_channels", latents, 1)
        else:
            latents, pixels = self.outputs["latent_parameters"], self.inputs["sample"]
            channels, rest = divmod(self._output_size("latent_channels", latents, 1), 2)
            if rest:
                raise self._unknown("latent_channels", "its output has no mean and variance for each channel")
        factors = {_quotient(pixels, latents, axis) for axis in (2, 3)}
        widths = self._widths(decodes)
        if widths is None or factors != {2 ** (len(widths) - 1)}:
            raise self._unknown("block_out_channels", "its steps of size are not those of an AutoencoderKL")
        return {"latent_channels": channels, "block_out_channels": widths}

    def _widths(self, decodes: bool) -> list[int] | None:
        """Return the channels of each block of an AutoencoderKL, in the order of the encoder, or None if unknown.

        All blocks but the last end with a resampling operator; its input has the channels of the block. The channels
        of the last block are the input channels of `conv_out`, the last convolution with a kernel larger than 1x1.
        """
        large = [
            node for node in self.graph if node.op_type == "Conv" and max((_weights_of(node) or ())[2:], default=1) > 1
        ]
        if decodes:
            resized = [node.inputs[0] for node in self.graph if node.op_type == "Resize"]
            steps = [static_dim(value, 1) for value in resized if value is not None]
        else:
            steps = [_expected_size(node) for node in large if set(node.attributes.get_ints("strides", (1,))) == {2}]
        widths = [*steps, _expected_size(large[-1]) if large else None]
        known = [width for width in widths if width is not None]
        if len(known) < len(widths):
            return None
        return known[::-1] if decodes else known

    def _output_size(self, key: str, value: ir.Value, axis: int) -> int:
        """Return the size of an axis of an output."""
        size = static_dim(value, axis)
        if size is None:
            raise self._unknown(key, f"its output {value.name} has no fixed size there")
        return size

    def _input_size(self, key: str, value: ir.Value, axis: int) -> int:
        """Return the size of an axis of an input: the size that all its weights expect, or the declared size."""
        sizes = set(_expected_sizes(value))
        declared = static_dim(value, axis)
        if not sizes and declared is not None:
            return declared
        if len(sizes) != 1:
            found = "its weights expect " + " and ".join(map(str, sorted(sizes))) if sizes else "no weights read it"
            raise self._unknown(key, f"{found}, of its input {value.name}")
        return sizes.pop()

    def _unknown(self, key: str, reason: str) -> FolderError:
        return FolderError(
            f"{self.path.parent / 'config.json'} is missing, and {self.path.name} does not define {key}: {reason}",
            "the component's configuration next to its graph",
            f"copy the original pipeline's {self.spec.source}/config.json there",
        )


def _expected_sizes(value: ir.Value) -> Iterator[int]:
    """Yield the sizes that the weights of an input expect: channels of images, or the last axis of other tensors."""
    waiting, seen = [value], {value}
    while waiting:
        for use in waiting.pop().uses():
            node = use.node
            if use.idx == 0 and (size := _expected_size(node)) is not None:
                yield size
            elif node.op_type in _TRANSPARENT and not node.domain and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def _expected_size(node: ir.Node) -> int | None:
    """Return the size that a node's weights expect of its first input, or None if it has no weights."""
    shape = _weights_of(node)
    if shape is None:
        return None
    if node.op_type == "Conv":
        return shape[1] * node.attributes.get_int("group", 1)
    return shape[-1] if node.attributes.get_int("transB", 0) else shape[-2]


def _weights_of(node: ir.Node) -> Sequence[int] | None:
    """Return the shape of the weights of a convolution or matmul, or None if it is unknown.

    The weights need not be an initializer: graphs cast, transpose or dequantize them.
    """
    if node.domain or node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 2:
        return None
    weights = node.inputs[1]
    if weights is None or weights.shape is None or weights.shape.rank() < 2:
        return None
    sizes = [size for size in weights.shape.dims if isinstance(size, int)]
    return sizes if len(sizes) == weights.shape.rank() else None


def _quotient(large: ir.Value, small: ir.Value, axis: int) -> Any:
    """Return the quotient of two sizes, or None unless each depends on at most one size of the inputs."""
    sizes = []
    for value in (large, small):
        size = None if value.shape is None else expression_of(value.shape[axis])
        if size is None or len(size.free_symbols) > 1:
            return None
        sizes.append(size.subs(dict.fromkeys(size.free_symbols, _PROBE)))
    return sizes[0] / sizes[1] if sizes[1] != 0 else sympy.nan
