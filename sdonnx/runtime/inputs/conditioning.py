"""Interface of a family's conditioning: prompts and call arguments in, named inputs of the graphs out.

Each pipeline family implements `FamilyInputs` in a module of its own; `sdonnx.runtime.inputs.pipeline_inputs` holds
the table of families. "Conditioning" is everything that guides the denoiser apart from the latents and the timestep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sdonnx.errors import FolderError, OptionError, SdonnxError
from sdonnx.models import abi
from sdonnx.models.spec import Role
from sdonnx.runtime.graph_set import GraphSet
from sdonnx.runtime.inputs.prompt_arguments import PromptArguments
from sdonnx.runtime.inputs.prompt_tokenizer import PromptTokenizer

__all__ = ["IP_ADAPTER_ARGUMENTS", "ArgumentGroup", "Array", "Conditioning", "FamilyInputs"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ArgumentGroup:
    """Arguments of `OrtDiffusionPipeline.__call__` that only some pipelines accept.

    Attributes:
        defaults: default value of each argument, by name.
        expected: pipelines that accept the arguments, for the error message.
        remedy: how to fix a call that passes them to another pipeline, besides leaving them out.
        error: exception to raise for such a call.
        ignored: values besides the default that other pipelines accept and ignore, by name.
    """

    defaults: Mapping[str, Any]
    expected: str
    remedy: str = ""
    error: type[SdonnxError] = OptionError
    ignored: Mapping[str, Any] | None = None

    def values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the group's arguments, by name."""
        return {name: arguments.get(name, default) for name, default in self.defaults.items()}

    def refuse(self, arguments: Mapping[str, Any]) -> None:
        """Raise `error` if the caller set an argument of the group."""
        if names := [name for name, value in self.values(arguments).items() if self._is_set(name, value)]:
            raise self.error(f"{', '.join(names)} given", self.expected, self.remedy)

    def _is_set(self, name: str, value: Any) -> bool:
        default = self.defaults[name]
        if value is default or (self.ignored is not None and value is self.ignored.get(name, default)):
            return False
        return default is None or not np.array_equal(value, default)


IP_ADAPTER_ARGUMENTS = ArgumentGroup(
    {"ip_adapter_image": None, "ip_adapter_image_embeds": None, "ip_adapter_scale": None},
    "a pipeline with IP-Adapters",
    "export it with --ip-adapter, or leave it out",
)


@dataclass(frozen=True)
class Conditioning:
    """Inputs to write to the buffers of the graphs before an image is generated, and the encoders to run.

    G is 2 with guidance and 1 without; rows of negative prompts come first.

    Attributes:
        inputs: arrays (G*B, ...) by buffer name.
        images: batch size B.
        tokens: length of the prompts, S.
        encoders: text encoders to run; empty if the caller passed embeddings.
        skipped_layers: maximum number of final text encoder layers skipped (`clip_skip`).
        dimensions: sizes of further named dimensions of the graphs, as (name, size).
        device_inputs: function that runs graphs to compute further inputs; called on the device thread.
    """

    inputs: Mapping[str, Array]
    images: int
    tokens: int
    encoders: tuple[Role, ...] = ()
    skipped_layers: int = 0
    dimensions: tuple[tuple[str, int], ...] = ()
    device_inputs: Callable[[], Mapping[str, Array]] = dict


