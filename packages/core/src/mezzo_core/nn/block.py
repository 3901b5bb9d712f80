"""A block: a mixer along time and an MLP along channels, each behind a norm and a residual."""

from typing import Any

from torch import Tensor, nn

from mezzo_core.nn.mixer import AbstractMixer


class Block(nn.Module):
    """`x + mixer(norm x)`, then `x + mlp(norm x)`.

    The norms are torch's own `RMSNorm`: it accumulates in float32 for bf16 and float16 inputs, is
    one fused kernel on a GPU, and keeps the dtype of its input, so that under autocast with float32
    weights the residual stream stays float32 while the mixer and the MLP compute in bf16.
    """

    def __init__(
        self, mixer: AbstractMixer, mlp: nn.Module, d_model: int, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Map (B, T, C) to (B, T, C); the arguments and the state are the mixer's."""
        mixed, state = self.mixer(self.mixer_norm(x), state, cu_seqlens=cu_seqlens, lengths=lengths)
        x = x + mixed
        x = x + self.mlp(self.mlp_norm(x))
        return x, state

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        x = x + self.mixer.step(self.mixer_norm(x), state)
        return x + self.mlp(self.mlp_norm(x))

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the mixer's state with room for `num_tokens` more tokens, for `step`."""
        return self.mixer.reserve(state, num_tokens)

    def init_state(self, batch: int) -> Any:
        """Return the mixer's state before the first token."""
        return self.mixer.init_state(batch)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence needs after `num_tokens` tokens."""
        return self.mixer.state_bytes(num_tokens)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token of the mixer and the MLP's matrices (norms left out)."""
        mlp_weights = sum(weight.numel() for weight in self.mlp.parameters())
        return self.mixer.flops_per_token(num_tokens) + 2 * mlp_weights
