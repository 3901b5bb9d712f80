"""A language model of mezzo as a model of transformers."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from mezzo_core.errors import UserError
from mezzo_core.hub.cache import MezzoCache, read_only_new, room_to_go_back
from mezzo_core.hub.config import MezzoConfig
from mezzo_core.hub.padding import Padding
from mezzo_core.nn.init import init_weights
from mezzo_core.nn.lm import LM
from mezzo_core.nn.sharded import check_whole
from mezzo_core.ops.linear_cross_entropy import NO_TARGET, check_targets, cross_entropy

_NAMES = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _NAMES else "past_key_values"
"""The name of the cache in outputs and arguments, which depends on the version of transformers."""


class MezzoForCausalLM(PreTrainedModel, GenerationMixin):
    """Holds an `LM`, as `lm`, and has the arguments and outputs of transformers' models."""

    config_class = MezzoConfig
    base_model_prefix = "lm"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm.head.weight": "lm.embed.weight"}  # noqa: RUF012 (transformers' form)

    def __init__(self, config: MezzoConfig) -> None:
        super().__init__(config)
        self.lm = config.lm_config.build()
        self.gradient_checkpointing = False
        self._no_split_modules = sorted({type(unit).__name__ for unit in self.lm.units()})
        self.post_init()

    @classmethod
    def around(cls, lm: LM, config: MezzoConfig) -> "MezzoForCausalLM":
        """Return a model that holds this `LM` itself, which `config` describes."""
        with torch.device("meta"):
            model = cls(config)
        model.lm = lm
        return model

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model, as every model of transformers does.

        Raises:
            UserError: if the folder lacks some of the model's weights, or their shapes differ.
                Other models would be given random weights in their place.
        """
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(*args, **kwargs)
        wrong = sorted(info["missing_keys"]) or sorted(name for name, *_ in info["mismatched_keys"])
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(f"no weights that fit the model for {', '.join(wrong[:3])}{more}")
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *others: Any,
        **options: Any,
    ) -> None:
        """Save the model, as every model of transformers does.

        Raises:
            ValueError: if `fully_shard` has sharded it, and no `state_dict` is given.
        """
        if state_dict is None and getattr(self.config, "distributed_config", None) is None:
            check_whole(self)
        super().save_pretrained(save_directory, is_main_process, state_dict, *others, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: MezzoCache | None = None,
        past_key_values: MezzoCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: (B, T) int64 or int32, the tokens that come after those of the cache.
            attention_mask: (B, S), whose last T columns tell real tokens (1) from padding (0), on
                the left, on the right or between. Padding changes nothing: positions count real
                tokens, and the logits of padding are meaningless. None: no padding.
            cache: of the tokens before, which is updated.
            past_key_values: the older name of `cache`.
            labels: (B, T) int64, usually `input_ids`; -100 does not count, nor does padding. The
                label of a token is what is predicted at the token before it.
            use_cache: whether to return a cache; by default, if one was given.
            logits_to_keep: give the logits of this many last positions, or of those positions if it
                is a tensor; 0 for all, 1 for each row's last real token.
            num_items_in_batch: what to divide the sum of the losses by; by default, how many labels
                count.
            inputs_embeds: (B, T, C), in place of `input_ids`.
            output_hidden_states: whether to return what each block takes, and what the head takes,
                of models whose blocks run one after another; by default, as the configuration says.
            others: arguments of other models, which may only be None or False. `position_ids` may
                be the places that real tokens have here.

        Returns:
            `loss`, a float32 scalar in nats if there are labels; `logits` (B, T, vocab); the cache;
            `hidden_states`, depth + 1 tensors (B, T, C).

        Raises:
            UserError: if not one of `input_ids` and `inputs_embeds` is given, its shape is wrong,
                the mask has no column for each token, the labels are not those of the tokens, the
                cache is another model's, or an argument is not supported.
            ValueError: if a token or a label is beyond the vocabulary, which is seen on a CPU.
        """
        tokens = _tokens(input_ids, inputs_embeds)
        keeps_places = isinstance(logits_to_keep, Tensor)
        count = 0 if keeps_places else operator.index(logits_to_keep)
        cache = self._given_cache(cache, past_key_values)
        if use_cache and cache is None:
            cache = MezzoCache(self.lm, len(tokens))
        padding = _padding(tokens, attention_mask)
        past = 0 if cache is None else cache.get_seq_length()
        if isinstance(others.get("position_ids"), Tensor):
            _check_places(others.pop("position_ids"), tokens, attention_mask, past)
        _refuse(others)
        # The token of padding may be none of the model's.
        tokens = tokens if padding is None else padding.to_end(tokens)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden: list[Tensor] | None
        with _recording(self.lm, cache) if output_hidden_states else nullcontext() as hidden:
            if cache is None:
                # What follows a token does not change its logits, so padding needs no lengths here.
                logits = self.lm(tokens).logits
            elif hidden is not None:
                logits = cache.held.read(tokens, padding)
            else:
                if cache.is_croppable:  # assisted decoding wants logits of what it may take back
                    cache.allow_rollback(count)
                last_only = count == 1 and labels is None
                logits = cache.held.read_on(tokens, padding, last_only=last_only)
        loss = None
        if labels is not None:
            loss = _loss(logits, labels, padding, num_items_in_batch)
        if padding is not None:
            hidden = hidden and [padding.in_place(each) for each in hidden]
            if logits.shape[1] == tokens.shape[1]:
                logits = padding.last(logits) if count == 1 else padding.in_place(logits)
        logits = logits[:, logits_to_keep if keeps_places else slice(-count, None)]
        kept = None if use_cache is False else cache
        states = None if hidden is None else tuple(hidden)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=states, **{CACHE: kept}
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.lm.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding, by one of another vocabulary perhaps."""
        self.lm.embed = value
        self.lm.vocab_size = value.num_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.lm.head = new_embeddings

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of an embedding or head that is to replace the model's.

        The model's own weights were drawn by `LMConfig.build`, or are loaded.
        """
        if all(module is not part for part in self.modules()):
            init_weights(module, self.config.lm_config.init_std)

    def _given_cache(self, cache: Any, past_key_values: Any) -> MezzoCache | None:
        given = past_key_values if cache is None else cache
        if given is None:
            return None
        if not isinstance(given, MezzoCache):
            raise UserError(
                "cache must be a MezzoCache, which a call with use_cache=True returns, "
                f"got {type(given).__name__}"
            )
        if given.lm is not self.lm:
            raise UserError("cache must be one of this model, got another model's")
        return given

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make the cache where `forward` would make another: with room for all, or to go back.

        Assisted decoding takes tokens back, in the model's cache and in the assistant's.
        """
        kind = generation_config.cache_implementation
        # Older versions of transformers ask for "dynamic_full" where they decode with an assistant.
        if kind not in (None, "dynamic", "dynamic_full", "static"):
            raise UserError(f"cache_implementation must be static, dynamic or None, got {kind!r}")
        room = room_to_go_back(generation_config, generation_mode)
        if generation_config.assistant_early_exit is not None:
            raise UserError("assistant_early_exit must be None: a first part is no model here")
        has_assistant = room and not generation_config.prompt_lookup_num_tokens
        if has_assistant and model_kwargs.get("inputs_embeds") is not None:
            raise UserError("an assistant model reads tokens: give input_ids, and no inputs_embeds")
        # A prompt that is read in parts needs a cache from the first part on.
        in_parts = generation_config.prefill_chunk_size is not None
        if (kind == "static" or in_parts) and not room and CACHE not in model_kwargs:
            rows = max(generation_config.num_beams, generation_config.num_return_sequences)
            length = max_cache_length if kind == "static" else 0
            model_kwargs[CACHE] = MezzoCache(self.lm, rows * batch_size, length=length)
            return
        if not room:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        model_kwargs.pop("position_ids", None)  # of a Llama that asks: we count places ourselves
        cache = self._given_cache(model_kwargs.get(CACHE), None)
        if cache is None:
            cache = model_kwargs[CACHE] = MezzoCache(self.lm, batch_size)
        cache.allow_rollback(room)

    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Prepare a step; PEFT looks for the cache by the name of older versions."""
        read_only_new(arguments[0], options.get(CACHE), options)
        given: dict[str, Any] = super().prepare_inputs_for_generation(*arguments, **options)
        if CACHE in given:
            given.setdefault("past_key_values", given[CACHE])
        return given

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Tell `generate` to leave the cache to `forward`."""
        return False

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Let the backward compute the activations of every n-th unit again, or no longer."""
        self.gradient_checkpointing = enable
        for i, unit in enumerate(self.lm.units()):
            unit.__dict__.pop("forward", None)
            if enable and i % every_n_layers == 0:
                unit.__dict__["forward"] = partial(
                    _run_checkpointed, gradient_checkpointing_func, unit.forward
                )