class FamilyInputs(ABC):
    """Conditioning of one pipeline family.

    Args:
        graphs: graphs of the pipeline.

    Attributes:
        ARGUMENTS: arguments of `OrtDiffusionPipeline.__call__` that the family accepts besides the common ones.
        EMBEDDINGS: what `encode_prompt` of diffusers' pipelines returns, in order, by the names of a call's arguments.
        PROMPT_TENSORS: inputs of the denoiser that come from prompts.
        STEP_TENSORS: tensors besides the latents that diffusers' pipelines pass to a callback after each step, by name,
            and the inputs of the denoiser that hold them.
        ENCODING_ORDER: arguments of `encode_prompt` of diffusers' pipelines after the prompt, in order.
        tokenizers: tokenizer of each text encoder.
        tokens: length to which prompts are padded by default.

    Raises:
        FolderError: a tokenizer cannot be read, or the tokenizers have different lengths.
    """

    ARGUMENTS: ClassVar[tuple[ArgumentGroup, ...]] = ()
    EMBEDDINGS: ClassVar[tuple[str, ...]] = ()
    PROMPT_TENSORS: ClassVar[tuple[str, ...]] = (abi.ENCODER_HIDDEN_STATES,)
    STEP_TENSORS: ClassVar[Mapping[str, str]] = {}
    ENCODING_ORDER: ClassVar[tuple[str, ...]] = ()

    def __init__(self, graphs: GraphSet) -> None:
        self.graphs = graphs
        folder = graphs.folder
        self.tokenizers = {
            spec.role: PromptTokenizer.from_folder(folder.component(spec.extra[0]), self.prompt_length)
            for spec in graphs.family.text_encoders
            if spec.extra is not None
        }
        lengths = {tokenizer.max_length for tokenizer in self.tokenizers.values()}
        if len(lengths) != 1:
            raise FolderError(
                f"the tokenizers of {folder.path} have lengths of {sorted(lengths)} tokens",
                "the same length",
                "copy the tokenizers from the original pipeline again",
            )
        self.tokens = lengths.pop()

    @property
    def prompt_length(self) -> int | None:
        """Length to which prompts are padded; None for the `model_max_length` of the tokenizer."""
        return None

    @property
    def max_text_tokens(self) -> int | None:
        """Length of the longest texts that the text encoders accept, None for any. Embeddings may be longer."""
        return self.tokens

    @abstractmethod
    def prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return the conditioning by the prompts, or by embeddings in their place.

        Args:
            prompts: prompts or embeddings, and how they form a batch.
            arguments: arguments of the call that are specific to some families, by name.

        Raises:
            PromptError: the prompts or embeddings do not suit the text encoders.
            OptionError: another argument is out of range.
        """

    def whole_prompt_inputs(self, prompts: PromptArguments, arguments: Mapping[str, Any]) -> Conditioning:
        """Return `prompt_inputs` with prompts of the full length, for `encode_prompt`; the same by default."""
        return self.prompt_inputs(prompts, arguments)

    def size_inputs(
        self, arguments: Mapping[str, Any], images: int, size: tuple[int, int], *, guided: bool, from_image: bool
    ) -> dict[str, Array]:
        """Return inputs that depend on the image size, by buffer name; none by default.

        Args:
            arguments: as in `prompt_inputs`.
            images: batch size.
            size: height and width of the generated images in pixels.
            guided: whether classifier-free guidance is used.
            from_image: whether generation starts from an image.
        """
        del arguments, images, size, guided, from_image
        return {}

    def generated_size(
        self, arguments: Mapping[str, Any], size: tuple[int, int], *, from_image: bool
    ) -> tuple[int, int]:
        """Return the height and width in pixels to generate for a requested size; the same by default.

        Args:
            arguments: as in `prompt_inputs`; empty for the defaults.
            size: requested height and width in pixels.
            from_image: whether generation starts from an image.
        """
        del arguments, from_image
        return size

    def lengths(self, prompts: int) -> list[int]:
        """Return the prompt lengths that generation may use, in tokens, the default one last.

        Args:
            prompts: number of prompts in the batch, including negative ones.
        """
        del prompts
        return [self.tokens]

    def typed(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays converted to the types of the denoiser's inputs of these names."""
        graph = self.graphs.conditioning_graph()
        return {name: values.astype(graph.dtype(name)) for name, values in inputs.items()}

    def require_layers(self, clip_skip: int) -> None:
        """Raise OptionError if `clip_skip` leaves no layer of a text encoder."""
        for role in self.tokenizers:
            layers = self.graphs.config(role).get("num_hidden_layers")
            if isinstance(layers, int) and clip_skip >= layers:
                raise OptionError(f"clip_skip is {clip_skip}", f"less than the text encoder's {layers} layers")
