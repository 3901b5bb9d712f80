"""Our mixers in place of attention inside Llama, Mistral and Qwen models of transformers.

Importing this module registers the kinds of models that `replace_attention` makes ("mezzo_llama"
for "llama"), so that `from_pretrained` reads what their `save_pretrained` wrote.
"""

import inspect
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation import GenerationMode

from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.hub.cache import HeldState, MixerLayer, read_only_new, room_to_go_back
from mezzo_core.hub.config import MezzoConfig
from mezzo_core.hub.model import CACHE
from mezzo_core.hub.padding import Padding
from mezzo_core.hub.register import register_model
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.init import init_weights


class MixerAttention(nn.Module):
    """A mixer with the arguments of transformers' attention; its state is a layer of the cache."""

    def __init__(self, mixer: AbstractMixer, layer_idx: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        packed_borders: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Mix along time, (B, T, C) to (B, T, C).

        Positions count the real tokens of a row. The mixer does not use those that the model
        computes for its other layers.

        Args:
            hidden_states: (B, T, C).
            attention_mask: what the model made of its mask: (B, 1, T, S), (B, S), or None.
            cache: the model's cache, in which the layer keeps its state.
            past_key_values: the older name of `cache`.
            packed_borders: (S + 1,) of sequences packed in the one row, by `_told_borders`.

        Raises:
            UserError: if the mask is of another kind, the cache is static or has other layers, or
                packed sequences have a cache.
        """
        cache = past_key_values if cache is None else cache
        if packed_borders is not None:
            if cache is not None:
                raise UserError("packed sequences take no cache: give use_cache=False")
            return self.mixer(hidden_states, cu_seqlens=packed_borders)[0], None
        padding = _padding(attention_mask, hidden_states)
        x = hidden_states if padding is None else padding.to_end(hidden_states)
        if cache is None:
            y, _state = self.mixer(x)
        else:
            y = self.held_in(cache, len(x)).read_on(x, padding)
        return (y if padding is None else padding.in_place(y)), None

    def held_in(self, cache: Any, batch: int) -> HeldState:
        """Return the state in this layer's place of the cache; begin one if nothing was read.

        Raises:
            UserError: if the cache is static, or has another model's layer there.
        """
        layers, i = cache.layers, self.layer_idx
        layer = layers[i] if i < len(layers) else None
        if isinstance(layer, MixerLayer) and layer.held.module is self.mixer:
            return layer.held
        if i > len(layers) or (layer is not None and layer.is_initialized):
            raise UserError(f"the cache has another model's layer in place {i}")
        if layer is not None and layer.is_compileable:  # its masks have a column for all to come
            raise UserError("a mixer in place of attention takes no static cache")
        held = HeldState(self.mixer, batch)
        layers[i : i + 1] = [MixerLayer(held)]
        return held


def replace_attention(
    model: PreTrainedModel, mixer: MixerConfig, layers: Sequence[int] | None = None
) -> PreTrainedModel:
    """Put new mixers in place of a model's attention, layer by layer.

    The model changes in place, and is returned: its class is another one, and its other weights
    stay. It is a model of transformers: `generate`, with a cache too, `save_pretrained` and
    `Trainer` work.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling.
        mixer: the configuration of the mixer.
        layers: numbers of the layers whose attention is replaced; None for all.

    Raises:
        UserError: if the model is of another kind or lies on several devices, a layer is not there,
            or the mixer does not support the model's width.
    """
    kinds = {kind: made.__base__ for kind, (_, made) in _KINDS.items()}
    kind = next((kind for kind, theirs in kinds.items() if isinstance(model, theirs)), None)
    if kind is None:
        known = ", ".join(theirs.__name__ for theirs in kinds.values())
        raise UserError(f"model must be one of {known}, got {type(model).__name__}")
    depth = model.config.num_hidden_layers
    chosen = range(depth) if layers is None else layers
    if wrong := [i for i in chosen if not 0 <= i < depth]:
        raise UserError(f"layers must be from 0 to {depth - 1}, got {wrong[0]}")
    config_class, model_class = _KINDS[kind]
    place, new = next(model.parameters()), {}
    for i in chosen:  # first of all, so that a mixer that does not fit leaves the model as it was
        built = mixer.build(model.config.hidden_size)
        init_weights(built, model.config.initializer_range)
        new[i] = built.to(device=place.device, dtype=place.dtype)
    before = getattr(model.config, "mezzo_mixers", {})
    mixers = {**before, **{str(i): to_json(mixer) for i in chosen}}
    told = {**model.config.to_dict(), "model_type": _PREFIX + kind, "mezzo_mixers": mixers}
    config = config_class.from_dict(told)
    config._attn_implementation = model.config._attn_implementation  # which a dict does not tell
    old = model.config
    for inner in model.modules():  # later changes of the model's configuration reach them too
        if getattr(inner, "config", None) is old:
            inner.config = config
    if not isinstance(model, model_class):
        model.__class__ = model_class  # in place, so that whoever holds it saves it as what it is
        _attach(model)
    for i, built in new.items():
        _put(model, i, built)
    return model


def _put(model: Any, layer: int, mixer: AbstractMixer) -> None:
    model.model.layers[layer].self_attn = MixerAttention(mixer, layer).train(model.training)


def _attach(model: Any) -> None:
    """Make room to take tokens back, and tell the layers the borders of packed sequences."""
    model.register_forward_pre_hook(_allow_rollback, with_kwargs=True)
    names = tuple(inspect.signature(model.model.forward).parameters)
    model.model.register_forward_pre_hook(partial(_told_borders, names), with_kwargs=True)


def _padding(mask: Any, x: Tensor) -> Padding | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise UserError(
            "a mixer in place of attention takes the masks of attn_implementation "
            f"sdpa, eager and flash_attention_2, got {type(mask).__name__}"
        )
    T = x.shape[1]
    if mask.ndim == 2:
        return Padding.of(mask[:, mask.shape[1] - T :])
    # A token that is padding does not see itself; every other does, in a window too.
    own = mask[:, 0].diagonal(mask.shape[-1] - T, 1, 2)
    return Padding.of(own if own.dtype == torch.bool else own == 0)


def _with_mixers(kind: str, config: type, model: type) -> tuple[Any, Any]:
    """Make and register the classes of a kind of models, some of whose layers have mixers."""

    def init(self: Any, config: PretrainedConfig) -> None:
        cast(Any, model).__init__(self, config)
        _attach(self)
        for i, told in config.mezzo_mixers.items():
            mixer: MixerConfig = from_json(told, MezzoConfig.allowed_packages)
            built = mixer.build(config.hidden_size)
            init_weights(built, config.initializer_range)
            _put(self, int(i), built)

    def prepare_cache(
        self: Any, config: GenerationConfig, kwargs: dict[str, Any], mode: GenerationMode,
        batch: int, length: int,
    ) -> None:  # fmt: skip
        cast(Any, model)._prepare_cache_for_generation(self, config, kwargs, mode, batch, length)
        if (room := room_to_go_back(config, mode)) and (cache := kwargs.get(CACHE)) is not None:
            for part in self.modules():
                if isinstance(part, MixerAttention):
                    while len(cache.layers) < part.layer_idx:  # transformers 5.6 makes them late
                        cache.layers.append(cache.layer_class_to_replicate())
                    part.held_in(cache, batch).allow_rollback(room)

    prepare = cast(Any, model).prepare_inputs_for_generation

    @wraps(prepare)
    def prepare_inputs(self: Any, *arguments: Any, **options: Any) -> Any:
        read_only_new(arguments[0], options.get(CACHE), options)
        return prepare(self, *arguments, **options)

    named = {"model_type": _PREFIX + kind, "__module__": __name__}
    config_class = cast(Any, type(f"Mezzo{config.__name__}", (config,), named))
    own = {
        "__init__": init,
        "_prepare_cache_for_generation": prepare_cache,
        "prepare_inputs_for_generation": prepare_inputs,
        "config_class": config_class,
        "__module__": __name__,
    }
    model_class = cast(Any, type(f"Mezzo{model.__name__}", (model,), own))
    for made in (config_class, model_class):  # where pickle looks for them
        globals()[made.__name__] = made
    register_model(config_class, model_class)
    return config_class, model_class


def _allow_rollback(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make room in the cache to take back the tokens whose logits assisted decoding asks for."""
    wanted, cache = kwargs.get("logits_to_keep", 0), kwargs.get(CACHE)
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, MixerLayer) and layer.is_croppable and isinstance(wanted, int):
            layer.held.allow_rollback(wanted)


