"""UNet2DConditionModel: the signature of its graph, and the calls that the graph computes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterFaceIDImageProjection,
    IPAdapterFullImageProjection,
    IPAdapterPlusImageProjection,
    MultiIPAdapterImageProjection,
)
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from sdonnx.compiler.graph_method import GraphMethod, GraphSignature, checked_inputs
from sdonnx.compiler.merged_adapters import has_adapters
from sdonnx.export.image_attention import ImageAttention, ImagePrompt
from sdonnx.export.wrappers import Wrapper
from sdonnx.models.control_networks import (
    ADAPTER,
    CONTROLNET_DOWN,
    CONTROLNET_MID,
    EXAMPLE_SIZES,
    adapter_inputs,
    controlnet_inputs,
    has_sizes_of,
)
from sdonnx.models.image_adapters import ADAPTER_SCALE
from sdonnx.models.ip_adapter import is_cross_attention
from sdonnx.models.shared_components import ENCODER_HIDDEN_STATES, OUT_SAMPLE, SAMPLE, TIMESTEP
from sdonnx.models.spec import ComponentSpec, Role, TensorSpec

__all__ = ["UNetForward", "UNetVariant", "timesteps_of"]

_TEXT_EMBEDS, _TIME_IDS, _IMAGE_EMBEDS, _LABELS = "text_embeds", "time_ids", "image_embeds", "class_labels"

# Attention processors with IP-Adapters. Their scales, which tracing would make constants, are an input of the graph
# (`sdonnx.export.image_attention`), read at each call.
_PROCESSORS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0)

_LABEL_KINDS = (None, "timestep", "identity", "projection", "simple_projection")

# Each image of a batch has its own timestep, as in diffusers.
_TIMESTEP = replace(TIMESTEP, dims=("batch_size",), once=False)
_TIMESTEP_COND = "timestep_cond"
_ATTENTION, _LORA_SCALE = "cross_attention_kwargs", "scale"

# Arguments of diffusers' forward that every graph computes.
_COMPUTED = frozenset({"sample", "timestep", "encoder_hidden_states", "added_cond_kwargs", "return_dict", ADAPTER})

# The original size, the crop's corner and the target size. Refiners have 5, and are compiled again at the first call.
_DEFAULT_TIME_IDS = 6


@dataclass(frozen=True)
class UNetVariant:
    """Inputs that some calls of a UNet have.

    Attributes:
        time_ids: Number of sizes of the image; 0 for a UNet that is not conditioned on these.
        timestep_cond: Whether calls have `timestep_cond`.
        controlnet: Whether calls have the residuals of ControlNet.
        adapter: Number of residuals of T2I-Adapter.
    """

    time_ids: int = 0
    timestep_cond: bool = False
    controlnet: bool = False
    adapter: int = 0

    def __str__(self) -> str:
        parts = {
            f"{self.time_ids} time_ids": self.time_ids,
            _TIMESTEP_COND: self.timestep_cond,
            "residuals of ControlNet": self.controlnet,
            f"{self.adapter} residuals of T2I-Adapter": self.adapter,
        }
        return " and ".join(text for text, is_there in parts.items() if is_there) or "calls without residuals"


class _UNetCall(Wrapper):
    """UNet: sample (B,C,H,W) and other arguments by their names -> out_sample (B,C,H,W).

    An input `NAME.i` is entry i of a list.
    """

    example_sizes: ClassVar = EXAMPLE_SIZES

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the UNet."""
        arguments: dict[str, Any] = {}
        for name, tensor in zip(self.names, inputs, strict=True):
            argument, _, index = name.partition(".")
            if index:
                arguments.setdefault(argument, []).append(tensor)
            else:
                arguments[name] = tensor
        added = {name: arguments.pop(name) for name in (_TEXT_EMBEDS, _TIME_IDS, _IMAGE_EMBEDS) if name in arguments}
        if _TEXT_EMBEDS in added:
            # diffusers concatenates it with float32 embeddings; without the cast, the exporter would write a Concat of
            # two types.
            added[_TEXT_EMBEDS] = added[_TEXT_EMBEDS].float()
        if _IMAGE_EMBEDS in added:
            added[_IMAGE_EMBEDS] = added[_IMAGE_EMBEDS], arguments.pop(ADAPTER_SCALE)
        prediction: torch.Tensor = self.model(**arguments, added_cond_kwargs=added or None, return_dict=False)[0]
        return prediction


