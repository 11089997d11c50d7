"""A component's configuration, read from its graph where nobody wrote it down.

diffusers' OnnxRuntimeModel saves `model.onnx` alone. What the optimizer and the run-time ask of a
`config.json` is in the graph: sizes of outputs follow from the weights (`graph.sizes`), and those of inputs
are what the first operators that multiply them by weights take. A few numbers need be in no graph; they are
those that were published with Stable Diffusion, and every use of them is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]

from sdonnx.errors import FolderError
from sdonnx.families import ComponentSpec, Role
from sdonnx.graph.edit import static_dim
from sdonnx.graph.expressions import expression_of

__all__ = ["Derivation", "derive_configuration"]

# "sample_size" in unet/config.json of CompVis/stable-diffusion-v1-1 to v1-5 and stable-diffusion-2-base: 512 pixels.
_SAMPLE_SIZE = 64
# "scaling_factor" of diffusers' AutoencoderKL where nothing else is said; Stable Diffusion 1 and 2
# (Rombach et al. 2022, arXiv:2112.10752, section G: latents of unit variance).
_SCALING_FACTOR = 0.18215
# "image_size" in the vision_config of safety_checker/config.json of all of these: CLIP ViT-L/14's (Radford et al.
# 2021, arXiv:2103.00020, table 20).
_CLIP_IMAGE_SIZE = 224

# A size at which dynamic shapes are compared: every VAE of up to ten halvings divides it.
_PROBE = 1024

# What an input may pass before weights meet it: none of these changes the size of the axis that is asked for,
# and where a Reshape does, the weights behind it disagree with others or with the graph's declared input.
_TRANSPARENT = frozenset({"Add", "Cast", "Clip", "Div", "Flatten", "Identity", "Mul", "Pad", "Reshape", "Sub"})


@dataclass(frozen=True)
class Derivation:
    """A configuration that was read from a graph.

    Attributes:
        config: what stands in `config.json` from now on. It names no class, so that nobody takes it for an
            architecture of which more is known (`sdonnx.expected`).
        note: what was read and what was assumed, one line.
    """

    config: dict[str, Any]
    note: str


def derive_configuration(path: Path, model: ir.Model, spec: ComponentSpec) -> Derivation:
    """Return a component's configuration as far as its graph, and what was published, tell it.

    Args:
        path: the ONNX file, to be named in errors.
        model: its graph, prepared (`graph.prepare`), with the family's inputs and outputs. It is not changed.
        spec: the component.

    Raises:
        FolderError: something that is needed cannot be read from the graph.
    """
    graph = _Graph(path, model, spec)
    assumed: dict[str, Any] = {}
    if spec.role is Role.TEXT_ENCODER:
        read = graph.text_encoder()
    elif spec.role is Role.DENOISER:
        read = graph.denoiser()
        size = graph.fixed_size("sample")
        (assumed if size is None else read)["sample_size"] = size or _SAMPLE_SIZE
    elif spec.role is Role.SAFETY_CHECKER:
        read, size = {}, graph.fixed_size("clip_input")
        (assumed if size is None else read)["vision_config"] = {"image_size": size or _CLIP_IMAGE_SIZE}
    else:
        read = graph.autoencoder(decodes=spec.role is Role.IMAGE_DECODER)
        assumed["scaling_factor"] = _SCALING_FACTOR
    told = [f"{_listed(read)} read from the graph"] if read else []
    if assumed:
        told.append(
            f"{_listed(assumed)} assumed, as published with Stable Diffusion: where that is wrong, put the original "
            f"pipeline's {spec.source}/config.json into {path.parent.name}/ and optimize again"
        )
    note = "; ".join([*told, "how much there is to fuse is not known"])
    return Derivation(read | assumed, f"no config.json: {note}")


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}.{_listed(value)}" if isinstance(value, Mapping) else f"{key} {value}" for key, value in values.items()
    )


class _Graph:
    """The questions that a configuration answers, asked of one graph."""

    def __init__(self, path: Path, model: ir.Model, spec: ComponentSpec) -> None:
        self.path = path
        self.graph = model.graph
        self.spec = spec
        self.inputs = {str(value.name): value for value in model.graph.inputs}
        self.outputs = {str(value.name): value for value in model.graph.outputs}

    def text_encoder(self) -> dict[str, Any]:
        config = {"hidden_size": self._given("hidden_size", self.outputs["last_hidden_state"], -1)}
        # Each layer of a text encoder attends once.
        layers = sum(node.op_type in ("Softmax", "Attention") and not node.domain for node in self.graph)
        return config | ({"num_hidden_layers": layers} if layers else {})

    def denoiser(self) -> dict[str, Any]:
        return {
            "in_channels": self._taken("in_channels", self.inputs["sample"], 1),
            "out_channels": self._given("out_channels", self.outputs["out_sample"], 1),
            "cross_attention_dim": self._taken("cross_attention_dim", self.inputs["encoder_hidden_states"], 2),
        }

    def fixed_size(self, name: str) -> int | None:
        """Return height and width of an input where the graph fixes them, and they are one."""
        height, width = (static_dim(self.inputs[name], axis) for axis in (2, 3))
        return height if height == width else None

    def autoencoder(self, decodes: bool) -> dict[str, Any]:
        if decodes:
            latents, pixels = self.inputs["latent_sample"], self.outputs["sample"]
            channels = self._taken("latent_channels", latents, 1)
        else:
            latents, pixels = self.outputs["latent_parameters"], self.inputs["sample"]
            channels, rest = divmod(self._given("latent_channels", latents, 1), 2)
            if rest:
                raise self._unknown("latent_channels", "its output has no mean and variance for each channel")
        factors = {_quotient(pixels, latents, axis) for axis in (2, 3)}
        widths = self._widths(decodes)
        if widths is None or factors != {2 ** (len(widths) - 1)}:
            raise self._unknown("block_out_channels", "its steps of size are not those of an AutoencoderKL")
        return {"latent_channels": channels, "block_out_channels": widths}

    def _widths(self, decodes: bool) -> list[int] | None:
        """Return the channels of each block of an AutoencoderKL, in the order of the encoder.

        All blocks but the last end with a step of size, which the channels of the block pass; those of the
        block at the image's (decoder) or the latents' (encoder) end are what the last convolution takes that
        is larger than a pixel, `conv_out`.
        """
        large = [
            node for node in self.graph if node.op_type == "Conv" and max((_weights_of(node) or ())[2:], default=1) > 1
        ]
        if decodes:
            resized = [node.inputs[0] for node in self.graph if node.op_type == "Resize"]
            steps = [static_dim(value, 1) for value in resized if value is not None]
        else:
            steps = [_size_taken(node) for node in large if set(node.attributes.get_ints("strides", (1,))) == {2}]
        widths = [*steps, _size_taken(large[-1]) if large else None]
        known = [width for width in widths if width is not None]
        if len(known) < len(widths):
            return None
        return known[::-1] if decodes else known

    def _given(self, key: str, value: ir.Value, axis: int) -> int:
        """Return the size of an output's axis."""
        size = static_dim(value, axis)
        if size is None:
            raise self._unknown(key, f"its output {value.name} has no fixed size there")
        return size

    def _taken(self, key: str, value: ir.Value, axis: int) -> int:
        """Return the size of an input's axis: what all weights that it meets take, or what the graph declares."""
        sizes = set(_sizes_taken(value))
        declared = static_dim(value, axis)
        if not sizes and declared is not None:
            return declared
        if len(sizes) != 1:
            found = "its weights take " + " and ".join(map(str, sorted(sizes))) if sizes else "no weights meet it"
            raise self._unknown(key, f"{found} of its input {value.name}")
        return sizes.pop()

    def _unknown(self, key: str, reason: str) -> FolderError:
        return FolderError(
            f"{self.path.parent / 'config.json'} is missing, and {self.path.name} does not tell {key}: {reason}",
            "the component's configuration beside its graph",
            f"put the original pipeline's {self.spec.source}/config.json there",
        )


