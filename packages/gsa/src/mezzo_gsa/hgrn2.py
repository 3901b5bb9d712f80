"""HGRN2, the mixer: gated linear attention whose keys are one minus the forget gates."""

from dataclasses import dataclass

import torch.nn.functional as F
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm, is_plain_norm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.padding import without_padding
from torch import Tensor

from mezzo_gsa.gla import GLAState
from mezzo_gsa.heads import Heads, state_zeros
from mezzo_gsa.ops import LayerForm, chunk_gla, step_gla_layer_
from mezzo_gsa.ops.gates import bounded_gate, log_gate, skip_padding
from mezzo_gsa.ops.gla.arguments import check_log_bounds


@dataclass(frozen=True)
class HGRN2Config:
    """HGRN2 (arXiv:2404.07904), a baseline of the paper."""

    head_dim: int = 128
    """Width of a head's keys and values."""
    lower_bound: float = 0.0
    """The smallest forget gate, a constant; `lower_bounds` gives one for each layer of a model.
    HGRN2's own bounds are learned: see `mezzo_gsa.HGRN2StackConfig`."""
    norm_eps: float = 1e-5

    def build(self, d_model: int) -> "HGRN2":
        """Build the mixer.

        Raises:
            TypeError: if a field has a wrong type.
            ValueError: if `head_dim` does not divide `d_model`, the bound is not in [0, 1), or
                `norm_eps` is not positive.
        """
        return HGRN2(self, d_model)


def lower_bounds(num_layers: int) -> list[float]:
    """Return constant lower bounds of the forget gates of a model's layers, the first at 0.

    Upper layers remember longer. HGRN2 learns its bounds, as `HGRN2Stack` does; these are the
    initial ones, for layers outside such a stack.

    Raises:
        ValueError: if there is no layer.
    """
    check_size("lower_bounds", "num_layers", num_layers)
    return [layer / num_layers for layer in range(num_layers)]


class HGRN2(AbstractMixer):
    """The HGRN2 mixer: y = RMSNorm(concat_h S[t]ᵀ q) Wo, with the norm over all C channels.

    S[t] = Diag(α) S[t-1] + (1 - α) ⊗ v, q = swish(x Wq), v = x Wv, and with the lower bound β
    α = β + (1 - β) sigmoid(x Wg).

    The rows of `in_proj.weight` are those of Wq, Wg and Wv, by head; `out_proj` is Wo.

    The norm's input grows with the square of x. In float16 it overflows where x is about 30 times
    as large as a block's norm makes it.
    """

    state_type = GLAState

    def __init__(self, config: HGRN2Config, d_model: int) -> None:
        super().__init__()
        D = config.head_dim
        check_size("HGRN2Config", "head_dim", D)
        check_size("HGRN2Config", "d_model", d_model)
        if d_model % D:
            raise ValueError(f"head_dim must divide d_model = {d_model}, got {D}")
        check_number("HGRN2Config", "norm_eps", config.norm_eps, positive=True)
        check_number("HGRN2Config", "lower_bound", config.lower_bound)
        if not 0 <= config.lower_bound < 1:
            raise ValueError(
                f"HGRN2Config: lower_bound must be in [0, 1), got {config.lower_bound}"
            )
        self.config, self.d_model = config, d_model
        self.heads = Heads(d_model // D, d_model // D, D, D)
        self.form = LayerForm(
            feature_map="swish",
            damping=1.0,
            lower_bound=config.lower_bound,
            norm_eps=config.norm_eps,
        )
        self.widths = self.heads.widths
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.norm = RMSNorm(d_model, eps=config.norm_eps)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
        log_bounds: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | None]:
        """Mix (B, T, C) along time; see AbstractMixer.

        `log_bounds` are log β and log(1 - β) of each channel, (2, C) in float32, in place of the
        config's constant β.
        """
        self.check_input(x, state, cu_seqlens, lengths)
        q, logits, v = self.heads.split(self.in_proj(without_padding(x, lengths)), self.widths)
        bound: float | Tensor = self.config.lower_bound
        if log_bounds is not None:
            check_log_bounds("HGRN2", log_bounds, self.d_model, x.device)
            bound = log_bounds
        k, g = bounded_gate(log_gate(logits, 1.0), bound)
        k, v, g = skip_padding(lengths, k.to(v.dtype), v, g)
        first = None if state is None else state.h
        out, h = chunk_gla(F.silu(q), k, v, g, initial_state=first, cu_seqlens=cu_seqlens)
        return self.out_proj(self.norm(out.flatten(2))), None if state is None else GLAState(h)

    def step(self, x: Tensor, state: GLAState, log_bounds: Tensor | None = None) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer.

        `log_bounds` is as in `forward`.
        """
        self.check_step(x, state)
        if not is_plain_norm(self.norm, self.config.norm_eps):
            y, after = self(x, state, log_bounds=log_bounds)
            state.h.copy_(after.h)
            return y
        q, logits, v = self.heads.split(self.in_proj(x[:, 0]), self.widths)
        form = self.form if log_bounds is None else self.form._replace(lower_bound=0.0)
        y = step_gla_layer_(
            q, None, v, logits, state.h, form,
            norm_weight=self.norm.weight, log_bounds=log_bounds,
        )  # fmt: skip
        return self.out_proj(y[:, None])

    def init_state(self, batch: int) -> GLAState:
        """Return the state before the first token."""
        _, H, K, V = self.heads
        return GLAState(state_zeros(self.out_proj.weight, batch, H, K, V))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token: projections 2·4C², update and reading of S 5 C D."""
        return 8 * self.d_model**2 + 5 * self.d_model * self.config.head_dim
