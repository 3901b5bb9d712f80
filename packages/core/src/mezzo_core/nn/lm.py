"""The language model: embedding, stack, final norm, head; one class for every paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo_core.config_json import check_fields, check_rules
from mezzo_core.nn.block import MixerBlockConfig
from mezzo_core.nn.configs import MixerConfig, StackConfig
from mezzo_core.nn.contract import AbstractStack, Run, run_eagerly
from mezzo_core.nn.init import init_weights
from mezzo_core.nn.linear import Linear, is_plain
from mezzo_core.nn.lm_output import LMOutput, Score
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.norm import RMSNorm
from mezzo_core.nn.rewinding import Rewinding
from mezzo_core.nn.sharded import entry
from mezzo_core.nn.stack import BlocksConfig
from mezzo_core.nn.state import Rows
from mezzo_core.ops.checks import check_size, is_read
from mezzo_core.ops.linear_cross_entropy import NO_TARGET, cross_entropy, linear_cross_entropy

_LARGEST = 2**31 - 1
"""The largest width or vocabulary: torch can still count the weights of their product."""


@dataclass(frozen=True)
class LMConfig:
    """Describes a language model.

    The layers are given either by their mixers, each in a block with an MLP, or by the
    configuration of any other stack.

    Attributes:
        vocab_size: rows of the embedding.
        d_model: model width C.
        mixers: one mixer configuration for each layer. A hybrid is a tuple of several kinds:
            `(RATConfig(), AttentionConfig(window_size=1024)) * 6`.
        mlp: the MLP of every layer; for `mixers`.
        norm_eps: epsilon of the final RMSNorm, and of the norms in blocks of `mixers`.
        tie_embeddings: whether the head shares the embedding's weight.
        init_std: standard deviation of every matrix at the start.
        stack: replaces `mixers` and `mlp`; for example a `BlocksConfig`.
    """

    vocab_size: int
    d_model: int
    mixers: tuple[MixerConfig, ...] = ()
    mlp: MLPConfig = field(default_factory=MLPConfig)
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    init_std: float = 0.02
    stack: StackConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        above_0 = "above 0 and at most 100"  # beyond that float32 overflows somewhere
        rules = {
            "vocab_size": (1 <= self.vocab_size <= _LARGEST, "from 1 to 2^31 - 1"),
            "d_model": (1 <= self.d_model <= _LARGEST, "from 1 to 2^31 - 1"),
            "norm_eps": (0 < self.norm_eps <= 100, above_0),
            "init_std": (0 < self.init_std <= 100, above_0),
        }
        check_rules(self, rules)
        if self.stack is None and not self.mixers:
            raise ValueError("mixers must have one item a layer, got none (or give a stack)")
        if self.stack is not None and (self.mixers or self.mlp != MLPConfig()):
            raise ValueError("mixers and mlp describe a stack, and so does stack: give one of them")

    def build(self) -> "LM":
        """Build the model, on torch's default device, with its weights drawn by `init_weights`.

        Under `torch.device("meta")` it takes no memory, which is enough for counting.

        Raises:
            ValueError: if a mixer or the stack refuses this width.
            TypeError: if one of `mixers` builds no mixer, or `stack` no stack.
        """
        embed = nn.Embedding(self.vocab_size, self.d_model)
        blocks = (MixerBlockConfig(mixer, self.mlp, self.norm_eps) for mixer in self.mixers)
        stack = (self.stack or BlocksConfig(tuple(blocks))).build(self.d_model)
        if not isinstance(stack, AbstractStack):
            raise TypeError(f"stack builds no stack, it is {type(self.stack).__name__}")
        norm = RMSNorm(self.d_model, eps=self.norm_eps)
        head = Linear(self.d_model, self.vocab_size, bias=False)
        if self.tie_embeddings:
            head.weight = embed.weight
        model = LM(embed, stack, norm, head)
        init_weights(model, self.init_std)
        return model


class LM(nn.Module):
    """Embedding, stack, final norm, head.

    Precision follows the caller: under autocast with float32 weights the embedding and the residual
    stream are float32 and the matrices multiply in bf16, logits included; weights cast to bf16 make
    everything bf16. The loss is always computed in float32.
    """

    _is_tied: bool

    def __init__(
        self, embed: nn.Embedding, stack: AbstractStack, norm: nn.Module, head: nn.Linear
    ) -> None:
        super().__init__()
        self.embed = embed
        self.stack = stack
        self.norm = norm
        self.head = head
        self.vocab_size = embed.num_embeddings
        """The number of tokens that the model knows."""
        self.register_load_state_dict_pre_hook(_note_tie)
        self.register_load_state_dict_post_hook(_tie_again)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LM":
        # Some conversions, such as `to_empty` of a model on the meta device, make new weights.
        _note_tie(self)
        super()._apply(fn, recurse)
        _tie_again(self)
        return self

    def forward(
        self,
        tokens: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        last_only: bool = False,
    ) -> LMOutput:
        """Predict the next token at every position.

        Args:
            tokens: (B, T) int64, each in [0, vocab), which is checked on a CPU only. All methods
                also take embeddings (B, T, C) in their place.
            state: where the tokens continue from (`init_state`, or the state of an earlier call);
                None keeps no state.
            cu_seqlens: (S + 1,) borders of sequences packed in one row; see `AbstractStack`.
            lengths: (B,) int64, real tokens of each row; the rest is padding on the right. Needs a
                state.
            last_only: compute the logits of each row's last real token alone, (B, 1, vocab), as a
                prefill needs them: all logits can be larger than the model. Those of a row without
                real tokens are meaningless.

        Raises:
            TypeError: if an argument is not a tensor.
            ValueError: if an argument has another shape or dtype, or a token is beyond the
                vocabulary; the message names it.
        """
        x = self._embedded(tokens)
        if last_only and tokens.shape[1] == 0:
            raise ValueError("last_only takes the last token of each row, got tokens with T = 0")
        if last_only and state is not None and cu_seqlens is None:
            x, state = self.stack.prefill(x, state, lengths=lengths)
        else:
            x, state = self.stack(x, state, cu_seqlens=cu_seqlens, lengths=lengths)
        if last_only:
            x = x[:, -1:]
        return LMOutput(self.head(self.norm(x)), state)

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, overwriting the state in place.

        It computes what `forward` would, but without growing buffers and without waiting for the
        GPU, so a CUDA graph can hold it (see `mezzo_core.nn.Decoder`).

        Args:
            tokens: (B, 1) int64, each in [0, vocab).
            state: from `reserve`, after `before_step`; see `AbstractStack.step` for what happens
                beyond its room.

        Returns:
            logits (B, 1, vocab) of the next token.

        Raises:
            RuntimeError: if gradients are on, since an overwritten state has none.
            TypeError: if an argument is not a tensor.
            ValueError: if an argument has another shape or dtype; the message names it.
        """
        x = self._embedded(tokens)
        if x.shape[1] != 1:
            raise ValueError(f"tokens must be (B, 1), got {tuple(tokens.shape)}")
        x = self.stack.step(x, state)
        return self.head(self.norm(x))

    def before_step(self, state: Any, run: Run = run_eagerly) -> None:
        """Do what the host must do before the next `step`; see `AbstractStack.before_step`."""
        self.stack.before_step(state, run)

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the state with room for `num_tokens` more tokens of every row, for `step`.

        Its buffers are its own: `step` overwrites them and leaves `state` alone.
        """
        return self.stack.reserve(state, _count("num_tokens", num_tokens))

    def fork(self, state: Any) -> Any:
        """Return a second state after the same tokens; see `AbstractStack.fork`."""
        return self.stack.fork(state)

    def select(self, state: Any, rows: Rows) -> Any:
        """Return the state of some rows, with repeats if wanted; see `AbstractStack.select`."""
        return self.stack.select(state, rows)

    def reset(self, state: Any, rows: Rows) -> Any:
        """Return a state in which some rows are before their first token."""
        return self.stack.reset(state, rows)

    def rewinding(self, room: int) -> "LM":
        """Return a model with the same weights whose states can go back by `room` tokens."""
        model = LM(self.embed, Rewinding(self.stack, room), self.norm, self.head)
        return model.train(self.training)

    def rollback(self, state: Any, n: int | Tensor) -> Any:
        """Return the state without the last n tokens of each row; see `Rewinding.rollback`."""
        if not isinstance(self.stack, Rewinding):
            raise TypeError("states of this model cannot go back: take those of model.rewinding(R)")
        return self.stack.rollback(state, n)

    @entry
    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        places: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return the cross-entropy in nats, float32, over the targets that are not -100.

        To compile it, compile the bound method: `torch.compile(model.loss)`.

        The logits are never all in memory; see `linear_cross_entropy`.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64, the token that follows each, or -100.
            cu_seqlens: as in `forward`.
            places: (N,) int64, indices into the B * T tokens: the head and the loss are computed
                there only. None: everywhere.
            reduction: "mean" over the targets that count (0 if there are none), or "sum".
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
        score = self._score(tokens, targets, cu_seqlens, places=places)
        if reduction == "sum":
            return score.loss
        # Not torch's own mean: it is NaN for a batch in which no target counts.
        return score.loss / score.targets.clamp(min=1)

    @entry
    def score(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        state: Any = None,
        lengths: Tensor | None = None,
    ) -> Score:
        """Return the summed loss, the number of targets and the hits, of texts or of segments.

        Scores of consecutive segments, each from the state after the one before, sum to that of the
        whole text. States are not detached, so gradients flow through them.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64, the token that follows each, or -100.
            cu_seqlens: as in `forward`.
            state: as in `forward`.
            lengths: as in `forward`; targets in padding do not count.
        """
        return self._score(tokens, targets, cu_seqlens, state, lengths)

    # Under FSDP `loss` and `score` both gather weights (`entry`), so neither may call the other.
    def _score(
        self,
        tokens: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None,
        state: Any = None,
        lengths: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Score:
        x = self._embedded(tokens)
        _check_tensor("targets", targets)
        shape, got = tuple(x.shape[:2]), tuple(targets.shape)
        if got != shape:
            raise ValueError(f"targets must have the shape of tokens, {shape}, got {got}")
        x, state = self.stack(x, state, cu_seqlens=cu_seqlens, lengths=lengths)
        if lengths is not None:
            is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
            targets = targets.masked_fill(is_padding, NO_TARGET)
        if places is not None:
            _check_tensor("places", places)
            if places.ndim != 1 or places.dtype != torch.int64:
                raise ValueError(
                    f"places must be int64 of shape (N,), got {places.dtype} "
                    f"of shape {tuple(places.shape)}"
                )
            x = x.flatten(0, 1).index_select(0, places)
            targets = targets.flatten().index_select(0, places)
        x = self.norm(x)
        if is_plain(self.head) and self.head.bias is None:
            loss, hits = linear_cross_entropy(x, self.head.weight, targets)
        else:  # such as an adapter around the head: the head itself computes the logits
            loss, hits = cross_entropy(self.head(x), targets)
        return Score(loss, (targets != NO_TARGET).sum(), hits, state)

    def _embedded(self, tokens: Tensor) -> Tensor:
        _check_tensor("tokens", tokens)
        if tokens.is_floating_point() and tokens.shape[2:] == (self.stack.d_model,):
            return tokens
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens must be int64 of shape (B, T), or embedded, (B, T, {self.stack.d_model}), "
                f"got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        if is_read(tokens) and tokens.numel() > 0:
            low, high = (int(end) for end in tokens.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"tokens must be in [0, {self.vocab_size}), got {low if low < 0 else high}"
                )
        return self.embed(tokens)

    def init_state(self, batch: int) -> Any:
        """Return the state of `batch` sequences before their first token."""
        return self.stack.init_state(_count("batch", batch))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state, on the weights' device, of one sequence of `num_tokens`."""
        return self.stack.state_bytes(num_tokens)

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence keeps in the host's memory, if any."""
        return self.stack.host_state_bytes(num_tokens)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Count the parameters, shared ones once.

        Args:
            embeddings: whether to count the embedding and the head.
        """
        left_out = () if embeddings else (self.embed, self.head)
        skip = {id(weight) for part in left_out for weight in part.parameters()}
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in skip)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token, averaged over a sequence of `num_tokens`.

        A multiply and an add count as two. The head counts; norms and the embedding's look-up do
        not. Training takes three times as many.
        """
        head = sum(weight.numel() for weight in self.head.parameters())
        return self.stack.flops_per_token(num_tokens) + 2 * head

    def units(self) -> Sequence[nn.Module]:
        """Return the parts of the stack that are sharded and compiled one at a time."""
        return self.stack.units()


def _owner(part: nn.Module) -> Any:
    """Return the module that holds the weight of an embedding or head, inside any wrapper."""
    return next((each for each in part.modules() if "weight" in each._parameters), None)


def _note_tie(model: LM, *_: Any) -> None:
    """Note whether the head shares the embedding's weight, before the weights are replaced."""
    head, embed = _owner(model.head), _owner(model.embed)
    model._is_tied = head is not None and embed is not None and head.weight is embed.weight


def _tie_again(model: LM, *_: Any) -> None:
    if model._is_tied:
        head, embed = _owner(model.head), _owner(model.embed)
        head.weight = embed.weight


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int64 tensor, got {type(value).__name__}")


def _count(name: str, value: Any) -> Any:
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's too
    check_size("LM", name, value, 0)
    return value
