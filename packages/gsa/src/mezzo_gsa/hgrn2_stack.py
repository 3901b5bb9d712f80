"""HGRN2 as a stack: the lower bounds of its layers' forget gates are learned together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractStack, Stack
from mezzo_core.nn.block import Block
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor, nn

from mezzo_gsa.gla import GLAState
from mezzo_gsa.hgrn2 import HGRN2, HGRN2Config

State = tuple[GLAState, ...]


@dataclass(frozen=True)
class HGRN2StackConfig:
    """Describes an `HGRN2Stack`.

    Attributes:
        num_layers: at least 2, since the lowest layer has no bound.
        mixer: of every layer; its `lower_bound` must be 0, as the stack has the bounds.
        mlp: of every layer.
        norm_eps: epsilon of the layers' norms.
    """

    num_layers: int
    mixer: HGRN2Config = field(default_factory=HGRN2Config)
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig("swiglu"))
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)
        check_size("HGRN2StackConfig", "num_layers", self.num_layers, 2)
        check_number("HGRN2StackConfig", "norm_eps", self.norm_eps, positive=True)
        if self.mixer.lower_bound != 0:
            raise ValueError(
                "HGRN2StackConfig: mixer must have lower_bound 0, as the stack learns the bounds, "
                f"got {self.mixer.lower_bound}"
            )

    def build(self, d_model: int) -> "HGRN2Stack":
        """Build the stack, on torch's default device; a ValueError if heads do not divide C."""
        return HGRN2Stack(self, d_model)


class HGRN2Stack(Stack):
    """HGRN2 layers whose upper ones remember longer, by learned bounds (arXiv:2404.07904).

    For each channel, the lower bound of a layer's forget gates is the sum over the layers below of
    a softmax over all layers: β[l] = Σ_{i<l} softmax(Γ)[i]. So the lowest layer has β = 0. Γ, the
    parameter `bound_logits`, starts at zero, and so the bounds at l / num_layers, which
    `mezzo_gsa.hgrn2.lower_bounds` gives as constants.
    """

    blocks: "Sequence[BoundedBlock]"

    # `Stack` would look ahead without the bounds, and check the state layer by layer.
    look_ahead = AbstractStack.look_ahead
    check_step = AbstractStack.check_step

    def __init__(self, config: HGRN2StackConfig, d_model: int) -> None:
        blocks = [
            BoundedBlock(
                config.mixer.build(d_model), config.mlp.build(d_model), d_model, config.norm_eps
            )
            for _ in range(config.num_layers)
        ]
        super().__init__(blocks, d_model)
        self.config = config
        # One-dimensional, so without weight decay, which would pull the bounds to their start.
        self.bound_logits = nn.Parameter(torch.zeros(config.num_layers * d_model))

    @torch.no_grad()
    def init_own_weights(self) -> None:
        """Start with bounds in equal steps."""
        self.bound_logits.zero_()

    def log_bounds(self) -> list[Tensor | None]:
        """Return each layer's log β and log(1 - β), (2, C) in float32; None for the lowest, β = 0.

        Both are sums of the softmax's shares, so that neither loses digits.
        """
        dtype = accumulation_dtype(self.bound_logits.dtype)
        shares = self.bound_logits.to(dtype).view(-1, self.d_model).log_softmax(0)
        below = shares.logcumsumexp(0)[:-1]
        rest = shares.flip(0).logcumsumexp(0).flip(0)[1:]
        return [None, *torch.stack([below, rest], 1)]

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """Map (B, T, C) to (B, T, C); see `AbstractStack.forward`."""
        self.check_input(x, state, cu_seqlens, lengths)
        before = (None,) * len(self.blocks) if state is None else state
        after = []
        for block, bounds, its in zip(self.blocks, self.log_bounds(), before, strict=True):
            x, new = block(x, its, bounds, cu_seqlens=cu_seqlens, lengths=lengths)
            after.append(new)
        return x, None if state is None else tuple(after)

    def step(self, x: Tensor, state: State) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        self.check_step(x, state)
        for block, bounds, its in zip(self.blocks, self.log_bounds(), state, strict=True):
            x = block.step(x, its, bounds)
        return x


class BoundedBlock(Block):
    """A layer of an `HGRN2Stack`: core's `Block`, whose mixer also gets its lower bounds."""

    mixer: HGRN2

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        log_bounds: Tensor | None = None,  # reentrant checkpoints need it among these
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | None]:
        """Map (B, T, C) to (B, T, C); see `AbstractBlock.forward`, and `HGRN2` for `log_bounds`."""
        x = self.without_padding(x, state, lengths)
        mixed, state = self.mixer(
            self.mixer_norm(x), state, cu_seqlens=cu_seqlens, lengths=lengths, log_bounds=log_bounds
        )
        return self._finish(x, mixed), state

    def step(self, x: Tensor, state: GLAState, log_bounds: Tensor | None = None) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        return self._finish(x, self.mixer.step(self.mixer_norm(x), state, log_bounds))