@contextmanager
def _recording(lm: LM, cache: MezzoCache | None) -> Iterator[list[Tensor]]:
    """Note what each block of the model takes meanwhile, and at last what the head takes."""
    blocks = lm.stack.stages()
    if lm.stack in blocks:
        raise UserError(
            "output_hidden_states is for models whose blocks run one after another, "
            f"got {type(lm.stack).__name__}"
        )
    if cache is not None and cache.is_croppable:
        raise UserError("output_hidden_states needs a cache that takes no tokens back")
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for block in blocks
    ]
    hooks.append(lm.norm.register_forward_hook(lambda _, given, made: seen.append(made)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _run_checkpointed(
    by: Callable[..., Any], forward: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Run `forward` by a checkpointing function; a reentrant one takes no named arguments."""
    return by(partial(forward, **options), *arguments)


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return the one that is not None, in a dtype that an `LM` takes."""
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("give one of input_ids and inputs_embeds")
    given: Any = inputs_embeds if input_ids is None else input_ids
    name, axes = ("inputs_embeds", "BTC") if input_ids is None else ("input_ids", "BT")
    if given.ndim != len(axes):
        raise UserError(f"{name} must be ({', '.join(axes)}), got {tuple(given.shape)}")
    return given.long() if given.dtype == torch.int32 else given


def _check_places(
    position_ids: Tensor, tokens: Tensor, attention_mask: Tensor | None, past: int
) -> None:
    """Refuse position ids other than ours, which count a row's real tokens."""
    B, T = tokens.shape[:2]
    if attention_mask is None and past == 0:
        attention_mask = tokens.new_ones((B, T), dtype=torch.int64)
    if attention_mask is None or attention_mask.shape[1] < past + T:
        raise UserError("position_ids need the attention_mask of all tokens, the cache's too")
    real = attention_mask[:, -T:].bool()
    wanted = attention_mask.bool().cumsum(1)[:, -T:] - 1
    if tuple(position_ids.shape) not in {(1, T), (B, T)} or ((position_ids != wanted) & real).any():
        raise UserError(
            "position_ids must count the real tokens of each row from 0, or on from the cache, as "
            "MezzoForCausalLM does without them"
        )


def _padding(tokens: Tensor, attention_mask: Tensor | None) -> Padding | None:
    B, T = tokens.shape[:2]
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != B or shape[1] < T:
        raise UserError(
            f"attention_mask must be ({B}, S) with a column for each token, S >= {T}, got {shape}"
        )
    return Padding.of(attention_mask[:, shape[1] - T :])


def _loss(
    logits: Tensor, labels: Tensor, padding: Padding | None, count: Tensor | int | None
) -> Tensor:
    """Return the mean loss of the labels that count, or their sum by `count`.

    The padding of the logits is at the end of their rows, that of the labels is not.
    """
    if labels.dtype != torch.int64 or labels.shape != logits.shape[:-1]:
        raise UserError(
            f"labels must be int64 of shape {tuple(logits.shape[:-1])}, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if padding is not None:
        labels = padding.to_end(labels).masked_fill(padding.is_end(), NO_TARGET)
    targets = labels[:, 1:]
    check_targets("labels", targets, logits.shape[-1])
    loss, _ = cross_entropy(logits[:, :-1], targets)
    return loss / ((targets != NO_TARGET).sum().clamp(min=1) if count is None else count)


def _refuse(others: dict[str, Any]) -> None:
    """Refuse arguments of other models rather than ignore them.

    `tokenizer` may be given: `generate` hands it on to every model.
    """
    given = [
        name
        for name, value in others.items()
        if value is not None and value is not False and name != "tokenizer"
    ]
    if given:
        raise UserError(f"MezzoForCausalLM does not take {', '.join(given)}")