class UNetForward(GraphMethod):
    """`UNet2DConditionModel.forward`. Variants are `UNetVariant`."""

    ignored_inside = MappingProxyType(dict.fromkeys(_PROCESSORS, frozenset({"scale"})))

    def prepare(self, module: Any) -> None:
        _prepare_images(module)

    def why_not(self, module: torch.nn.Module) -> str | None:
        config = _config(module)
        # load_ip_adapter sets only the attribute of the configuration, and not its entry.
        projection = getattr(config, "encoder_hid_dim_type", None)
        if projection not in (None, "ip_image_proj"):
            return f"its configuration has encoder_hid_dim_type={projection!r}"
        if (embeds := config.get("addition_embed_type")) not in (None, "text_time"):
            return f"its configuration has addition_embed_type={embeds!r}"
        if not isinstance(config.get("cross_attention_dim"), int):
            return f"its configuration has cross_attention_dim={config.get('cross_attention_dim')!r}"
        return _why_not_labels(module) or _why_not_images(module)

    def why_in_torch(self, module: Any) -> str | None:
        # Attributes that diffusers sets in enable_freeu and clears in disable_freeu.
        if any(getattr(block, "b1", None) is not None for block in module.up_blocks):
            return "FreeU is enabled, and its Fourier transforms have no graph"
        return None

    def variant(self, module: torch.nn.Module, arguments: Mapping[str, Any] | None, before: Hashable) -> Hashable:
        config = _config(module)
        if arguments is None:
            # Pipelines pass timestep_cond to every UNet that has it.
            return UNetVariant(_default_time_ids(config), config.get("time_cond_proj_dim") is not None)
        assert isinstance(before, UNetVariant)
        if _why_not_computed(module, arguments) is not None:
            return before
        time_ids = _count_time_ids(config, arguments["added_cond_kwargs"])
        return UNetVariant(
            time_ids or before.time_ids or _default_time_ids(config),
            arguments[_TIMESTEP_COND] is not None,
            arguments[CONTROLNET_DOWN] is not None,
            len(arguments[ADAPTER] or ()),
        )

    def lora_scale(self, module: torch.nn.Module, arguments: Mapping[str, Any], before: float) -> float:
        scale = _lora_scale(arguments)
        found = 1.0 if scale is None or scale == 1 or not has_adapters(module) else scale
        return before if found != before and _why_not_computed(module, arguments) is not None else found

    def signature(self, module: torch.nn.Module, variant: Hashable) -> GraphSignature:
        assert isinstance(variant, UNetVariant)
        config: dict[str, Any] = dict(_config(module))
        inputs = [SAMPLE, _TIMESTEP, ENCODER_HIDDEN_STATES, *_class_label_inputs(module)]
        if variant.time_ids:
            width, total = config["addition_time_embed_dim"], config["projection_class_embeddings_input_dim"]
            inputs.append(TensorSpec(_TEXT_EMBEDS, ("batch_size", total - variant.time_ids * width)))
            inputs.append(TensorSpec(_TIME_IDS, ("batch_size", variant.time_ids), keeps_float32=True))
        if variant.timestep_cond:
            inputs.append(TensorSpec(_TIMESTEP_COND, ("batch_size", "config:time_cond_proj_dim")))
        inputs += controlnet_inputs(config) if variant.controlnet else ()
        inputs += adapter_inputs(config)[: variant.adapter]
        inputs += _image_inputs(module)
        spec = ComponentSpec("unet", "unet", Role.DENOISER, tuple(inputs), (OUT_SAMPLE,))
        return GraphSignature(spec, config, _UNetCall, variant)

    def inputs(
        self, module: torch.nn.Module, arguments: Mapping[str, Any], signature: GraphSignature
    ) -> dict[str, torch.Tensor] | str:
        if (reason := _why_not_computed(module, arguments)) is not None:
            return reason
        added = arguments["added_cond_kwargs"] or {}
        sample = arguments["sample"]
        batch = len(sample) if isinstance(sample, torch.Tensor) and sample.ndim else 0
        if (timestep := timesteps_of(arguments["timestep"], batch, signature.target.torch_device)) is None:
            return "its timestep is not a number, or one for each image"
        images = _image_tensors(module, added.get(_IMAGE_EMBEDS))
        if isinstance(images, str):
            return images
        tensors = {**arguments, **added, "timestep": timestep, **images}
        if isinstance(sizes := added.get(_TIME_IDS), torch.Tensor):
            tensors[_TIME_IDS] = sizes.to(torch.float32)
        tensors[_LABELS] = _class_label_values(module, arguments[_LABELS], batch)
        for name in (CONTROLNET_DOWN, ADAPTER):
            tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(arguments[name] or ())}
        found = checked_inputs({each.name: tensors.get(each.name) for each in signature.spec.inputs}, signature)
        if isinstance(found, str):
            return found
        for each in signature.spec.inputs:
            if not has_sizes_of(sample.shape, found[each.name].shape, each):
                return f"{each.name} has shape {tuple(found[each.name].shape)}"
        return found

    def result(self, outputs: Sequence[torch.Tensor], arguments: Mapping[str, Any]) -> Any:
        return UNet2DConditionOutput(sample=outputs[0]) if arguments["return_dict"] else (outputs[0],)


