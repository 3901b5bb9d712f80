"""Outside encoders: they see the tokens of a chunk and say which chunks are alike, untrained.

So the baseline RPT with Contriever retrieves (appendix E), and DRT "w/ contriever" (Table 1).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.ops.checks import check_floating, check_size
from torch import Tensor, nn


class AbstractOutsideEncoder(nn.Module, ABC):
    """Makes a vector of each chunk, which is compared with others by its cosine.

    It runs without gradients, so no training changes its weights. It is always in evaluation mode:
    dropout would draw other vectors of the same chunk. Of chunks with equal vectors the earliest is
    read first. Where rounding makes the vectors of repeated chunks differ from call to call, which
    of them is read may depend on how a sequence is cut into segments.
    """

    width: int
    """K, the width of a token's vector and of a chunk's."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Return what a chunk's vector is made of: tokens (B, T) give (B, T, K)."""

    @abstractmethod
    def forward(self, chunks: Tensor) -> Tensor:
        """Return the vectors of chunks, (B, N, L, K) to (B, N, K), each chunk alone."""

    def train(self, mode: bool = True) -> "AbstractOutsideEncoder":
        """Stay in evaluation mode, whatever the mode of the model becomes."""
        return super().train(False)

    def load(self) -> None:
        """Load weights that were trained before; called when those of a new model are drawn."""


class OutsideConfig(Protocol):
    """A frozen dataclass that describes an outside encoder and builds it."""

    def build(self) -> AbstractOutsideEncoder:
        """Build the encoder, on torch's default device."""
        ...


@dataclass(frozen=True)
class BagOfTokensConfig:
    """Describes a `BagOfTokens`.

    Attributes:
        num_vectors: tokens that differ by a multiple of it share a vector.
        width: K.
    """

    num_vectors: int = 2**16
    width: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_vectors", "width"):
            check_size("BagOfTokensConfig", name, getattr(self, name))

    def build(self) -> "BagOfTokens":
        """Build the encoder."""
        return BagOfTokens(self)


class BagOfTokens(AbstractOutsideEncoder):
    """The mean of random vectors of a chunk's tokens: chunks with the same tokens are alike."""

    def __init__(self, config: BagOfTokensConfig) -> None:
        super().__init__()
        self.width = config.width
        self.vectors = nn.Embedding(config.num_vectors, config.width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the vector of each token."""
        return self.vectors(tokens % self.vectors.num_embeddings)

    def forward(self, chunks: Tensor) -> Tensor:
        """Return the mean over each chunk's tokens."""
        return chunks.mean(2)


def build_outside(config: OutsideConfig | None) -> AbstractOutsideEncoder | None:
    """Build an outside encoder, without gradients; None for none.

    Raises:
        TypeError: if the configuration builds something else, or its width is no int.
        ValueError: if its width is below 1.
    """
    if config is None:
        return None
    encoder = config.build()
    if not isinstance(encoder, AbstractOutsideEncoder):
        raise TypeError(
            f"outside must build an AbstractOutsideEncoder, got {type(encoder).__name__} "
            f"from {type(config).__name__}"
        )
    check_size(type(encoder).__name__, "width", getattr(encoder, "width", None))
    return encoder.requires_grad_(False).eval()


def _check_vectors(encoder: AbstractOutsideEncoder, method: str, x: Any, *sizes: int) -> None:
    """Check what a method of the encoder has returned."""
    name = type(encoder).__name__
    check_floating(name, f"what {method} returns", x)
    if x.shape != (*sizes, encoder.width):
        raise ValueError(
            f"{name}: what {method} returns must be {(*sizes, encoder.width)}, got {tuple(x.shape)}"
        )


def embed(tokens: Tensor, encoder: AbstractOutsideEncoder) -> Tensor:
    """Return the encoder's vectors of tokens (B, T), (B, T, K).

    Raises:
        TypeError, ValueError: if the encoder returns something else.
    """
    found = encoder.embed(tokens)
    _check_vectors(encoder, "embed", found, *tokens.shape)
    return found


def divide(x: Tensor, d_model: int, encoder: AbstractOutsideEncoder | None) -> list[Tensor]:
    """Divide a stack's input (B, T, C + K) into the embedding and, with an encoder, its part.

    Raises:
        TypeError: if x is not a floating-point tensor.
        ValueError: if the width is another.
    """
    if encoder is None:
        return [x]
    check_floating("DRT", "x", x)
    widths = [d_model, encoder.width]
    if x.ndim != 3 or x.shape[-1] != sum(widths):
        raise ValueError(f"x must be (B, T, {d_model} + {encoder.width}), got {tuple(x.shape)}")
    return list(x.split(widths, -1))


@torch.no_grad()
def outside_keys(chunks: Tensor, encoder: AbstractOutsideEncoder) -> Tensor:
    """Return the keys of retrieval (B, N, K) of chunks (B, N, L + 1, K), normalized.

    Raises:
        TypeError, ValueError: if the encoder returns something else.
    """
    keys = encoder(chunks[:, :, :-1])
    _check_vectors(encoder, "forward", keys, *chunks.shape[:2])
    return nn.functional.rms_norm(keys, keys.shape[-1:], eps=1e-6)
