"""Arguments of ControlNets and T2I-Adapters, validated before anything runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sdonnx.errors import OptionError
from sdonnx.models.control_networks import is_union
from sdonnx.models.spec import Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.argument_checks import require_number
from sdonnx.runtime.inputs.conditioning import ArgumentGroup
from sdonnx.runtime.inputs.init_images import control_batch, default_size

__all__ = ["ADAPTER_ARGUMENTS", "CONTROL_ARGUMENTS", "Control", "ControlCall", "ControlInputs"]

Float = npt.NDArray[np.float32]

CONTROL_ARGUMENTS = ArgumentGroup(
    {
        "control_image": None,
        "controlnet_conditioning_scale": 1.0,
        "control_guidance_start": 0.0,
        "control_guidance_end": 1.0,
        "guess_mode": False,
        "control_mode": None,
    },
    "a folder with ControlNets",
    "export it with --controlnet FOLDER and optimize it, or leave it out",
)

ADAPTER_ARGUMENTS = ArgumentGroup(
    {"adapter_image": None, "adapter_conditioning_scale": 1.0, "adapter_conditioning_factor": 1.0},
    "a folder with T2I-Adapters",
    "export it with --t2i_adapter FOLDER and optimize it, or leave it out",
)

_SCALE, _START, _END = "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end"


@dataclass(frozen=True)
class Control:
    """One ControlNet or T2I-Adapter in a call.

    Attributes:
        images: control images (B,C,H,W) from 0 to 1; (B,N,C,H,W) for a ControlNet-Union.
        scales: weight of the residuals, or of each image of a ControlNet-Union.
        ranges: for each weight, the shares of the steps (start, end) in which it applies.
        modes: types of the images of a ControlNet-Union; empty for others.
    """

    images: Float
    scales: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...]
    modes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ControlCall:
    """ControlNets or T2I-Adapters of a call.

    Attributes:
        controls: in the order of the folder.
        are_adapters: whether they are T2I-Adapters.
        guess_mode: whether residuals grow with depth and apply to the prompt only (diffusers' `guess_mode`).
    """

    controls: tuple[Control, ...]
    are_adapters: bool = False
    guess_mode: bool = False


class ControlInputs:
    """Reads the arguments of ControlNets and T2I-Adapters.

    Args:
        graphs: graphs of the pipeline.

    Attributes:
        groups: the arguments that the pipeline accepts.
    """

    def __init__(self, graphs: GraphSet) -> None:
        family = graphs.family
        controlnets, adapters = family.all_with_role(Role.CONTROLNET), family.all_with_role(Role.T2I_ADAPTER)
        self._controlnets = [graphs.folder.config(spec.name) for spec in controlnets]
        self._adapters = [graphs.folder.config(spec.name) for spec in adapters]
        self.groups = [CONTROL_ARGUMENTS] * bool(controlnets) + [ADAPTER_ARGUMENTS] * bool(adapters)
        for role, specs in ((Role.CONTROLNET, controlnets), (Role.T2I_ADAPTER, adapters)):
            for number in range(len(specs)):
                graphs.path(role, number=number)  # a missing file is reported when the folder is loaded
        if self.groups:
            graphs.path(Role.CONTROLLED_DENOISER)

    def count(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of ControlNets or T2I-Adapters that a call runs."""
        return 0 if self._image(arguments) is None else len(self._controlnets) + len(self._adapters)

    def default_size(self, arguments: Mapping[str, Any], multiple: int) -> tuple[int, int] | None:
        """Return the height and width of the first control image, which calls of diffusers follow; None without one.

        Args:
            arguments: arguments that only some pipelines accept, by name.
            multiple: pixels of which the size of generated images is a multiple.

        Raises:
            OptionError: it is not an image, or it is too small.
        """
        image = self._image(arguments)
        while isinstance(image, list | tuple) and image:
            image = image[0]
        if image is None:
            return None
        if self._controlnets:
            return default_size(image, multiple, "control_image", _channels(self._controlnets[0]))
        config = self._adapters[0]
        factor = math.lcm(multiple, int(config.get("downscale_factor") or 8))
        return default_size(image, factor, "adapter_image", int(config["in_channels"]))

    def warn_of_image(self, arguments: Mapping[str, Any], stacklevel: int) -> None:
        """Warn of a call with an image to start from, but without a control image.

        Args:
            arguments: arguments of the call by name.
            stacklevel: 1 for the caller of this method; see `warnings.warn`.
        """
        if self.groups and arguments["image"] is not None and self._image(arguments) is None:
            name, kind = ("control_image", "ControlNets") if self._controlnets else ("adapter_image", "T2I-Adapters")
            warnings.warn(
                f"image is given without {name}, so that the folder's {kind} have no effect; expected both; pass the "
                f"image for the {kind}, which is `image` in diffusers' text to image, as {name}",
                stacklevel=stacklevel + 1,
            )

    def _image(self, arguments: Mapping[str, Any]) -> Any:
        """Return the control images of a call; None without them."""
        return next((arguments.get(next(iter(group.defaults))) for group in self.groups), None)

    def read(
        self, arguments: Mapping[str, Any], size: tuple[int, int], prompts: int, images_per_prompt: int
    ) -> ControlCall | None:
        """Return the controls of a call; None if it has no control image.

        Args:
            arguments: arguments that only some pipelines accept, by name.
            size: height and width of the generated images in pixels.
            prompts: number of prompts.
            images_per_prompt: number of images for each prompt.

        Raises:
            OptionError: an argument cannot be used.
        """
        batch = _Batch(size, prompts, images_per_prompt)
        if self._controlnets:
            return self._read_controlnets(CONTROL_ARGUMENTS.values(arguments), batch)
        if self._adapters:
            return self._read_adapters(ADAPTER_ARGUMENTS.values(arguments), batch)
        return None

    @property
    def mixes_batch(self) -> bool:
        """Whether an image depends on the other images of its batch.

        The transformer of a ControlNet-Union attends over the batch: diffusers' `ResidualAttentionBlock` passes tensors
        with the batch first to an attention that expects the sequence first, and published weights were trained so.
        """
        return any(is_union(config) for config in self._controlnets)

    def prepared(self, arguments: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments of a call for one prompt, validated, with images of the call's size.

        The call computes the same image with them. Images are lists of arrays (1,H,W,C) of uint8, one for each image
        of the call. Lists of calls with equal other arguments may be concatenated for a call with several prompts.

        Args:
            arguments: arguments of the call, with PIL images that are not in nested lists.
            size: height and width of the generated images in pixels.

        Raises:
            OptionError: an argument cannot be used.
        """
        prepared = {name: value for group in self.groups for name, value in group.values(arguments).items()}
        call = self.read(arguments, size, 1, 1)
        if call is not None:
            name = "adapter_image" if call.are_adapters else "control_image"
            prepared[name] = [_bytes(each) for control in call.controls for each in _images_of(control)]
        return prepared

    def _read_controlnets(self, given: Mapping[str, Any], batch: _Batch) -> ControlCall | None:
        image, guess_mode = given["control_image"], given["guess_mode"]
        if not isinstance(guess_mode, bool | np.bool_):
            raise OptionError(f"guess_mode is {guess_mode!r}", "True or False")
        unions = [is_union(config) for config in self._controlnets]
        if image is None:
            if changed := [name for name, value in given.items() if value is not CONTROL_ARGUMENTS.defaults[name]]:
                _require_default(changed, given)
            return None
        if given["control_mode"] is not None and not any(unions):
            raise OptionError(f"control_mode is {given['control_mode']!r}", "None without a ControlNet-Union")
        if unions == [True]:
            return ControlCall((self._union(given, batch),), guess_mode=bool(guess_mode))
        count = len(self._controlnets)
        scales = _numbers(_SCALE, given[_SCALE], count)
        ranges = _ranges(given[_START], given[_END], count)
        modes = _each("control_mode", given["control_mode"], count) if any(unions) else [None] * count
        images = _for_each("control_image", image, count, "ControlNet")
        controls = []
        for config, is_one, own, scale, span, mode in zip(
            self._controlnets, unions, images, scales, ranges, modes, strict=True
        ):
            if not is_one:
                controls.append(Control(batch.read(own, _channels(config)), (scale,), (span,)))
                continue
            listed = own if isinstance(own, list | tuple) else [own]
            read = batch.read_all(listed, _channels(config))
            controls.append(Control(read, (scale,), (span,), _modes(mode, len(listed), config)))
        return ControlCall(tuple(controls), guess_mode=bool(guess_mode))

    def _union(self, given: Mapping[str, Any], batch: _Batch) -> Control:
        """Return the only ControlNet, a ControlNet-Union; each of its images has its own weight and range."""
        (config,) = self._controlnets
        image = given["control_image"]
        images = list(image) if isinstance(image, list | tuple) else [image]
        modes = _modes(given["control_mode"], len(images), config)
        scales = _numbers(_SCALE, given[_SCALE], len(images))
        ranges = _ranges(given[_START], given[_END], len(images))
        return Control(batch.read_all(images, _channels(config)), tuple(scales), tuple(ranges), modes)

    def _read_adapters(self, given: Mapping[str, Any], batch: _Batch) -> ControlCall | None:
        image = given["adapter_image"]
        if image is None:
            if changed := [name for name, value in given.items() if value is not ADAPTER_ARGUMENTS.defaults[name]]:
                _require_default(changed, given, ADAPTER_ARGUMENTS)
            return None
        count = len(self._adapters)
        scales = _numbers("adapter_conditioning_scale", given["adapter_conditioning_scale"], count)
        factor = given["adapter_conditioning_factor"]
        require_number("adapter_conditioning_factor", factor, 0, 1)
        images = _for_each("adapter_image", image, count, "T2I-Adapter")
        controls = []
        for config, own, scale in zip(self._adapters, images, scales, strict=True):
            batch.require_multiple(_total_factor(config))
            read = batch.read(own, int(config["in_channels"]), "adapter_image")
            controls.append(Control(read, (scale,), ((0.0, float(factor)),)))
        return ControlCall(tuple(controls), are_adapters=True)


def _images_of(control: Control) -> list[Float]:
    """Return the images (B,C,H,W) of a ControlNet or T2I-Adapter: several for a ControlNet-Union."""
    images = control.images
    return [images[:, index] for index in range(images.shape[1])] if images.ndim == 5 else [images]


def _bytes(images: Float) -> npt.NDArray[np.uint8]:
    """Return images (B,C,H,W) that were read from bytes as these bytes, (B,H,W,C)."""
    return np.rint(images * 255).astype(np.uint8).transpose(0, 2, 3, 1)


@dataclass(frozen=True)
class _Batch:
    """Sizes of a call: height and width in pixels, prompts, and images for each prompt."""

    size: tuple[int, int]
    prompts: int
    images_per_prompt: int

    def read(self, image: Any, channels: int, name: str = "control_image") -> Float:
        """Return images (B,C,H,W): one for all, or one for each prompt."""
        found = control_batch(image, int(self.size[0]), int(self.size[1]), channels, name)
        if len(found) not in (1, self.prompts):
            raise OptionError(
                f"{len(found)} images in {name} for {self.prompts} prompt{'s' * (self.prompts > 1)}",
                "one image, or one for each prompt",
                "pass as many images as prompts",
            )
        repeats = self.images_per_prompt * (self.prompts if len(found) == 1 else 1)
        return np.repeat(found, repeats, axis=0)

    def read_all(self, images: Sequence[Any], channels: int) -> Float:
        """Return the images of a ControlNet-Union (B,N,C,H,W)."""
        if not images:
            raise OptionError("an empty list in control_image", "at least one image")
        return np.stack([self.read(image, channels) for image in images], axis=1)

    def require_multiple(self, factor: int) -> None:
        """Raise unless the image can be halved as often as a T2I-Adapter does."""
        for name, edge in zip(("height", "width"), self.size, strict=True):
            if edge % factor:
                raise OptionError(f"{name} is {edge}", f"a multiple of {factor} with this T2I-Adapter",
                                  f"pass another {name}")  # fmt: skip


def _require_default(names: Sequence[str], given: Mapping[str, Any], group: ArgumentGroup = CONTROL_ARGUMENTS) -> None:
    """Raise if an argument without a control image differs from its default."""
    image = next(iter(group.defaults))
    for name in names:
        if not np.array_equal(given[name], group.defaults[name]):
            raise OptionError(f"{name} without {image}", f"{image} with it", f"pass {image}, or leave {name} out")


def _channels(config: Mapping[str, Any]) -> int:
    return int(config.get("conditioning_channels") or 3)


def _total_factor(config: Mapping[str, Any]) -> int:
    """Return diffusers' `total_downscale_factor` of a T2I-Adapter: pixels for each value of its last residual."""
    factor, count = int(config.get("downscale_factor") or 8), len(config["channels"])
    kind = config.get("adapter_type")
    halvings = 1 if kind == "full_adapter_xl" else count - 1 if kind == "full_adapter" else count
    return int(factor * 2**halvings)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """Return a list with an entry for each of `count` networks or images, from one value for all or a list."""
    if not isinstance(value, list | tuple) and not (isinstance(value, np.ndarray) and value.ndim):
        return [value] * count
    found = list(value)
    if len(found) != count:
        raise OptionError(f"{len(found)} values of {name}", f"one number, or {count}")
    return found


def _numbers(name: str, value: Any, count: int) -> list[float]:
    found = _each(name, value, count)
    for each in found:
        require_number(name, each)
    return [float(each) for each in found]


def _ranges(start: Any, end: Any, count: int) -> list[tuple[float, float]]:
    starts, ends = _each(_START, start, count), _each(_END, end, count)
    for first, last in zip(starts, ends, strict=True):
        require_number(_START, first, 0, 1)
        require_number(_END, last, 0, 1)
        if first >= last:
            raise OptionError(
                f"{_START} is {first:g} and {_END} is {last:g}", "a start before the end", "change one of them"
            )
    return [(float(first), float(last)) for first, last in zip(starts, ends, strict=True)]


def _for_each(name: str, images: Any, count: int, kind: str) -> list[Any]:
    """Return the images of each network: all of one network's, or a list with an entry for each.

    As in diffusers, a list of lists has one list for each prompt, with an image for each network.
    """
    if count == 1:
        return [images]
    listed = list(images) if isinstance(images, list | tuple) else [images]
    if listed and all(isinstance(each, list | tuple) for each in listed):
        if any(len(each) != count for each in listed):
            raise OptionError(f"{name} with lists of {sorted({len(each) for each in listed})} images",
                              f"{count} in each, one for each {kind}", "pass a list for each prompt")  # fmt: skip
        return [list(each) for each in zip(*listed, strict=True)]
    if len(listed) != count:
        raise OptionError(f"{len(listed)} images in {name}", f"{count}, one for each {kind}", "pass a list of them")
    return listed


def _modes(value: Any, count: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the type of each image of a ControlNet-Union."""
    types = int(config["num_control_type"])
    expected = f"{count} whole number{'s' * (count > 1)} from 0 to {types - 1}, one for each image"
    listed = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    whole = all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in listed)
    if not whole or len(listed) != count or not all(0 <= each < types for each in listed):
        raise OptionError(f"control_mode is {value!r}", expected, "pass the types that the ControlNet-Union documents")
    if len(set(listed)) < len(listed):
        raise OptionError(f"control_mode is {value!r}", "every type once", "leave out one image")
    return tuple(int(each) for each in listed)
