"""A block: a mixer along time and an MLP along channels, each behind a norm and a residual."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mezzo_core.config_json import check_fields
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.contract import AbstractBlock, AbstractMixer, Run, run_eagerly
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.norm import NormKind, build_norm
from mezzo_core.nn.state import Rows
from mezzo_core.ops.checks import check_number
from mezzo_core.ops.padding import without_padding


@dataclass(frozen=True)
class MixerBlockConfig:
    """Describes a `Block`.

    Attributes:
        mixer: the mixer along time.
        mlp: the MLP along channels, after the mixer.
        norm_eps: epsilon of both norms.
        norm: kind of the norms before the mixer and before the MLP.
        residual_scale: r, which multiplies the outputs of both before they are added.
    """

    mixer: MixerConfig
    mlp: MLPConfig = field(default_factory=MLPConfig)
    norm_eps: float = 1e-6
    norm: NormKind = "rms"
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("MixerBlockConfig", "residual_scale", self.residual_scale, positive=True)

    def build(self, d_model: int) -> "Block":
        """Build the block, on torch's default device.

        Raises:
            ValueError: if the mixer does not support this width, or has another.
            TypeError: if `mixer` does not build a mixer.
        """
        mixer = self.mixer.build(d_model)
        if not isinstance(mixer, AbstractMixer):
            raise TypeError(f"{type(self.mixer).__name__} builds no mixer")
        if mixer.d_model != d_model:
            name = type(self.mixer).__name__
            raise ValueError(f"{name} builds a mixer of d_model {mixer.d_model}, not {d_model}")
        mlp = self.mlp.build(d_model)
        return Block(mixer, mlp, d_model, self.norm_eps, self.norm, self.residual_scale)


class AbstractMixerBlock(AbstractBlock):
    """A block around a mixer, whose state is the mixer's; the mixer checks the arguments too."""

    mixer: AbstractMixer

    def before_step(self, state: Any, run: Run = run_eagerly) -> None:
        """Call `before_step` of the mixer."""
        self.mixer.before_step(state, run)

    def check_step(self, x: Tensor, state: Any) -> None:
        """Check the arguments of `step` as the mixer does."""
        self.mixer.check_step(x, state)

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the mixer's state with room for `num_tokens` more tokens, for `step`."""
        return self.mixer.reserve(state, num_tokens)

    def copy_rows(self, state: Any, rows: Tensor | None) -> Any:
        """Return a copy of the mixer's state."""
        return self.mixer.copy_rows(state, rows)

    def reset(self, state: Any, rows: Rows) -> Any:
        """Return a state of the mixer in which some rows are before their first token."""
        return self.mixer.reset(state, rows)

    def overwritten(self) -> tuple[bool, ...]:
        """Tell it as the mixer does."""
        return self.mixer.overwritten()

    def init_state(self, batch: int) -> Any:
        """Return the mixer's state before the first token."""
        return self.mixer.init_state(batch)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence needs after `num_tokens` tokens."""
        return self.mixer.state_bytes(num_tokens)

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that the mixer keeps in the host's memory."""
        return self.mixer.host_state_bytes(num_tokens)

    def without_padding(self, x: Tensor, state: Any, lengths: Tensor | None) -> Tensor:
        """Return x with zeros as padding, because a NaN there would reach the norms' gradients.

        Without gradients x stays as it is: a mixer ignores padding. The norm runs before the mixer
        checks its input, so x is checked here.
        """
        self.check_input(x, None if lengths is None else state, None, lengths)
        return without_padding(x, lengths) if torch.is_grad_enabled() else x


class Block(AbstractMixerBlock):
    """`x + r mixer(norm x)`, then `x + r mlp(norm x)`.

    RMSNorm accumulates in float32 for bf16 and float16 inputs, is one fused kernel on a GPU, and
    keeps the dtype of its input. So under autocast with float32 weights the residual stream stays
    float32, while the mixer and the MLP compute in bf16.
    """

    def __init__(
        self,
        mixer: AbstractMixer,
        mlp: nn.Module,
        d_model: int,
        norm_eps: float = 1e-6,
        norm: NormKind = "rms",
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.residual_scale = residual_scale
        self.mixer_norm = build_norm(norm, d_model, norm_eps)
        self.mixer = mixer
        self.mlp_norm = build_norm(norm, d_model, norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractBlock.forward` says."""
        x = self.without_padding(x, state, lengths)
        mixed, state = self.mixer(self.mixer_norm(x), state, cu_seqlens=cu_seqlens, lengths=lengths)
        return self._finish(x, mixed), state

    def look_ahead(
        self, x: Tensor, state: Any, lengths: Tensor, certain: Tensor
    ) -> tuple[Tensor, Any]:
        """Look ahead with the mixer; all other parts work on each token alone."""
        x = self.without_padding(x, state, lengths)
        mixed, state = self.mixer.look_ahead(self.mixer_norm(x), state, lengths, certain)
        return self._finish(x, mixed), state

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        self.check_input(x, None, None, None)
        return self._finish(x, self.mixer.step(self.mixer_norm(x), state))

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the mixer's output and the MLP's to the residual stream."""
        r = self.residual_scale
        x = x + (mixed if r == 1 else r * mixed)
        h = self.mlp(self.mlp_norm(x))
        return x + (h if r == 1 else r * h)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token of the mixer and the MLP; norms are not counted."""
        mlp_weights = sum(weight.numel() for weight in self.mlp.parameters())
        return self.mixer.flops_per_token(num_tokens) + 2 * mlp_weights