def _sizes_taken(value: ir.Value) -> Iterator[int]:
    """Yield what the weights take that an input meets: channels of images, or the last axis of others."""
    waiting, seen = [value], {value}
    while waiting:
        for use in waiting.pop().uses():
            node = use.node
            if use.idx == 0 and (size := _size_taken(node)) is not None:
                yield size
            elif node.op_type in _TRANSPARENT and not node.domain and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])


def _size_taken(node: ir.Node) -> int | None:
    """Return the size of what weights multiply in a node's first input, None where there are no weights."""
    shape = _weights_of(node)
    if shape is None:
        return None
    if node.op_type == "Conv":
        return shape[1] * node.attributes.get_int("group", 1)
    return shape[-1] if node.attributes.get_int("transB", 0) else shape[-2]


def _weights_of(node: ir.Node) -> Sequence[int] | None:
    """Return the shape of what a convolution or product multiplies by, None where that is not known.

    It need not be a constant itself: weights are cast, transposed or dequantized in graphs.
    """
    if node.domain or node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 2:
        return None
    weights = node.inputs[1]
    if weights is None or weights.shape is None or weights.shape.rank() < 2:
        return None
    sizes = [size for size in weights.shape.dims if isinstance(size, int)]
    return sizes if len(sizes) == weights.shape.rank() else None


def _quotient(large: ir.Value, small: ir.Value, axis: int) -> Any:
    """Return how often the one size holds the other, where both are known in terms of the inputs'."""
    sizes = []
    for value in (large, small):
        size = None if value.shape is None else expression_of(value.shape[axis])
        if size is None or len(size.free_symbols) > 1:
            return None
        sizes.append(size.subs(dict.fromkeys(size.free_symbols, _PROBE)))
    return sizes[0] / sizes[1] if sizes[1] != 0 else sympy.nan
