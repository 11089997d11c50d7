"""Networks for tests: random ones, and small ones similar to diffusers' networks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st

from sdonnx.graph.edit import known_dims
from sdonnx.graph.passes import tidy
from support.graphs import Array, graph, int64, normal


@dataclass
class Chain:
    """A random network, built one operator at a time from values of known channels and sizes."""

    body: list[str] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    values: list[tuple[str, int, int]] = field(default_factory=list)  # name, channels, height

    @property
    def images(self) -> int:
        """The number of graph inputs that are images."""
        return sum("," in dims and dims.count(",") == 3 for dims in self.inputs.values())

    def name(self, prefix: str) -> str:
        return f"{prefix}{len(self.body)}_{len(self.weights)}"

    def weight(self, *shape: int) -> str:
        name = self.name("w")
        self.weights[name] = normal(*shape, seed=len(self.weights), scale=0.4)
        return name

    def add(self, call: str, channels: int, height: int) -> None:
        name = self.name("v")
        self.body.append(f"{name} = {call}")
        self.values.append((name, channels, height))

    def conv(self, x: str, channels: int, height: int, kernel: int, stride: int, pads: list[int], group: int) -> None:
        out = 4 * (1 + len(self.weights) % 3)
        arguments = f"{x}, {self.weight(out, channels // group, kernel, kernel)}"
        if len(self.weights) % 2:
            arguments += f", {self.weight(out)}"
        total = height + pads[0] + pads[2] - kernel
        self.add(f"Conv<strides={[stride] * 2}, pads={pads}, group={group}>({arguments})", out, total // stride + 1)

    def grow(self, draw: st.DrawFn) -> None:
        x, channels, height = draw(st.sampled_from(self.values[-3:]))
        alike = [name for name, *rest in self.values if rest == [channels, height]]
        sized = [value for value in self.values if value[2] == height]
        match draw(st.sampled_from(STEPS)):
            case "conv":
                self.conv(x, channels, height, 3, 1, [1, 1, 1, 1], draw(st.sampled_from([1, 2, 4])))
            case "pointwise":
                self.conv(x, channels, height, 1, 1, [0, 0, 0, 0], 1)
            case "down" if height > 3:
                self.conv(x, channels, height, 3, 2, draw(st.sampled_from([[1, 1, 1, 1], [0, 0, 1, 1]])), 1)
            case "norm":
                arguments = f"{x}, {self.weight(channels)}, {self.weight(channels)}"
                self.add(f"GroupNormalization<num_groups=2>({arguments})", channels, height)
            case "silu":
                gate = self.name("s")
                self.body.append(f"{gate} = Sigmoid({x})")
                self.add(f"Mul({', '.join(draw(st.permutations([x, gate])))})", channels, height)
            case "residual":
                self.add(f"Add({x}, {draw(st.sampled_from(alike))})", channels, height)
            case "concat":
                other, width, _ = draw(st.sampled_from(sized))
                self.add(f"Concat<axis=1>({x}, {other})", channels + width, height)
            case "up" if height < 7:
                if draw(st.booleans()):
                    scales = self.name("scales")
                    self.weights[scales] = np.array([1, 1, 2, 2], np.float32)
                    self.add(f"Resize<{NEAREST}>({x}, , {scales})", channels, 2 * height)
                else:
                    sizes = self.name("sizes")
                    self.weights[sizes] = int64([2, channels, height + 1, height + 1])
                    self.add(f"Resize<{NEAREST}>({x}, , , {sizes})", channels, height + 1)
            case "row":
                name, row = self.name("e"), self.name("r")
                self.inputs[name] = f"2,{channels}"
                self.weights.setdefault("axes", int64([2, 3]))
                self.body.append(f"{row} = Unsqueeze({name}, axes)")
                self.add(f"Add({', '.join(draw(st.permutations([x, row])))})", channels, height)
            case "scale":
                number = self.name("n")
                self.weights[number] = np.array(0.7, np.float32)
                self.add(f"{draw(st.sampled_from(['Mul', 'Div']))}({x}, {number})", channels, height)
            case "image":
                name = self.name("i")
                self.inputs[name] = f"2,{channels},{height},{height}"
                self.add(f"Add({', '.join(draw(st.permutations([x, name])))})", channels, height)
            case _:
                self.add(f"Relu({x})", channels, height)


NEAREST = 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
STEPS = ["conv", "pointwise", "down", "norm", "silu", "residual", "concat", "up", "row", "scale", "image", "relu"]


@st.composite
def chains(draw: st.DrawFn) -> tuple[ir.Model, int]:
    """Return a random network, and the number of its inputs and outputs that are images."""
    chain = Chain(inputs={"x": "2,4,6,6"})
    chain.conv("x", 4, 6, 3, 1, [1, 1, 1, 1], 1)
    for _ in range(draw(st.integers(1, 9))):
        chain.grow(draw)
    outputs = dict.fromkeys([chain.values[-1][0], draw(st.sampled_from(chain.values))[0]])
    model = graph(
        ", ".join(f"float[{dims}] {name}" for name, dims in chain.inputs.items()),
        ", ".join(f"float[2,{c},{h},{h}] {name}" for name, c, h in chain.values if name in outputs),
        "\n".join(chain.body),
        ", ".join(f"float[2,{c},{h},{h}] {name}" for name, c, h in chain.values if name not in outputs),
        **chain.weights,
    )
    tidy(model)
    images = sum(bool(value.uses()) and len(known_dims(value)) == 4 for value in model.graph.inputs)
    return model, images + len(model.graph.outputs)


class ResnetBlock(torch.nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.GroupNorm(4, width), torch.nn.GroupNorm(4, out)
        self.conv1, self.conv2 = torch.nn.Conv2d(width, out, 3, padding=1), torch.nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = torch.nn.Conv2d(width, out, 1)
        self.time = torch.nn.Linear(time, out)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h + self.time(F.silu(time))[:, :, None, None])))
        result: torch.Tensor = (self.shortcut(x) + h) / 1.5
        return result


class SmallUNet(torch.nn.Module):
    """Downsampling by an uneven pad and stride 2, upsampling by sizes and factors, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.Conv2d(16, 4, 3, padding=1)
        self.down, self.mid = ResnetBlock(8, 8, 12), ResnetBlock(16, 16, 12)
        self.halve = torch.nn.Conv2d(8, 16, 3, stride=2)
        self.grouped = torch.nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = ResnetBlock(24, 16, 12)
        self.norm = torch.nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = skip = self.down(self.conv_in(x), time)
        x = self.halve(F.pad(x, (0, 1, 0, 1)))
        x = self.mid(x, time)
        x = self.grouped(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
        x = self.up(torch.cat([x, skip], 1), time)
        result: torch.Tensor = self.conv_out(F.silu(self.norm(x)))
        return result


class AttentionBlock(torch.nn.Module):
    """Attention of diffusers' VAE: a norm of the flattened image, one head, and the image as the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.norm = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.GroupNorm(4, 8)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(8, 8) for _ in range(4))
        self.conv_out = torch.nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        batch, channels, height, width = x.shape
        flat = x.view(batch, channels, height * width).transpose(1, 2)
        flat = self.norm(flat.transpose(1, 2)).transpose(1, 2)
        q, k, v = (layer(flat).view(batch, -1, 1, channels).transpose(1, 2) for layer in (self.q, self.k, self.v))
        joined = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, channels)
        back = self.out(joined).transpose(-1, -2).reshape(batch, channels, height, width)
        result: torch.Tensor = self.conv_out(back + x)
        return result


SPATIAL = {0: "B", 2: "H", 3: "W"}
