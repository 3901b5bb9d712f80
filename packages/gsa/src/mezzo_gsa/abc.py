"""ABC, attention with bounded-memory control: GSA's slots without its gates (section 2.2)."""

from dataclasses import dataclass

from mezzo_core.config_json import check_fields
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.padding import without_padding
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo_gsa.gsa import head_width
from mezzo_gsa.heads import state_zeros, swish_and_norm
from mezzo_gsa.ops import ABCState, Reading, chunk_abc, step_abc_
from mezzo_gsa.ops.gates import skip_padding

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ABCConfig:
    """ABC, "w/o decay" in the paper's Table 2, in one of two readings of its description."""

    num_heads: int = 4
    num_slots: int = 64
    """M, the slots of a head's memory."""
    reading: Reading = "text"
    """"text" follows equations 3 and 4: slots sum the tokens, with strengths that shrink as the
    sequence grows. "code" follows the authors' program: slots average the tokens, so older ones
    fade."""
    scaled: bool = False
    """Whether queries are multiplied by D^-1/2, as in the authors' program. The text has no
    scale."""

    def build(self, d_model: int) -> "ABC":
        """Build the mixer.

        Raises:
            ValueError: if a field has a wrong type or value, or the heads do not divide.
        """
        return ABC(self, d_model)


class ABC(AbstractMixer):
    """The ABC mixer: `chunk_abc` with the raw scores x Wφ, between projections.

    The paper only says that ABC is its model without decay, so everything else is as in GSA: swish
    on q, k and v, swish and RMSNorm on the output, one projection (`in_proj` with the rows of Wq,
    Wk, Wv and Wφ in this order, by head), no bias.
    """

    state_type = ABCState

    def __init__(self, config: ABCConfig, d_model: int) -> None:
        super().__init__()
        check_fields(config)
        H, M = config.num_heads, config.num_slots
        check_size("ABCConfig", "num_heads", H)
        check_size("ABCConfig", "num_slots", M)
        self.head_dim = head_width(d_model, H)
        self.scale = self.head_dim**-0.5 if config.scaled else 1.0
        self.config, self.d_model = config, d_model
        self.widths = (d_model, d_model, d_model, H * M)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: ABCState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ABCState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        q, k, v, s = self._project(without_padding(x, lengths))
        k, v = skip_padding(lengths, k, v)
        (s,) = skip_padding(lengths, s, fill=float("-inf"))
        out, after = chunk_abc(
            q, k, v, s, reading=self.config.reading, scale=self.scale,
            initial_state=state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self._output(out), None if state is None else after

    def step(self, x: Tensor, state: ABCState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        self.check_step(x, state)
        q, k, v, s = self._project(x[:, 0])
        out = step_abc_(q, k, v, s, state, reading=self.config.reading, scale=self.scale)
        return self._output(out)[:, None]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (..., H, D) and the scores s (..., H, M)."""
        parts = self.in_proj(x).split(self.widths, dim=-1)
        *qkv, s = (part.unflatten(-1, (self.config.num_heads, -1)) for part in parts)
        q, k, v = (F.silu(part) for part in qkv)
        return q, k, v, s

    def _output(self, out: Tensor) -> Tensor:
        return self.out_proj(swish_and_norm(self.norm, NORM_EPS, out))

    def init_state(self, batch: int) -> ABCState:
        """Return the state before the first token: empty memories and empty sums."""
        weight = self.out_proj.weight
        shape = (batch, self.config.num_heads, self.config.num_slots)
        k, v = (state_zeros(weight, *shape, self.head_dim) for _ in range(2))
        return ABCState(k, v, state_zeros(weight, *shape).fill_(float("-inf")))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token: projections, the update of the state, 4 M C to read it.

        Each number of the state is updated by h + s x ("text") or α h + s x ("code"). Activations,
        the running sum, softmax and norm are not counted.
        """
        MC = self.config.num_slots * self.d_model
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        update = 2 if self.config.reading == "text" else 3
        return 2 * weights + update * 2 * MC + 4 * MC