def _config(module: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = module.config
    return config


def _lora_scale(arguments: Mapping[str, Any]) -> float | None:
    """Return the scale of LoRA that a call has in `cross_attention_kwargs`, or None if there is no number."""
    given = arguments[_ATTENTION]
    scale = given.get(_LORA_SCALE) if isinstance(given, Mapping) else None
    return float(scale) if isinstance(scale, int | float) else None


def _why_not_computed(module: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why no graph of a UNet computes a call with these arguments, or None; tensors are not checked."""
    config = _config(module)
    # One without the other is a deprecated argument of T2I-Adapter, or is ignored.
    has_residuals = arguments[CONTROLNET_DOWN] is not None and arguments[CONTROLNET_MID] is not None
    computed = {
        _LABELS: module.class_embedding is not None,
        _TIMESTEP_COND: config.get("time_cond_proj_dim") is not None,
        CONTROLNET_DOWN: has_residuals,
        CONTROLNET_MID: has_residuals,
    }
    for name, value in arguments.items():
        computed_keys = {_LORA_SCALE} if name == _ATTENTION and _lora_scale(arguments) is not None else set()
        is_given = value is not None and not (isinstance(value, Mapping) and value.keys() <= computed_keys)
        if is_given and name not in _COMPUTED and not computed.get(name, False):
            return f"it has {name}"
    for name in (CONTROLNET_DOWN, ADAPTER):
        if not isinstance(arguments[name], list | tuple | None):
            return f"its {name} are not a list"
    if has_residuals and len(arguments[CONTROLNET_DOWN]) != len(controlnet_inputs(config)) - 1:
        return f"it has {len(arguments[CONTROLNET_DOWN])} {CONTROLNET_DOWN}"
    if arguments[ADAPTER] and len(arguments[ADAPTER]) > len(adapter_inputs(config)):
        return f"it has {len(arguments[ADAPTER])} {ADAPTER}"
    names = [_TEXT_EMBEDS, _TIME_IDS] if config["addition_embed_type"] == "text_time" else []
    names += [] if module.encoder_hid_proj is None else [_IMAGE_EMBEDS]
    surplus = [str(name) for name in arguments["added_cond_kwargs"] or {} if name not in names]
    return f"it has added_cond_kwargs {', '.join(surplus)}" if surplus else None


def _default_time_ids(config: Mapping[str, Any]) -> int:
    """Return the number of sizes before the first call; 0 for a UNet that is not conditioned on these."""
    if config["addition_embed_type"] != "text_time":
        return 0
    # The pooled text has one value at least.
    most = (config["projection_class_embeddings_input_dim"] - 1) // config["addition_time_embed_dim"]
    return min(_DEFAULT_TIME_IDS, int(most))


def _count_time_ids(config: Mapping[str, Any], added: Mapping[str, Any] | None) -> int:
    """Return the number of sizes in `added_cond_kwargs`, or 0 if the UNet is not conditioned on these."""
    given = added or {}
    pooled, sizes = given.get(_TEXT_EMBEDS), given.get(_TIME_IDS)
    if config["addition_embed_type"] != "text_time":
        return 0
    if not (isinstance(pooled, torch.Tensor) and isinstance(sizes, torch.Tensor) and pooled.ndim == sizes.ndim == 2):
        return 0
    width = pooled.shape[1] + sizes.shape[1] * config["addition_time_embed_dim"]
    return sizes.shape[1] if width == config["projection_class_embeddings_input_dim"] else 0


def timesteps_of(timestep: Any, batch: int, device: torch.device) -> torch.Tensor | None:
    """Return a timestep for each image, as float32 (B,) on a device; None if it has another shape."""
    if isinstance(timestep, bool) or not isinstance(timestep, int | float | torch.Tensor):
        return None
    if not isinstance(timestep, torch.Tensor):
        # A copy from the host's memory would wait for the GPU.
        return torch.full((batch,), float(timestep), device=device)
    if timestep.ndim > 1 or (timestep.ndim == 1 and len(timestep) not in (1, batch)):
        return None
    if timestep.numel() == 1 and timestep.device != device:
        return torch.full((batch,), float(timestep), device=device)
    return timestep.detach().to(device, torch.float32).expand(batch).contiguous()


def _why_not_labels(unet: Any) -> str | None:
    """Return why the class labels of a UNet cannot be compiled, or None."""
    kind = unet.config.class_embed_type
    return None if kind in _LABEL_KINDS else f"its configuration has class_embed_type={kind!r}"


def _class_label_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the input for class labels; none for a UNet without them."""
    kind = unet.config.class_embed_type
    if unet.class_embedding is None:
        return ()
    if kind in (None, "timestep"):
        # One index, or one number, for each image.
        return (TensorSpec(_LABELS, ("batch_size",), integer=kind is None, keeps_float32=True),)
    width = unet.time_embedding.linear_2.out_features
    if kind != "identity":
        width = unet.config.projection_class_embeddings_input_dim
    return (TensorSpec(_LABELS, ("batch_size", width)),)


def _class_label_values(unet: Any, labels: Any, batch: int) -> Any:
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


def _why_not_images(unet: Any) -> str | None:
    """Return why the adapters of a UNet cannot be compiled; None if they can be, or if it has none."""
    projection = unet.encoder_hid_proj
    if projection is None:
        return None
    if type(projection) is not MultiIPAdapterImageProjection:
        return f"it has a {type(projection).__name__}"
    for layer in projection.image_projection_layers:
        if _embeds_dims(layer, 0) is None:
            return f"an IP-Adapter has a {type(layer).__name__}"
    if getattr(unet, "text_encoder_hid_proj", None) is not None:
        return "it projects its prompts"
    for name, processor in unet.attn_processors.items():
        is_adapted = type(processor) in _PROCESSORS
        if is_adapted != is_cross_attention(name):
            return f"it has IP-Adapters, and {name} is a {type(processor).__name__}"
        if is_adapted and len(processor.to_k_ip) != projection.num_ip_adapters:
            return f"{name} has {len(processor.to_k_ip)} IP-Adapters of {projection.num_ip_adapters}"
    return None


def _image_inputs(unet: Any) -> tuple[TensorSpec, ...]:
    """Return the inputs for the embeddings of each adapter's images, and for the scale in each cross-attention."""
    if (projection := unet.encoder_hid_proj) is None:
        return ()
    layers = [(index, _embeds_dims(layer, index)) for index, layer in enumerate(projection.image_projection_layers)]
    embeds = tuple(TensorSpec(f"{_IMAGE_EMBEDS}.{index}", dims) for index, dims in layers if dims is not None)
    scale = TensorSpec(ADAPTER_SCALE, (len(embeds), len(_attentions(unet))), keeps_float32=True)
    return (*embeds, scale)


def _image_tensors(unet: Any, embeds: Any) -> dict[str, Any] | str:
    """Return values of the inputs for images by name, or why the graph cannot compute a call with them.

    Args:
        unet: The UNet.
        embeds: The entry `image_embeds` of `added_cond_kwargs`.
    """
    if (projection := unet.encoder_hid_proj) is None:
        return {}
    count = projection.num_ip_adapters
    if not isinstance(embeds, list) or len(embeds) != count:
        return f"its {_IMAGE_EMBEDS} are not a list of {count} tensors"
    scales = [attention.processor.scale for attention in _attentions(unet)]
    if not all(isinstance(each, list) and len(each) == count for each in scales):
        return f"an IP-Adapter's attention has no list of {count} scales"
    if not all(isinstance(scale, int | float) for each in scales for scale in each):
        return "a scale of an IP-Adapter is not a number"
    named = {f"{_IMAGE_EMBEDS}.{index}": tensor for index, tensor in enumerate(embeds)}
    device = embeds[0].device if isinstance(embeds[0], torch.Tensor) else None
    weights = torch.tensor(scales, dtype=torch.float32, device=device)
    return named | {ADAPTER_SCALE: weights.T.contiguous()}


def _prepare_images(unet: Any) -> None:
    """Change a UNet in place: its `image_embeds` become a tuple, the list of diffusers and scales (adapters, N)."""
    if unet.encoder_hid_proj is None:
        return
    for index, attention in enumerate(_attentions(unet)):
        processor = attention.processor
        attention.processor = ImageAttention(index, processor.to_k_ip, processor.to_v_ip)
    unet.encoder_hid_proj = _WeightedImageProjection(list(unet.encoder_hid_proj.image_projection_layers))


class _WeightedImageProjection(MultiIPAdapterImageProjection):
    """Project the images of each adapter; each cross-attention is a block with its own weight."""

    def forward(self, image_embeds: Any) -> list[Any]:
        embeds, scales = image_embeds
        tokens = [each.flatten(1, 2) for each in super().forward(embeds)]
        return [ImagePrompt.weighted(each, weights) for each, weights in zip(tokens, scales, strict=True)]


def _attentions(unet: Any) -> list[Any]:
    """Return the cross-attentions of a UNet to images, in the order of `unet.attn_processors`."""
    return [each for each in unet.modules() if type(getattr(each, "processor", None)) in _PROCESSORS]


def _embeds_dims(layer: Any, index: int) -> tuple[str | int, ...] | None:
    """Return the shape of the embeddings that an adapter projects; None for other projections."""
    inner: Any = layer
    images, vectors = f"images_{index}", f"image_tokens_{index}"
    if type(layer) is ImageProjection:
        return "batch_size", images, int(inner.image_embeds.in_features)
    if type(layer) is IPAdapterFaceIDImageProjection:
        return "batch_size", images, int(inner.ff.net[0].proj.in_features)
    if type(layer) is IPAdapterFullImageProjection:
        return "batch_size", images, vectors, int(inner.ff.net[0].proj.in_features)
    if type(layer) is IPAdapterPlusImageProjection:
        return "batch_size", images, vectors, int(inner.proj_in.in_features)
    return None
