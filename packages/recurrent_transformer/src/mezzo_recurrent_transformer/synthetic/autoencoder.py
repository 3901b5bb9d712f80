"""MAD's model for compression: a layer reads a row, and its last token alone tells the whole row.

    z = encoder(x)[last];   y[i] = GELU(W2 norm(GELU(W1 norm(z + p[i]))))

p[i] is the fixed code of a position by sines and cosines. The paper says only that it keeps MAD's
models, so this is our reading of its runs: the encoder is the one layer under comparison.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractStack, BlockConfig
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm
from mezzo_core.ops.checks import check_number, check_size
from torch import Tensor, nn


@dataclass(frozen=True)
class AutoEncoderConfig:
    """Describes an `AutoEncoder`.

    Attributes:
        encoder: the layer that reads the row.
        norm_eps: epsilon of the decoder's norms.
    """

    encoder: BlockConfig
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("AutoEncoderConfig", "norm_eps", self.norm_eps, positive=True)

    def build(self, d_model: int) -> "AutoEncoder":
        """Build the stack, on torch's default device; a ValueError if d_model is odd."""
        check_size("AutoEncoderConfig", "d_model", d_model)
        if d_model % 2:
            raise ValueError(f"d_model must be even, for sines and cosines, got {d_model}")
        return AutoEncoder(d_model, self)


class AutoEncoder(AbstractStack):
    """Tells each token of a row from the encoder's output at the last one.

    So it is not causal, predicts no next token, and has no state. It refuses states and packed
    rows, and cannot decode.
    """

    def __init__(self, d_model: int, config: AutoEncoderConfig) -> None:
        super().__init__()
        self.d_model = d_model
        self.encoder = config.encoder.build(d_model)
        self.decoder = nn.Sequential(
            *(
                part
                for _ in range(2)
                for part in (
                    RMSNorm(d_model, config.norm_eps),
                    Linear(d_model, d_model, bias=False),
                    nn.GELU(),
                )
            )
        )

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Map whole rows (B, T, C) to (B, T, C).

        Raises:
            ValueError: also if there is a state, or rows are packed.
        """
        if state is not None:
            _refuse()
        self.check_input(x, None, cu_seqlens, lengths)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None: an autoencoder takes one sequence a row")
        z, _ = self.encoder(x)
        return self.decoder(z[:, -1:] + _positions(x)), None

    def init_state(self, batch: int) -> NoReturn:
        """Raise a ValueError: there is no state."""
        _refuse()

    def state_bytes(self, num_tokens: int) -> int:
        """Return 0: there is no state."""
        return 0

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token, 2 for each weight of the decoder."""
        return self.encoder.flops_per_token(num_tokens) + 4 * self.d_model**2


def _refuse() -> NoReturn:
    raise ValueError("state must be None: an autoencoder reads whole rows and has no state")


def _positions(x: Tensor) -> Tensor:
    """Return the codes of x's positions, (T, C): sines of half the channels, then cosines."""
    T, C = x.shape[1:]
    places = torch.arange(T, device=x.device, dtype=torch.float32)
    rates = 10_000 ** (-torch.arange(C // 2, device=x.device, dtype=torch.float32) * 2 / C)
    angles = torch.outer(places, rates)
    return torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)
