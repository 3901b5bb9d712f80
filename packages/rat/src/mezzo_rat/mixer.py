"""RAT, the mixer: projections around the op (the paper's section 2.3)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import check_size, is_read
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor, nn

from mezzo_rat.gate_bias import init_gate_bias
from mezzo_rat.ops.rat_attention import (
    RATState,
    chunk_rat_attention_projected,
    init_state,
    reserve,
    step_rat_attention_,
)
from mezzo_rat.ops.rat_attention.arguments import check_numbers


@dataclass(frozen=True)
class RATConfig:
    """RAT: a gated linear RNN inside chunks, softmax attention over the chunks' ends.

    The defaults are the paper's model. Its ablation (figure 4a) is `num_groups=None` with a
    `gate_rank`: full queries and keys, with low-rank gates to keep the number of weights.
    """

    chunk_size: int = 16
    """L. With 1 the mixer is attention, with T or more a linear RNN."""
    head_dim: int = 64
    num_groups: int | None = 2
    """G: heads with the same h % G share queries and keys. None: each head has its own."""
    gate_rank: int | None = None
    """Rank of the two gates' projections; None: full rank.

    A rank of num_groups * head_dim / 2 makes the ablation as large as the paper's model.
    """
    rope: Literal["chunk", "token"] | None = "chunk"
    """Rotate by chunk index, by token position, or not at all (NoPE)."""
    rope_base: float = 10_000.0
    span: int | None = None
    """The gates start with memories of up to this many tokens; None: of the chunk size."""
    num_heads: int | None = None
    """H; None: d_model / head_dim, so that the heads fill the width."""

    def build(self, d_model: int) -> "RAT":
        """Build the mixer.

        Raises:
            TypeError: if a size is not an int, or a number not a number; it names the field.
            ValueError: if the widths do not divide, a size is not positive, or an option is
                unknown; it names the field.
        """
        return RAT(self, d_model)


class RAT(AbstractMixer):
    """The RAT mixer.

    `in_proj` gives z, v, g of H·D channels each and q, k of G·D channels each. With a `gate_rank` r
    its z and g have r channels, which `z_proj` and `g_proj` map to H·D. No projection has a bias.
    """

    state_type = RATState

    def __init__(self, config: RATConfig, d_model: int) -> None:
        super().__init__()
        D = config.head_dim
        check_size("RAT", "d_model", d_model)
        check_numbers("RAT", config.chunk_size, config.rope, config.rope_base)
        check_size("RAT", "head_dim", D)
        if config.num_heads is None and d_model % D:
            raise ValueError(f"RAT: head_dim must divide d_model = {d_model}, got {D}")
        H = d_model // D if config.num_heads is None else config.num_heads
        check_size("RAT", "num_heads", H)
        G = H if config.num_groups is None else config.num_groups
        check_size("RAT", "num_groups", G)
        if H % G:
            raise ValueError(f"RAT: num_groups must divide the {H} heads, got {G}")
        for name in ("gate_rank", "span"):
            if getattr(config, name) is not None:
                check_size("RAT", name, getattr(config, name))
        if config.rope is not None and D % 2:
            raise ValueError(f"RAT: rope needs an even head_dim, got {D}")
        self.config = config
        self.d_model, self.num_heads, self.num_groups = d_model, H, G
        width = H * D
        gate = width if config.gate_rank is None else config.gate_rank
        self.widths = (gate, width, gate, G * D, G * D)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        if config.gate_rank is not None:
            self.z_proj = Linear(gate, width, bias=False)
            self.g_proj = Linear(gate, width, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(width))
        self.out_proj = Linear(width, d_model, bias=False)
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Start the forget gates with memories of up to the span (log u, u ~ U(1, span - 1))."""
        init_gate_bias(self.gate_bias, self.config.span or self.config.chunk_size)

    @torch.no_grad()
    def take_attention(self, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> None:
        """Copy the matrices of softmax attention, so that a Transformer can become a RAT.

        Keys and values that heads share are repeated. The output gates start at 1/2 for every
        token, and Wo is doubled: with chunks of one token and forget gates at 0, the mixer equals
        the attention.

        Args:
            wq: (HQ D, C), with as many heads as the mixer.
            wk: (H D, C), with H heads that divide these.
            wv: (H D, C).
            wo: (C, HQ D).

        Raises:
            ValueError: if the heads do not fit, or those of the mixer share queries.
        """
        C, D, width = self.d_model, self.config.head_dim, self.widths[1]
        if self.num_groups != self.num_heads:
            raise ValueError("must have num_groups=None: heads of attention share no queries")
        shared = [tuple(weight.shape) for weight in (wk, wv)]
        fits = wq.shape == wo.mT.shape == (width, C) and shared[0] == shared[1] == (len(wk), C)
        if not fits or len(wk) % D or width % len(wk):
            raise ValueError(
                f"has {self.num_heads} heads of width {D}, got Wq of {tuple(wq.shape)}, "
                f"Wk of {shared[0]}, Wv of {shared[1]}, Wo of {tuple(wo.shape)}"
            )
        k, v = (
            weight.unflatten(0, (-1, D)).repeat_interleave(width // len(wk), 0).flatten(0, 1)
            for weight in (wk, wv)
        )
        z, own_v, _, own_q, own_k = self.in_proj.weight.split(list(self.widths))
        gate = z if self.config.gate_rank is None else self.z_proj.weight
        gate.zero_()
        for own, weight in ((own_q, wq), (own_k, k), (own_v, v), (self.out_proj.weight, 2 * wo)):
            own.copy_(weight)

    def forward(
        self,
        x: Tensor,
        state: RATState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, RATState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        x = without_padding(x, lengths)
        y, state = chunk_rat_attention_projected(
            self._project(x),
            **self._form(),
            initial_state=state,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
        )
        return self.out_proj(y.flatten(2)), state

    def step(self, x: Tensor, state: RATState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        self.check_step(x, state)
        y = step_rat_attention_(self._project(x), state, **self._form())
        return self.out_proj(y.flatten(2))

    def check_step(self, x: Tensor, state: RATState) -> None:
        """Check the arguments of `step`, and that each row has a slot for the token's chunk."""
        super().check_step(x, state)
        num_slots, lengths = state.k_ends.shape[1], state.lengths
        if is_read(lengths) and (lengths // self.config.chunk_size >= num_slots).any():
            raise ValueError("state has no slot left for another token: reserve more")

    def reserve(self, state: RATState, num_tokens: int) -> RATState:
        """Return the state with slots for `num_tokens` more tokens, in buffers of its own."""
        self.check_reserve(state, num_tokens)
        grown = reserve(state, num_tokens, self.config.chunk_size)
        # Tensors that grew are new buffers already; copying them would need twice their memory.
        return RATState(
            *(
                new.clone(memory_format=torch.contiguous_format) if new is old else new
                for old, new in zip(state, grown, strict=True)
            )
        )

    def _project(self, x: Tensor) -> Tensor:
        """Return z, v, g, q, k side by side, (B, T, (3 H + 2 G) D)."""
        zvgqk = self.in_proj(x)
        if self.config.gate_rank is None:
            return zvgqk
        z, v, g, qk = zvgqk.split([*self.widths[:3], sum(self.widths[3:])], dim=-1)
        return torch.cat([self.z_proj(z), v, self.g_proj(g), qk], dim=-1)

    def _form(self) -> dict[str, Any]:
        """Return the arguments of the op that are the same in every call."""
        return {
            "num_heads": self.num_heads,
            "num_groups": self.num_groups,
            "chunk_size": self.config.chunk_size,
            "gate_bias": self.gate_bias.view(self.num_heads, -1),
            "rope": self.config.rope,
            "rope_base": self.config.rope_base,
        }

    def init_state(self, batch: int) -> RATState:
        """Return the state before the first token."""
        weight = self.out_proj.weight
        return init_state(
            batch, self.num_heads, self.config.head_dim, dtype=weight.dtype, device=weight.device
        )

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state of one sequence: chunk ends, the open chunk, a counter."""
        slots = -(-num_tokens // self.config.chunk_size)
        dtype = self.out_proj.weight.dtype
        values = slots * dtype.itemsize + accumulation_dtype(dtype).itemsize
        return 2 * self.widths[1] * values + 8

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token, averaged over a sequence of T tokens.

        Projections 2 C (3 H + 2 G) D + 2 C H D; the recurrence of k~ and v~, each f h + (1 - f) x:
        2 * 3 H D; attention 4 H D a logit (score and value), over the mean number of logits; the
        output gate H D. Sigmoids, exponentials and RoPE are not counted.
        """
        width = self.widths[1]
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        logits = mean_logits(num_tokens, self.config.chunk_size)
        return 2 * weights + 6 * width + 4 * width * logits + width


def mean_logits(num_tokens: int, chunk_size: int) -> float:
    """Return how many logits a query has, averaged over the tokens of a sequence.

    Token t sees the ends of the t // L earlier chunks and itself: t // L + 1 logits. For T = N L
    that is (N + 1) / 2 on average, the paper's O(C D) FLOPs with C = N chunks (section 2.4).
    """
    full, rest = divmod(num_tokens, chunk_size)
    return (chunk_size * full * (full + 1) / 2 + rest * (full + 1)) / max(num_tokens, 1)