def _told_borders(
    names: Sequence[str], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Add the borders of packed sequences to the arguments of a call.

    As for transformers' own attention, a row is packed if its `position_ids` begin anew, and there
    is no mask.
    """
    told = dict(zip(names, args, strict=False)) | kwargs
    positions = told.get("position_ids")
    if positions is None or any(told.get(name) is not None for name in (CACHE, "attention_mask")):
        return None
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not begins.any():
        return None
    if len(positions) > 1:
        raise UserError(f"packed sequences must be in one row, got {len(positions)} rows")
    T = positions.shape[1]
    inside = begins[0].nonzero()[:, 0] + 1
    borders = torch.cat([inside.new_zeros(1), inside, inside.new_full((1,), T)])
    if told.get("use_cache") is None:
        kwargs = {**kwargs, "use_cache": False}
    return args, {**kwargs, "packed_borders": borders}


_PREFIX = "mezzo_"
_KINDS = {
    kind: _with_mixers(kind, config, model)
    for kind, config, model in (
        ("llama", LlamaConfig, LlamaForCausalLM),
        ("mistral", MistralConfig, MistralForCausalLM),
        ("qwen2", Qwen2Config, Qwen2ForCausalLM),
        ("qwen3", Qwen3Config, Qwen3ForCausalLM),
    )
}
